// The table for AVX-VNNI: that for AVX2 with linears whose multiply-adds of whole numbers are one instruction. For CPUs
// that have these without AVX-512.
#define POTOK_ISA avxvnni
#define POTOK_AVX2
#define POTOK_AVXVNNI
#include "kernels/lanes.h"
#include "kernels/table.h"

namespace potok {
namespace avxvnni {

#include "kernels/linear.inl"

static Kernels with_dot_products(Kernels table) {
    table.isa = "avxvnni";
    table.linear = linear;
    return table;
}

const Kernels& kernels() {
    static const Kernels table = with_dot_products(avx2::kernels());
    return table;
}

}  // namespace avxvnni
}  // namespace potok
