// Linears over packed panels. A task covers rows [row0, row1) and panels [panel0, panel1); one tile is up to
// kTileHeight rows by 16 columns, and every output is one chain of operations over k ascending (docs/numerics.md), so
// the tiling cannot be seen in the result. Each ISA gives kTileHeight and three tiles, all with acc[row * 16 + column]:
//   tile_a8, tile_a16 <form, rows>(panel, rows of integers, k, acc), tile_float <form, rows>(panel, rows, k, acc).
// Included inside the namespace of an ISA, after lanes.h and decode.inl.

#include "kernels/linear_task.inl"
//
#if defined(POTOK_AVX2)
#include "kernels/linear_avx2.inl"
#include "kernels/linear_avx2_unpacked.inl"
#elif defined(POTOK_AVX512)
#include "kernels/linear_avx512.inl"
#else
#include "kernels/linear_scalar.inl"
#endif

template <Packed F, Act A, int Rows>
static inline void tile(const LinearTask& t, int row, int panel) {
    const int k = t.weight->k;
    const uint8_t* data = t.weight->data + (size_t)panel * panel_bytes(F, k);
    alignas(64) float acc[Rows * kPanel];
    if constexpr (A == Act::A8) {
        tile_a8<F, Rows>(data, from_row(t.acts->a8, row, k), k, acc);
    } else if constexpr (A == Act::A16) {
        tile_a16<F, Rows>(data, from_row(t.acts->a16, row, k), k, acc);
    } else {
        tile_float<F, Rows>(data, t.acts->f32 + (size_t)row * k, k, acc);
    }
    store_tile(t, acc, row, Rows, panel);
}

template <Packed F, Act A, int Rows>
static inline void tile_of(int rows, const LinearTask& t, int row, int panel) {
    if constexpr (Rows > 0) {
        if (rows == Rows) {
            tile<F, A, Rows>(t, row, panel);
        } else {
            tile_of<F, A, Rows - 1>(rows, t, row, panel);
        }
    }
}

// Tiles of like height: a lone row reads as many weights as a whole tile.
template <Packed F, Act A>
static void linear_of(const LinearTask& t) {
#if defined(POTOK_AVX2)
    if (t.row1 - t.row0 >= unpack_rows(F)) return linear_unpacked<F, A>(t);
#endif
    for (int panel = t.panel0; panel < t.panel1; panel++) {
        for (int row = t.row0; row < t.row1;) {
            const int rows = even_part(t.row1 - row, kTileHeight);
            tile_of<F, A, kTileHeight>(rows, t, row, panel);
            row += rows;
        }
    }
}

// Float weights take float activations, 8-bit ones 16-bit activations, the others what was chosen for the tensor.
static void linear(const LinearTask& t) {
    switch (t.weight->format) {
#define POTOK_LINEAR(form)                                     \
    case Packed::form:                                         \
        if constexpr (is_float(Packed::form)) {                \
            linear_of<Packed::form, Act::F32>(t);              \
        } else if constexpr (has_small_levels(Packed::form)) { \
            if (t.weight->act == Act::A8) {                    \
                linear_of<Packed::form, Act::A8>(t);           \
            } else {                                           \
                linear_of<Packed::form, Act::A16>(t);          \
            }                                                  \
        } else {                                               \
            linear_of<Packed::form, Act::A16>(t);              \
        }                                                      \
        break;
        POTOK_FORMS(POTOK_LINEAR)
#undef POTOK_LINEAR
    }
}
