// Tensors of a file into panels of 16 columns (kernels/table.h); lossless.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/table.h"

namespace potok {

// Tensor types of GGUF files that have a packed form of their own.
enum class Source : int32_t { F32 = 0, F16 = 1, Q4_1 = 3, Q8_0 = 8 };

Packed packed_form(Source source);
size_t panel_bytes(Packed format, int k);
size_t source_row_bytes(Source source, int k);

// Packs panels [panel0, panel1) of a [n][k] tensor whose rows lie one after the other at `rows`; the columns past n
// of the last panel are zero. `out` is zeroed memory of panel_bytes() each panel.
void pack_panels(Source source, const uint8_t* rows, int n, int k, int panel0, int panel1, uint8_t* out);

}  // namespace potok
