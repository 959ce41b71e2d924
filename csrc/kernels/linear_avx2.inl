// The same chains in AVX2. Activations are broadcast from memory (load ports), weights stay in registers.
//
// GCC left alone reloads a weight for every row and spills accumulators (9-17 MAC/cycle instead of 24-31), hence:
//   POTOK_KEEP pins a value in a register; POTOK_MUBS / POTOK_MADD are one multiply-add pair with a fixed temporary.
// With AVX-VNNI (POTOK_AVXVNNI) either pair is one instruction, and sums of bytes are formed in 32 bits at once.
#define POTOK_UNROLL _Pragma("GCC unroll 16")
#define POTOK_KEEP(x) __asm__("" : "+x"(x))
#if !defined(POTOK_AVXVNNI)
#define POTOK_MUBS(acc, w, a) \
    __asm__("vpmaddubsw %2,%1,%%ymm15\n\tvpaddw %%ymm15,%0,%0" : "+x"(acc) : "x"(w), "x"(a) : "xmm15")
#define POTOK_MADD(acc, a, w) \
    __asm__("vpmaddwd %2,%1,%%ymm15\n\tvpaddd %%ymm15,%0,%0" : "+x"(acc) : "x"(a), "x"(w) : "xmm15")
#elif defined(POTOK_SIMDE)
#define POTOK_MUBS(acc, w, a) \
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(w, a)))
#define POTOK_MADD(acc, a, w) acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, w))
#else
#define POTOK_MUBS(acc, w, a) __asm__("%{vex%} vpdpbusd %2,%1,%0" : "+x"(acc) : "x"(w), "x"(a))
#define POTOK_MADD(acc, a, w) __asm__("%{vex%} vpdpwssd %2,%1,%0" : "+x"(acc) : "x"(a), "x"(w))
#endif

#if defined(POTOK_AVXVNNI)
// Rows of one tile: 12 accumulators, 2 weights and 1 activation of 16 registers. A dot product takes five cycles and
// two start in each.
static constexpr int kTileHeight = 6;
static constexpr bool kSumsIn16 = false;
#else
// 8 accumulators, 2 weights, 1 activation and 1 temporary.
static constexpr int kTileHeight = 4;
static constexpr bool kSumsIn16 = true;  // of bytes, until a group or half of it ends
#endif
// Hardware does not prefetch across pages: this far ahead, in bytes, was best from memory (30 % over 1280 bytes on a
// Xeon of 2023) and costs nothing in cache.
static constexpr int kAhead = 4096;

static inline __m256i broadcast32(const void* p) {
    return _mm256_castps_si256(_mm256_broadcast_ss((const float*)p));
}
static inline __m256i load_i256(const void* p) {
    return _mm256_loadu_si256((const __m256i*)p);
}
static inline __m256 half8(const void* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline __m256 unsigned8(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline __m256 signed8(const void* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

static inline void prefetch(const uint8_t* p, int bytes) {
    POTOK_UNROLL for (int i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + kAhead + i, _MM_HINT_T0);
}

static inline void zero_tile(float* acc, int floats) {
    for (int i = 0; i < floats; i += 8) _mm256_store_ps(acc + i, _mm256_setzero_ps());
}

// Sums of bytes as 32-bit ones.
static inline __m256i widened(__m256i sums) {
    return kSumsIn16 ? _mm256_madd_epi16(_mm256_set1_epi16(1), sums) : sums;
}

// Of 16-bit sums: whether a group needs two, the first of which waits until the other is widened. They hold eight
// products of two 4-bit levels (8 * 15 * 127 * 2 = 30480 <= 32767) but only four of 5-bit ones (4 * 31 * 127 * 2 =
// 31496).
template <Packed F>
static constexpr bool in_two_sums() {
    return kSumsIn16 && has_high_bits(F);
}

// Scales and minimums of one group, columns 0-7 and 8-15.
struct Scales {
    __m256 d[2], m[2];
};

// Of one superblock, as floats, the minimums negated: converted once for its 8 groups.
struct Header {
    alignas(32) float d[kPanel], m[kPanel];
};

template <Packed F>
static inline void read_header(const uint8_t* panel, int group, Header& out) {
    if (!has_header(F) || group % 8 != 0) return;
    const uint8_t* header = panel + header_at(F, group);
    POTOK_UNROLL for (int i = 0; i < 2; i++) {
        _mm256_store_ps(out.d + 8 * i, half8(header + 16 * i));
        if (has_minimum(F)) {
            _mm256_store_ps(out.m + 8 * i, _mm256_xor_ps(_mm256_set1_ps(-0.0f), half8(header + 32 + 16 * i)));
        }
    }
}

template <Packed F>
static inline Scales scales_of(const uint8_t* panel, const Header& h, int group, int half) {
    Scales out;
    const uint8_t* header = panel + header_at(F, group);
    const uint8_t* own = panel + qblock_at(F, group) + level_bytes(F);
    const int sixteen = 2 * (group % 8) + half;
    POTOK_UNROLL for (int i = 0; i < 2; i++) {
        if (F == Packed::P4LS) {
            out.d[i] = _mm256_loadu_ps((const float*)(own + 64 * half + 32 * i));
        } else if (has_signed_scales(F)) {
            const uint8_t* row = header + 32 + kPanel * sixteen + 8 * i;
            out.d[i] = _mm256_mul_ps(signed8(row), _mm256_load_ps(h.d + 8 * i));
        } else if (F == Packed::P2K) {
            const __m128i row = _mm_loadl_epi64((const __m128i*)(header + 64 + kPanel * sixteen + 8 * i));
            const __m256i both = _mm256_cvtepu8_epi32(row);
            const __m256 sc = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
            out.d[i] = _mm256_mul_ps(sc, _mm256_load_ps(h.d + 8 * i));
            out.m[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4)), _mm256_load_ps(h.m + 8 * i));
        } else if (has_header(F)) {
            const uint8_t* row = header + 64 + kPanel * (group % 8) + 8 * i;
            out.d[i] = _mm256_mul_ps(unsigned8(row), _mm256_load_ps(h.d + 8 * i));
            out.m[i] = _mm256_mul_ps(unsigned8(row + 128), _mm256_load_ps(h.m + 8 * i));
        } else {
            out.d[i] = half8(own + 16 * i);
            if (has_minimum(F)) out.m[i] = half8(own + 32 + 16 * i);
        }
    }
    return out;
}

// The end of a group's chain, or of half of it: acc = fma(m, s, acc), then fma(d_w d_a, float(dot), acc), 16 columns
// of one row.
template <Packed F, class T>
static inline void finish_group(float* acc, __m256i dot0, __m256i dot1, const Scales& w, const IntRows<T>& a, size_t at,
                                int half) {
    if (zero_point(F)) {
        const __m256i zeros = _mm256_mullo_epi32(_mm256_set1_epi32(a.sum[at]), _mm256_set1_epi32(zero_point(F)));
        dot0 = _mm256_sub_epi32(dot0, zeros);
        dot1 = _mm256_sub_epi32(dot1, zeros);
    }
    const __m256 d = _mm256_broadcast_ss(a.d + at);
    __m256 x0 = _mm256_load_ps(acc), x1 = _mm256_load_ps(acc + 8);
    if (has_minimum(F)) {
        const __m256 s = _mm256_broadcast_ss(sums_of<F>(a) + scales_per_group(F) * at + half);
        x0 = _mm256_fmadd_ps(w.m[0], s, x0);
        x1 = _mm256_fmadd_ps(w.m[1], s, x1);
    }
    _mm256_store_ps(acc, _mm256_fmadd_ps(_mm256_mul_ps(w.d[0], d), _mm256_cvtepi32_ps(dot0), x0));
    _mm256_store_ps(acc + 8, _mm256_fmadd_ps(_mm256_mul_ps(w.d[1], d), _mm256_cvtepi32_ps(dot1), x1));
}

// Bit `bit` of every byte moved to bit 4.
static inline __m256i to_bit4(__m256i plane, int bit) {
    const __m256i moved = bit <= 4 ? _mm256_slli_epi16(plane, 4 - bit) : _mm256_srli_epi16(plane, bit - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(16));
}

// Vector j of a group's levels holds 8 k, or 16 of the pairs of bits, for 8 columns (half 0: columns 0-7). Its next
// four k but 4 h, as unsigned bytes.
template <Packed F>
static inline __m256i level_bytes_of(const uint8_t* q, __m256i nibbles, int j, int h, int half) {
    if (F == Packed::P2K) return _mm256_and_si256(_mm256_srli_epi16(nibbles, 2 * h), _mm256_set1_epi8(3));
    const __m256i v = _mm256_and_si256(h ? _mm256_srli_epi16(nibbles, 4) : nibbles, _mm256_set1_epi8(15));
    if (!has_high_bits(F)) return v;
    return _mm256_or_si256(v, to_bit4(load_i256(q + 256 + 32 * half), 2 * j + h));
}

// The list of a panel that has one, twice.
template <Packed F>
static inline __m256i list_of(const uint8_t* panel) {
    if (!has_list(F)) return _mm256_setzero_si256();
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)panel));
}

// Its pair p: (0,2) (1,3) (4,6) (5,7) and so on, as 16-bit lanes.
template <Packed F>
static inline __m256i level_pairs_of(const uint8_t* q, __m256i nibbles, __m256i list, int j, int p, int half) {
    if (has_list(F)) {  // even bytes times 1 and odd ones times 0 are the even ones, widened
        const __m256i moved = p < 2 ? nibbles : _mm256_srli_epi16(nibbles, 4);
        const __m256i bytes = _mm256_shuffle_epi8(list, _mm256_and_si256(moved, _mm256_set1_epi8(15)));
        return p % 2 ? _mm256_srai_epi16(bytes, 8) : _mm256_maddubs_epi16(_mm256_set1_epi16(1), bytes);
    }
    if (has_high_bits(F)) {
        const __m256i bytes = level_bytes_of<F>(q, nibbles, j, p / 2, half);
        return p % 2 ? _mm256_srli_epi16(bytes, 8) : _mm256_and_si256(bytes, _mm256_set1_epi16(255));
    }
    if (F == Packed::P2K) {
        return _mm256_and_si256(_mm256_srli_epi16(nibbles, p / 2 * 2 + p % 2 * 8), _mm256_set1_epi16(3));
    }
    const int shift = p == 0 ? 0 : p == 1 ? 8 : p == 2 ? 4 : 12;
    const __m256i v = _mm256_srli_epi16(nibbles, shift);
    return shift == 12 ? v : _mm256_and_si256(v, _mm256_set1_epi16(15));
}

template <Packed F, int Rows>
static void tile_a8(const uint8_t* panel, const IntRows<int8_t>& a, int k, float* acc) {
    constexpr int scales_of_group = scales_per_group(F), vectors = level_vectors(F) / scales_of_group;
    constexpr int quads = 8 / level_vectors(F);
    const int groups = k / kGroup;
    Header header{};
    zero_tile(acc, Rows * kPanel);
    for (int g = 0; g < groups; g++) {
        read_header<F>(panel, g, header);
        const uint8_t* q = panel + qblock_at(F, g);
        const int8_t* x = a.q + g * kGroup;
        prefetch(q, qblock_bytes(F));
        alignas(32) int32_t first[in_two_sums<F>() ? Rows * kPanel : 1];
        POTOK_UNROLL for (int half = 0; half < scales_of_group; half++) {
            __m256i c[Rows][2];
            POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_si256();
            POTOK_UNROLL for (int j = half * vectors; j < (half + 1) * vectors; j++) {
                if (in_two_sums<F>() && j == 2) {
                    POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                        POTOK_UNROLL for (int i = 0; i < 2; i++) {
                            _mm256_store_si256((__m256i*)(first + r * kPanel + 8 * i), widened(c[r][i]));
                            c[r][i] = _mm256_setzero_si256();
                        }
                    }
                }
                const __m256i n0 = load_i256(q + 64 * j), n1 = load_i256(q + 64 * j + 32);
                POTOK_UNROLL for (int h = 0; h < quads; h++) {
                    __m256i w0 = level_bytes_of<F>(q, n0, j, h, 0), w1 = level_bytes_of<F>(q, n1, j, h, 1);
                    POTOK_KEEP(w0);
                    POTOK_KEEP(w1);
                    POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                        const __m256i v = broadcast32(x + (size_t)r * k + 4 * (quads * j + h));
                        POTOK_MUBS(c[r][0], w0, v);
                        POTOK_MUBS(c[r][1], w1, v);
                    }
                }
            }
            const Scales scales = scales_of<F>(panel, header, g, half);
            POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                __m256i dot0 = widened(c[r][0]), dot1 = widened(c[r][1]);
                if (in_two_sums<F>()) {
                    dot0 = _mm256_add_epi32(dot0, _mm256_load_si256((const __m256i*)(first + r * kPanel)));
                    dot1 = _mm256_add_epi32(dot1, _mm256_load_si256((const __m256i*)(first + r * kPanel + 8)));
                }
                finish_group<F>(acc + r * kPanel, dot0, dot1, scales, a, (size_t)r * groups + g, half);
            }
        }
    }
}

// Sums are exact in int32: |dot| <= 32 * 31 * 32767 for 5-bit levels, 32 * 128 * 32767 < 2^28 for bytes.
template <Packed F, int Rows>
static void tile_a16(const uint8_t* panel, const IntRows<int16_t>& a, int k, float* acc) {
    constexpr int scales_of_group = scales_per_group(F), pairs = 16 / scales_of_group;
    constexpr int pairs_of_vector = 16 / level_vectors(F);
    const int groups = k / kGroup;
    const __m256i list = list_of<F>(panel);
    Header header{};
    zero_tile(acc, Rows * kPanel);
    for (int g = 0; g < groups; g++) {
        read_header<F>(panel, g, header);
        const uint8_t* q = panel + qblock_at(F, g);
        const int16_t* x = a.q + g * kGroup;
        prefetch(q, qblock_bytes(F));
        POTOK_UNROLL for (int half = 0; half < scales_of_group; half++) {
            __m256i c[Rows][2];
            POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_si256();
            POTOK_UNROLL for (int p = half * pairs; p < (half + 1) * pairs; p++) {
                __m256i w0, w1;
                if (!has_bytes(F)) {
                    const int j = p / pairs_of_vector, i = p % pairs_of_vector;
                    w0 = level_pairs_of<F>(q, load_i256(q + 64 * j), list, j, i, 0);
                    w1 = level_pairs_of<F>(q, load_i256(q + 64 * j + 32), list, j, i, 1);
                } else {
                    w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(q + 32 * p)));
                    w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(q + 32 * p + 16)));
                }
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    const __m256i v = broadcast32(x + (size_t)r * k + 2 * p);
                    POTOK_MADD(c[r][0], v, w0);
                    POTOK_MADD(c[r][1], v, w1);
                }
            }
            const Scales scales = scales_of<F>(panel, header, g, half);
            POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                finish_group<F>(acc + r * kPanel, c[r][0], c[r][1], scales, a, (size_t)r * groups + g, half);
            }
        }
    }
}

template <Packed F, int Rows>
static void tile_float(const uint8_t* panel, const float* a, int k, float* acc) {
    __m256 c[Rows][2];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) c[r][0] = c[r][1] = _mm256_setzero_ps();
    const uint8_t* w = panel;
    for (int i = 0; i < k; i++, w += panel_bytes(F, 1)) {
        _mm_prefetch((const char*)w + kAhead, _MM_HINT_T0);
        __m256 w0, w1;
        if constexpr (F == Packed::F32) {
            w0 = _mm256_loadu_ps((const float*)w);
            w1 = _mm256_loadu_ps((const float*)w + 8);
        } else {
            const Lanes v = F == Packed::F16 ? load_f16((const uint16_t*)w) : load_bf16((const uint16_t*)w);
            w0 = v.lo;
            w1 = v.hi;
        }
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
