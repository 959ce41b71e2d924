// Tensors of a file into panels of 16 columns (kernels/packed.h); lossless.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/packed.h"

namespace potok {

// Tensor types of GGUF files that have a packed form, and two that stand in no file: what the others are rewritten as.
// Layouts of their qblocks: pack.cpp.
enum class Source : int32_t {
    ListedK = -2,
    Listed = -1,
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    BF16 = 30,
};

// Throws std::invalid_argument for a type that has none.
Packed packed_form(Source source);
// k is a multiple of the type's qblock.
size_t source_row_bytes(Source source, int k);
int source_qblock(Source source);

// Packs panels [panel0, panel1) of a [n][k] tensor whose rows lie one after the other at `rows`; the columns past n
// of the last panel are zero. `out` is zeroed memory of panel_bytes() each panel.
void pack_panels(Source source, const uint8_t* rows, int n, int k, int panel0, int panel1, uint8_t* out);

}  // namespace potok
