// Linears on the tile registers of AMX: 16 rows by 16 columns, one group of k at a time.
//
// The levels of a panel are unpacked once into a scratch that stays in the first-level cache, and serve all rows of the
// task. The sums of a group are stored from their tile, and added as floats to the chains of 16 rows, which stay in
// vector registers while the matrix unit works on the next groups.
// 16-bit activations are taken as they lie: their high bytes (signed) meet levels at odd places, their low bytes
// (unsigned) levels at even ones, and the sum is 256 high + low.
//
// Fewer rows and other forms are left to the table for AVX-512: P8K's groups are too short for a tile.
#include "kernels/linear_task.inl"
#include "kernels/panel_avx512.inl"

static constexpr int kTileHeight = 16;
static constexpr int kMaxRows = 128;  // that share unpacked levels: their chains are 8 KiB

static constexpr bool has_tiles(Packed f) {
    return !is_float(f) && scales_per_group(f) == 1;
}

// Some consecutive groups of one panel: levels as tiles, for low and for high bytes where activations have two.
template <Packed F, class T>
struct Scratch {
    static constexpr int kGroups = sizeof(T) == 1 ? 32 : 8;  // 16 KiB of levels
    static constexpr int kParts = sizeof(T);
    static constexpr int kRows = kGroup * sizeof(T) / 4;  // of 4 levels for each of 16 columns
    alignas(64) uint8_t levels[kGroups][kParts][kRows][64];
    alignas(64) float d[kGroups][kPanel];
    alignas(64) float m[has_minimum(F) ? kGroups : 1][kPanel];
};

template <Packed F>
static inline void put_levels(int8_t, const uint8_t* q, __m512i list, uint8_t (*out)[8][64]) {
    POTOK_UNROLL for (int step = 0; step < 8; step++) {
        const __m512i v = levels_of<F>(int8_t(), q, list, step);
        _mm512_store_si512(out[0][step], _mm512_sub_epi8(v, _mm512_set1_epi8(zero_point(F))));
    }
}

template <Packed F>
static inline void put_levels(int16_t, const uint8_t* q, __m512i list, uint8_t (*out)[16][64]) {
    POTOK_UNROLL for (int step = 0; step < 16; step++) {
        const __m512i bytes = _mm512_sub_epi8(levels_of<F>(int16_t(), q, list, step), _mm512_set1_epi16(zero_point(F)));
        // Signed bytes come with the upper half of their 16 bits filled.
        const __m512i v = has_small_levels(F) ? bytes : _mm512_and_si512(bytes, _mm512_set1_epi16(255));
        _mm512_store_si512(out[0][step], v);
        _mm512_store_si512(out[1][step], _mm512_slli_epi16(v, 8));
    }
}

template <Packed F, class T>
static inline void unpack(const uint8_t* panel, int first, int groups, Scratch<F, T>& out) {
    const __m512i list = list_of<F>(panel);
    for (int g = 0; g < groups; g++) {
        put_levels<F>(T(), panel + qblock_at(F, first + g), list, out.levels[g]);
        const Scales w = scales_of<F>(panel, first + g, 0);
        store(out.d[g], w.d);
        if (has_minimum(F)) store(out.m[g], w.m);
    }
}

// Sums of one group, of low and of high bytes.
template <class T>
struct Sums {
    alignas(64) int32_t v[sizeof(T)][kTileHeight][kPanel];
};

// Tiles 0..3 hold sums, 4 and 5 activations, 6 and 7 levels. There are two sets of sums: the products of a group are
// begun two groups before their sums are wanted.
template <int Set>
static inline void begin(const int8_t* x, size_t stride, const uint8_t (*levels)[8][64]) {
    zero_tile<Set>();
    load_tile<4 + Set>(x, stride);
    load_tile<6 + Set>(levels[0], 64);
    dot_tiles<Set, 4 + Set, 6 + Set, int8_t>();
}

template <int Set>
static inline void begin(const int16_t* x, size_t stride, const uint8_t (*levels)[16][64]) {
    zero_tile<Set>();
    zero_tile<2 + Set>();
    load_tile<4 + Set>(x, stride);
    load_tile<6>(levels[0], 64);
    load_tile<7>(levels[1], 64);
    dot_tiles<Set, 4 + Set, 6, uint8_t>();
    dot_tiles<2 + Set, 4 + Set, 7, int8_t>();
}

template <int Set, class T>
static inline void end(Sums<T>& sums) {
    store_sums<Set>(sums.v[0][0]);
    if (sizeof(T) == 2) store_sums<2 + Set>(sums.v[sizeof(T) - 1][0]);
}

// The floats of a row of sums (of the low bytes, where there are two).
static inline Lanes total(int8_t, const int32_t* sums) {
    return _mm512_cvtepi32_ps(load_i512(sums));
}
static inline Lanes total(int16_t, const int32_t* sums) {
    const __m512i high = _mm512_slli_epi32(load_i512(sums + kTileHeight * kPanel), 8);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(high, load_i512(sums)));
}

// The chains of the last Rows of a tile, over `groups` groups: from 0, or from what acc holds. a: from the first of
// these rows and groups on. ahead: as many qblocks that will be wanted soon, or null.
template <Packed F, int Rows, class T>
static void chains(const Scratch<F, T>& w, const IntRows<T>& a, int k, int groups, bool from_zero, float* acc,
                   const uint8_t* ahead) {
    constexpr int above = kTileHeight - Rows;
    const size_t stride = k * sizeof(T);
    const T* x = a.q - (size_t)above * k;
    Addresses<float, Rows> d(a.d, k / kGroup), s(a.s, k / kGroup);
    Lanes sum[Rows];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) sum[r] = from_zero ? set1(0) : load(acc + r * kPanel);
    Sums<T> sums;
    begin<0>(x, stride, w.levels[0]);
    if (groups > 1) begin<1>(x + kGroup, stride, w.levels[1]);
    for (int g = 0; g < groups; g++, x += kGroup) {
        const T* next = x + 2 * kGroup;
        if (g % 2) {
            end<1>(sums);
            if (g + 2 < groups) begin<1>(next, stride, w.levels[g + 2]);
        } else {
            end<0>(sums);
            if (g + 2 < groups) begin<0>(next, stride, w.levels[g + 2]);
        }
        const int32_t* from = sums.v[0][above];
        POTOK_KEEP_ADDRESS(from);
        const Lanes wd = load(w.d[g]);
        Lanes wm;
        if (has_minimum(F)) wm = load(w.m[g]);
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            if (has_minimum(F)) sum[r] = fma(wm, broadcast(s[r]), sum[r]);
            sum[r] = fma(mul(wd, broadcast(d[r])), total(T(), from + r * kPanel), sum[r]);
        }
        d.advance(1);
        if (has_minimum(F)) s.advance(1);
        if (ahead) {
            for (int i = 0; i < qblock_bytes(F); i += 64) _mm_prefetch((const char*)ahead + i, _MM_HINT_T0);
            ahead += qblock_bytes(F);
        }
    }
    POTOK_UNROLL for (int r = 0; r < Rows; r++) store(acc + r * kPanel, sum[r]);
}

template <class T>
static void configure() {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = i == 4 || i == 5 ? kGroup * sizeof(T) : 64;
        shapes.rows[i] = i < 6 ? kTileHeight : kGroup * sizeof(T) / 4;
    }
    configure_tiles(shapes);
}

// At least 16 rows: those that are left when tiles are full make one more with the rows above them, of whose chains
// only the last 4, 8, 12 or 16 are formed, and only theirs stored.
template <Packed F, class T>
static void linear_of(const LinearTask& t, const IntRows<T>& acts) {
    using S = Scratch<F, T>;
    const int k = t.weight->k, all = k / kGroup, parts = (all + S::kGroups - 1) / S::kGroups;
    const int part = (all + parts - 1) / parts;
    alignas(64) float acc[kMaxRows + kTileHeight][kPanel];
    S w;
    configure<T>();
    for (int row0 = t.row0; row0 < t.row1; row0 += kMaxRows) {
        const int rows = t.row1 - row0 < kMaxRows ? t.row1 - row0 : kMaxRows;
        const int full = rows / kTileHeight * kTileHeight, left = rows - full, last = (left + 3) / 4 * 4;
        for (int panel = t.panel0; panel < t.panel1; panel++) {
            const uint8_t* data = t.weight->data + (size_t)panel * panel_bytes(F, k);
            prefetch_out(t, row0, rows, panel);
            for (int g = 0; g < all; g += part) {
                const int groups = all - g < part ? all - g : part;
                unpack<F, T>(data, g, groups, w);
                const uint8_t* ahead = data + qblock_at(F, g + part);
                const auto from = [&](int row) {
                    IntRows<T> a = from_row(acts, row0 + row, k);
                    a.q += g * kGroup, a.d += g, a.s += g;
                    return a;
                };
                for (int row = 0; row < full; row += kTileHeight) {
                    chains<F, 16>(w, from(row), k, groups, g == 0, acc[row], row ? 0 : ahead);
                }
                if (last == 4) chains<F, 4>(w, from(rows - 4), k, groups, g == 0, acc[full], full ? 0 : ahead);
                if (last == 8) chains<F, 8>(w, from(rows - 8), k, groups, g == 0, acc[full], full ? 0 : ahead);
                if (last == 12) chains<F, 12>(w, from(rows - 12), k, groups, g == 0, acc[full], full ? 0 : ahead);
                if (last == 16) chains<F, 16>(w, from(rows - 16), k, groups, g == 0, acc[full], full ? 0 : ahead);
            }
            store_tile(t, acc[0], row0, full, panel);
            store_tile(t, acc[full + last - left], row0 + full, left, panel);
        }
    }
    release_tiles();
}

static void linear(const LinearTask& t) {
    if (!has_tiles(t.weight->format) || t.row1 - t.row0 < kTileHeight) return avx512vnni::kernels().linear(t);
    switch (t.weight->format) {
#define POTOK_LINEAR(form)                                                 \
    case Packed::form:                                                     \
        if constexpr (has_tiles(Packed::form)) {                           \
            if constexpr (has_small_levels(Packed::form)) {                \
                if (t.weight->act == Act::A8) {                            \
                    return linear_of<Packed::form, int8_t>(t, t.acts->a8); \
                }                                                          \
            }                                                              \
            linear_of<Packed::form, int16_t>(t, t.acts->a16);              \
        }                                                                  \
        break;
        POTOK_FORMS(POTOK_LINEAR)
#undef POTOK_LINEAR
    }
}
