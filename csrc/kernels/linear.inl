// Linears over packed panels. A task covers rows [row0, row1) and panels [panel0, panel1); one tile is up to kTile
// rows by 16 columns, and every output is one chain of operations over k ascending (docs/numerics.md), so the tiling
// cannot be seen in the result. Tile functions are named tile_<weight>_<activation>; the integer ones differ per ISA.
// Included inside the namespace of an ISA, after lanes.h.

// acc[r * 16 + c] += the chain of panel `w` and `rows` rows of activations starting at `row`.
#if defined(POTOK_AVX2)
#include "kernels/linear_avx2.inl"
#else
#include "kernels/linear_scalar.inl"
#endif

static inline void store_tile(const LinearTask& t, const float* acc, int row, int rows, int panel) {
    const int column = panel * kPanel;
    const int n = t.weight->n - column < kPanel ? t.weight->n - column : kPanel;
    for (int r = 0; r < rows; r++) {
        float* out = t.out + (size_t)(row + r) * t.ld_out + column;
        const float* a = acc + r * kPanel;
        const float* residual = t.residual ? t.residual + (size_t)(row + r) * t.ld_residual + column : 0;
        if (n == kPanel) {
            Lanes v = load(a);
            if (t.bias) v = add(v, load(t.bias + column));
            if (residual) v = add(v, load(residual));
            store(out, v);
        } else {
            for (int c = 0; c < n; c++) {
                float v = a[c];
                if (t.bias) v = v + t.bias[column + c];
                if (residual) v = v + residual[c];
                out[c] = v;
            }
        }
    }
}

template <int Rows>
static inline void tile(const LinearTask& t, int row, int panel) {
    const PackedWeight& w = *t.weight;
    const ActRows& a = *t.acts;
    const uint8_t* data = w.data + (size_t)panel * w.panel_bytes;
    const int groups = w.k / kGroup;
    const size_t at = (size_t)row * w.k, group_at = (size_t)row * groups;
    alignas(64) float acc[Rows * kPanel];
    if (w.format == Packed::P4M && w.act == Act::A8) {
        tile_p4m_a8<Rows>(data, a.a8 + at, a.a8_d + group_at, a.a8_s + group_at, w.k, acc);
    } else if (w.format == Packed::P4M) {
        tile_p4m_a16<Rows>(data, a.a16 + at, a.a16_d + group_at, a.a16_s + group_at, w.k, acc);
    } else if (w.format == Packed::P8) {
        tile_p8_a16<Rows>(data, a.a16 + at, a.a16_d + group_at, w.k, acc);
    } else if (w.format == Packed::F16) {
        tile_f16<Rows>((const uint16_t*)data, a.f32 + at, w.k, acc);
    } else {
        tile_f32<Rows>((const float*)data, a.f32 + at, w.k, acc);
    }
    store_tile(t, acc, row, Rows, panel);
}

static void linear(const LinearTask& t) {
    for (int panel = t.panel0; panel < t.panel1; panel++) {
        int row = t.row0;
        for (; row + 4 <= t.row1; row += 4) tile<4>(t, row, panel);
        switch (t.row1 - row) {
            case 3:
                tile<3>(t, row, panel);
                break;
            case 2:
                tile<2>(t, row, panel);
                break;
            case 1:
                tile<1>(t, row, panel);
                break;
            default:
                break;
        }
    }
}
