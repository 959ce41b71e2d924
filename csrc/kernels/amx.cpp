// The table for AMX: that for AVX-512 with linears of its own. This file alone is compiled for both; with POTOK_SIMDE
// for AVX2, on top of SIMDe and of tiles in plain C++.
#define POTOK_ISA amx
#define POTOK_AVX512
#include "kernels/lanes.h"
#include "kernels/table.h"
#include "kernels/tiles.h"

namespace potok {
namespace amx {

#include "kernels/linear_amx.inl"

static Kernels with_tiles(Kernels table) {
    table.isa = "amx";
    table.linear = linear;
    return table;
}

const Kernels& kernels() {
    static const Kernels table = with_tiles(avx512vnni::kernels());
    return table;
}

}  // namespace amx
}  // namespace potok
