// The same chains in AVX-512 with VNNI: a register holds 16 columns, and sums stay in registers over all of k.
// Activations are broadcast from memory by the instruction that uses them.
// GCC left alone repeats the unpacking of a weight for every row and does not fold the broadcasts, so weights are kept
// (POTOK_KEEP) and the two dot products are written as assembly.
#include "kernels/panel_avx512.inl"

// Rows of one tile: 12 sums over k, 12 of a group, and what is left of 32 registers for the weights.
static constexpr int kTileHeight = 12;
// Bytes to prefetch. Not as non-temporal: that keeps weights out of the third-level cache, where small models live, and
// made steps of one row 2.1 to 2.6 times as long.
static constexpr int kAhead = 2560;

static inline void prefetch(const uint8_t* p, int bytes) {
    POTOK_UNROLL for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + kAhead + i, _MM_HINT_T0);
}

// Every lane of `sum` gets four products of unsigned levels and int8, or two of int16.
#if defined(POTOK_SIMDE)
static inline __m512i broadcast32(const void* p) {
    int32_t v;
    memcpy(&v, p, sizeof v);
    return _mm512_set1_epi32(v);
}
static inline void add_products(__m512i& sum, __m512i w, const int8_t* x) {
    sum = _mm512_dpbusd_epi32(sum, w, broadcast32(x));
}
static inline void add_products(__m512i& sum, __m512i w, const int16_t* x) {
    sum = _mm512_dpwssd_epi32(sum, w, broadcast32(x));
}
#else
typedef int32_t Word __attribute__((may_alias));
static inline void add_products(__m512i& sum, __m512i w, const int8_t* x) {
    __asm__("vpdpbusd %2%{1to16%},%1,%0" : "+v"(sum) : "v"(w), "m"(*(const Word*)x));
}
static inline void add_products(__m512i& sum, __m512i w, const int16_t* x) {
    __asm__("vpdpwssd %2%{1to16%},%1,%0" : "+v"(sum) : "v"(w), "m"(*(const Word*)x));
}
#endif

// The whole sums of one scale. A dot product takes five cycles and two start in each, so few rows need two chains each.
template <int Rows>
struct Dots {
    Dots() {
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            POTOK_UNROLL for (int i = 0; i < kChains; i++) v[r][i] = _mm512_setzero_si512();
        }
    }
    __m512i total(int row) const { return kChains == 1 ? v[row][0] : _mm512_add_epi32(v[row][0], v[row][kChains - 1]); }
    static constexpr int kChains = Rows <= 8 ? 2 : 1;
    __m512i v[Rows][kChains];
};

// Sums are exact in int32: |dot| <= 32 * 31 * 32767 for 5-bit levels, 32 * 128 * 32767 < 2^28 for bytes.
template <Packed F, int Rows, class T>
static void tile_integer(const uint8_t* panel, const IntRows<T>& a, int k, float* acc) {
    constexpr int scales = scales_per_group(F), per_step = 4 / (int)sizeof(T), steps = kGroup / per_step / scales;
    const int groups = k / kGroup;
    const __m512i list = list_of<F>(panel);
    Addresses<T, Rows> x(a.q, k);
    Addresses<float, Rows> d(a.d, groups), s(sums_of<F>(a), scales * groups);
    Addresses<int32_t, Rows> total(a.sum, groups);
    Lanes sum[Rows];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) sum[r] = set1(0);
    for (int g = 0; g < groups; g++) {
        const uint8_t* q = panel + qblock_at(F, g);
        prefetch(q, qblock_bytes(F));
        POTOK_UNROLL for (int half = 0; half < scales; half++) {
            Dots<Rows> dots;
            POTOK_UNROLL for (int step = half * steps; step < (half + 1) * steps; step += 2) {
                __m512i w0 = levels_of<F>(T(), q, list, step), w1 = levels_of<F>(T(), q, list, step + 1);
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    add_products(dots.v[r][0], w0, x[r] + step * per_step);
                    add_products(dots.v[r][dots.kChains - 1], w1, x[r] + (step + 1) * per_step);
                }
            }
            const Scales w = scales_of<F>(panel, g, half);
            POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                __m512i dot = dots.total(r);
                if (zero_point(F)) dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(zero_point(F) * *total[r]));
                if (has_minimum(F)) sum[r] = fma(w.m, broadcast(s[r] + half), sum[r]);
                sum[r] = fma(mul(w.d, broadcast(d[r])), _mm512_cvtepi32_ps(dot), sum[r]);
            }
        }
        x.advance(kGroup);
        d.advance(1);
        if (has_minimum(F)) s.advance(scales);
        if (zero_point(F)) total.advance(1);
    }
    POTOK_UNROLL for (int r = 0; r < Rows; r++) store(acc + r * kPanel, sum[r]);
}

template <Packed F, int Rows>
static void tile_a8(const uint8_t* panel, const IntRows<int8_t>& a, int k, float* acc) {
    tile_integer<F, Rows>(panel, a, k, acc);
}

template <Packed F, int Rows>
static void tile_a16(const uint8_t* panel, const IntRows<int16_t>& a, int k, float* acc) {
    tile_integer<F, Rows>(panel, a, k, acc);
}

template <Packed F, int Rows>
static void tile_float(const uint8_t* panel, const float* a, int k, float* acc) {
    Addresses<float, Rows> x(a, k);
    Lanes sum[Rows];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) sum[r] = set1(0);
    const uint8_t* w = panel;
    for (int i = 0; i < k; i++, w += panel_bytes(F, 1), x.advance(1)) {
        _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
        Lanes column;
        if constexpr (F == Packed::F32) {
            column = load((const float*)w);
        } else if constexpr (F == Packed::F16) {
            column = load_f16((const uint16_t*)w);
        } else {
            column = load_bf16((const uint16_t*)w);
        }
        POTOK_KEEP(column);
        POTOK_UNROLL for (int r = 0; r < Rows; r++) sum[r] = fma(broadcast(x[r]), column, sum[r]);
    }
    POTOK_UNROLL for (int r = 0; r < Rows; r++) store(acc + r * kPanel, sum[r]);
}
