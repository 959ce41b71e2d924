// One table of kernels, for the ISA that the including translation unit names.
#include "kernels/lanes.h"
#include "kernels/table.h"

#define POTOK_STRING2(x) #x
#define POTOK_STRING(x) POTOK_STRING2(x)

namespace potok {
namespace POTOK_ISA {

#include "kernels/math.inl"
//
#include "kernels/attention.inl"
#include "kernels/decode.inl"
#include "kernels/elementwise.inl"
#include "kernels/linear.inl"
#include "kernels/sampling.inl"

const Kernels& kernels() {
    static const Kernels table = {POTOK_STRING(POTOK_ISA),
                                  linear,
                                  rms_norm,
                                  quantize_a8,
                                  quantize_a16,
                                  swiglu,
                                  rope_kv,
                                  attention,
                                  unpack_row,
                                  sample_row};
    return table;
}

}  // namespace POTOK_ISA
}  // namespace potok
