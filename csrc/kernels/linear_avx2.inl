// The same chains in AVX2. Activations are broadcast from memory (load ports), weights stay in registers.
//
// GCC left alone reloads a weight for every row and spills accumulators (9-17 MAC/cycle instead of 24-31), hence:
//   POTOK_KEEP pins a value in a register; POTOK_MUBS / POTOK_MADD are one multiply-add pair with a fixed temporary.
#define POTOK_UNROLL _Pragma("GCC unroll 16")
#define POTOK_KEEP(x) __asm__("" : "+x"(x))
#define POTOK_MUBS(acc, w, a) \
    __asm__("vpmaddubsw %2,%1,%%ymm15\n\tvpaddw %%ymm15,%0,%0" : "+x"(acc) : "x"(w), "x"(a) : "xmm15")
#define POTOK_MADD(acc, a, w) \
    __asm__("vpmaddwd %2,%1,%%ymm15\n\tvpaddd %%ymm15,%0,%0" : "+x"(acc) : "x"(a), "x"(w) : "xmm15")

static inline __m256i broadcast32(const void* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss((const float*)p));
}
static inline __m256i load_i256(const void* p) {
    return _mm256_loadu_si256((const __m256i*)p);
}
static inline __m256 half8(const void* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}

// acc = fma(m * s, acc), then fma(d_w * d_a, float(dot), acc): the chain of one group, 16 columns of one row.
static inline void finish_group_min(float* acc, __m256i dot0, __m256i dot1, const __m256 d[2], const __m256 m[2],
                                    const float* da, const float* sa) {
    const __m256 a = _mm256_broadcast_ss(da), s = _mm256_broadcast_ss(sa);
    const __m256 x0 = _mm256_fmadd_ps(m[0], s, _mm256_load_ps(acc)),
                 x1 = _mm256_fmadd_ps(m[1], s, _mm256_load_ps(acc + 8));
    _mm256_store_ps(acc, _mm256_fmadd_ps(_mm256_mul_ps(d[0], a), _mm256_cvtepi32_ps(dot0), x0));
    _mm256_store_ps(acc + 8, _mm256_fmadd_ps(_mm256_mul_ps(d[1], a), _mm256_cvtepi32_ps(dot1), x1));
}

static inline void zero_tile(float* acc, int floats) {
    for (int i = 0; i < floats; i += 8) _mm256_store_ps(acc + i, _mm256_setzero_ps());
}

// Eight products of at most 15 * 127 * 2 fit int16: 8 * 3810 = 30480 <= 32767, so a whole group sums in 16 bits.
template <int Rows>
static void tile_p4m_a8(const uint8_t* w, const int8_t* a, const float* da, const float* sa, int k, float* acc) {
    const __m256i ones = _mm256_set1_epi16(1), low4 = _mm256_set1_epi8(15);
    const int groups = k / kGroup;
    zero_tile(acc, Rows * kPanel);
    for (int g = 0; g < groups; g++, w += kP4MBytes, a += kGroup) {
        POTOK_UNROLL for (int i = 0; i < kP4MBytes; i += 64)
            _mm_prefetch((const char*)w + 4 * kP4MBytes + i, _MM_HINT_T0);
        __m256i c[Rows][2];
        POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_si256();
        POTOK_UNROLL for (int j = 0; j < 4; j++) {
            const __m256i l0 = load_i256(w + 64 * j), l1 = load_i256(w + 64 * j + 32);
            {
                __m256i w0 = _mm256_and_si256(l0, low4), w1 = _mm256_and_si256(l1, low4);
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    const __m256i x = broadcast32(a + (size_t)r * k + 8 * j);
                    POTOK_MUBS(c[r][0], w0, x);
                    POTOK_MUBS(c[r][1], w1, x);
                }
            }
            {
                __m256i w0 = _mm256_and_si256(_mm256_srli_epi16(l0, 4), low4);
                __m256i w1 = _mm256_and_si256(_mm256_srli_epi16(l1, 4), low4);
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    const __m256i x = broadcast32(a + (size_t)r * k + 8 * j + 4);
                    POTOK_MUBS(c[r][0], w0, x);
                    POTOK_MUBS(c[r][1], w1, x);
                }
            }
        }
        const __m256 d[2] = {half8(w + 256), half8(w + 272)}, m[2] = {half8(w + 288), half8(w + 304)};
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            finish_group_min(acc + r * kPanel, _mm256_madd_epi16(ones, c[r][0]), _mm256_madd_epi16(ones, c[r][1]), d, m,
                             da + (size_t)r * groups + g, sa + (size_t)r * groups + g);
        }
    }
}

// |dot| <= 32 * 15 * 32767 < 2^24: exact in int32 and in float.
template <int Rows>
static void tile_p4m_a16(const uint8_t* w, const int16_t* a, const float* da, const float* sa, int k, float* acc) {
    const __m256i low4 = _mm256_set1_epi16(15);
    const int groups = k / kGroup;
    zero_tile(acc, Rows * kPanel);
    for (int g = 0; g < groups; g++, w += kP4MBytes, a += kGroup) {
        POTOK_UNROLL for (int i = 0; i < kP4MBytes; i += 64)
            _mm_prefetch((const char*)w + 4 * kP4MBytes + i, _MM_HINT_T0);
        __m256i c[Rows][2];
        POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_si256();
        POTOK_UNROLL for (int j = 0; j < 4; j++) {
            const __m256i l0 = load_i256(w + 64 * j), l1 = load_i256(w + 64 * j + 32);
            POTOK_UNROLL for (int p = 0; p < 4; p++) {  // pairs (0,2) (1,3) (4,6) (5,7) of these 8 k
                const int shift = p == 0 ? 0 : p == 1 ? 8 : p == 2 ? 4 : 12;
                __m256i w0 = _mm256_and_si256(_mm256_srli_epi16(l0, shift), low4);
                __m256i w1 = _mm256_and_si256(_mm256_srli_epi16(l1, shift), low4);
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    const __m256i x = broadcast32(a + (size_t)r * k + 8 * j + 2 * p);
                    POTOK_MADD(c[r][0], x, w0);
                    POTOK_MADD(c[r][1], x, w1);
                }
            }
        }
        const __m256 d[2] = {half8(w + 256), half8(w + 272)}, m[2] = {half8(w + 288), half8(w + 304)};
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            finish_group_min(acc + r * kPanel, c[r][0], c[r][1], d, m, da + (size_t)r * groups + g,
                             sa + (size_t)r * groups + g);
        }
    }
}

// |dot| <= 32 * 128 * 32767 < 2^28.
template <int Rows>
static void tile_p8_a16(const uint8_t* w, const int16_t* a, const float* da, int k, float* acc) {
    const int groups = k / kGroup;
    zero_tile(acc, Rows * kPanel);
    for (int g = 0; g < groups; g++, w += kP8Bytes, a += kGroup) {
        __m256i c[Rows][2];
        POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_si256();
        POTOK_UNROLL for (int p = 0; p < 16; p++) {
            if (p % 2 == 0) _mm_prefetch((const char*)w + 4 * kP8Bytes + 32 * p, _MM_HINT_T0);
            __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 32 * p)));
            __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + 32 * p + 16)));
            POTOK_KEEP(w0);
            POTOK_KEEP(w1);
            POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                const __m256i x = broadcast32(a + (size_t)r * k + 2 * p);
                POTOK_MADD(c[r][0], x, w0);
                POTOK_MADD(c[r][1], x, w1);
            }
        }
        const __m256 d0 = half8(w + 512), d1 = half8(w + 528);
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            float* out = acc + r * kPanel;
            const __m256 x = _mm256_broadcast_ss(da + (size_t)r * groups + g);
            _mm256_store_ps(out,
                            _mm256_fmadd_ps(_mm256_mul_ps(d0, x), _mm256_cvtepi32_ps(c[r][0]), _mm256_load_ps(out)));
            _mm256_store_ps(
                out + 8, _mm256_fmadd_ps(_mm256_mul_ps(d1, x), _mm256_cvtepi32_ps(c[r][1]), _mm256_load_ps(out + 8)));
        }
    }
}

template <int Rows>
static void tile_f16(const uint16_t* w, const float* a, int k, float* acc) {
    __m256 c[Rows][2];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_ps();
    for (int i = 0; i < k; i++, w += kPanel) {
        if (i % 2 == 0) _mm_prefetch((const char*)w + 1536, _MM_HINT_T0);
        __m256 w0 = half8(w), w1 = half8(w + 8);
        POTOK_KEEP(w0);
        POTOK_KEEP(w1);
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            const __m256 x = _mm256_broadcast_ss(a + (size_t)r * k + i);
            c[r][0] = _mm256_fmadd_ps(x, w0, c[r][0]);
            c[r][1] = _mm256_fmadd_ps(x, w1, c[r][1]);
        }
    }
    POTOK_UNROLL for (int r = 0; r < Rows; r++) store(acc + r * kPanel, {c[r][0], c[r][1]});
}

template <int Rows>
static void tile_f32(const float* w, const float* a, int k, float* acc) {
    __m256 c[Rows][2];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_ps();
    for (int i = 0; i < k; i++, w += kPanel) {
        _mm_prefetch((const char*)w + 1536, _MM_HINT_T0);
        __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
        POTOK_KEEP(w0);
        POTOK_KEEP(w1);
        POTOK_UNROLL for (int r = 0; r < Rows; r++) {
            const __m256 x = _mm256_broadcast_ss(a + (size_t)r * k + i);
            c[r][0] = _mm256_fmadd_ps(x, w0, c[r][0]);
            c[r][1] = _mm256_fmadd_ps(x, w1, c[r][1]);
        }
    }
    POTOK_UNROLL for (int r = 0; r < Rows; r++) store(acc + r * kPanel, {c[r][0], c[r][1]});
}
