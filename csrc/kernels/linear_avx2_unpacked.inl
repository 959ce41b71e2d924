// Linears of many rows in AVX2: a panel is unpacked once for all of them, a chunk of k at a time, into what the
// multiply-adds take as it is: bytes, 16-bit pairs or floats, and scales as floats. Chunks continue the same chains.

// With fewer rows the packed panel is read for every tile of them, which is cheaper than to store it unpacked.
// Plain bytes are widened while they are loaded; to look levels up in a list takes most. Never so few that a tile has
// less than three.
static constexpr int unpack_rows(Packed f) {
    return f == Packed::P8 ? 24 : has_list(f) ? kTileHeight + 2 : 12;
}
// Rows whose running sums (8 KB) wait on the stack while a chunk goes through all of them.
static constexpr int kRowsAtOnce = 128;
static constexpr int kFloatTileHeight = 6;

// What stays in the first-level cache: 16 KB of levels.
struct Chunk {
    alignas(64) uint8_t w[16384];
    alignas(64) float d[32][kPanel];  // one or two for each group
    alignas(64) float m[32][kPanel];
};

template <Act A>
static constexpr int chunk_k() {
    return A == Act::F32 ? 256 : 512;
}

static inline void store_i256(void* p, __m256i v) {
    _mm256_store_si256((__m256i*)p, v);
}

// One group: 32 k of 16 columns, [quad of k][column][4] bytes or [pair of k][column][2] without their zero point.
template <Packed F, Act A>
static inline void unpack_levels(const uint8_t* q, __m256i list, uint8_t* out) {
    const __m256i zero = _mm256_set1_epi16(zero_point(F));
    for (int half = 0; half < 2; half++, out += 32) {
        if constexpr (!has_bytes(F)) {
            constexpr int vectors = level_vectors(F), quads = 8 / vectors, pairs = 16 / vectors;
            POTOK_UNROLL for (int j = 0; j < vectors; j++) {
                const __m256i nibbles = load_i256(q + 64 * j + 32 * half);
                if constexpr (A == Act::A8) {
                    POTOK_UNROLL for (int h = 0; h < quads; h++) {
                        store_i256(out + 64 * (quads * j + h), level_bytes_of<F>(q, nibbles, j, h, half));
                    }
                } else {
                    POTOK_UNROLL for (int p = 0; p < pairs; p++) {
                        const __m256i w = level_pairs_of<F>(q, nibbles, list, j, p, half);
                        store_i256(out + 64 * (pairs * j + p), zero_point(F) ? _mm256_sub_epi16(w, zero) : w);
                    }
                }
            }
        } else {
            POTOK_UNROLL for (int p = 0; p < 16; p++) {
                const __m128i bytes = _mm_loadu_si128((const __m128i*)(q + 32 * p + 16 * half));
                store_i256(out + 64 * p, _mm256_cvtepi8_epi16(bytes));
            }
        }
    }
}

// k0 and k are multiples of 32, k0 also of the chunk's size.
template <Packed F, Act A>
static void unpack(const uint8_t* panel, int k0, int k, Chunk& chunk) {
    if constexpr (is_float(F)) {
        for (int i = 0; i < k; i++) {
            const uint16_t* w = (const uint16_t*)(panel + panel_bytes(F, k0 + i));
            store((float*)chunk.w + i * kPanel, F == Packed::F16 ? load_f16(w) : load_bf16(w));
        }
    } else {
        constexpr int halves = scales_per_group(F), group_bytes = kGroup * kPanel * (A == Act::A8 ? 1 : 2);
        const __m256i list = list_of<F>(panel);
        Header header{};
        for (int g = 0; g < k / kGroup; g++) {
            const int group = k0 / kGroup + g;
            read_header<F>(panel, group, header);
            unpack_levels<F, A>(panel + qblock_at(F, group), list, chunk.w + g * group_bytes);
            POTOK_UNROLL for (int half = 0; half < halves; half++) {
                const Scales scales = scales_of<F>(panel, header, group, half);
                POTOK_UNROLL for (int i = 0; i < 2; i++) {
                    _mm256_store_ps(chunk.d[halves * g + half] + 8 * i, scales.d[i]);
                    if (has_minimum(F)) _mm256_store_ps(chunk.m[halves * g + half] + 8 * i, scales.m[i]);
                }
            }
        }
    }
}

// Rows of one tile, from the chunk's first k on; k and groups are those of a whole row.
template <Packed F, int Rows>
static void unpacked_a8(const Chunk& chunk, int groups, const IntRows<int8_t>& a, int k, float* acc) {
    constexpr int halves = scales_per_group(F), quads = 8 / halves;
    const uint8_t* w = chunk.w;
    for (int g = 0; g < groups; g++) {
        const int8_t* x = a.q + g * kGroup;
        alignas(32) int32_t first[in_two_sums<F>() ? Rows * kPanel : 1];
        POTOK_UNROLL for (int half = 0; half < halves; half++) {
            __m256i c[Rows][2];
            POTOK_UNROLL for (int quad = half * quads; quad < (half + 1) * quads; quad++, w += 64) {
                if (in_two_sums<F>() && quad == 4) {
                    POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                        store_i256(first + r * kPanel, widened(c[r][0]));
                        store_i256(first + r * kPanel + 8, widened(c[r][1]));
                    }
                }
                const bool fresh = quad == half * quads || (in_two_sums<F>() && quad == 4);
                __m256i w0 = load_i256(w), w1 = load_i256(w + 32);
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    const __m256i v = broadcast32(x + (size_t)r * k + 4 * quad);
                    if (fresh && kSumsIn16) {
                        c[r][0] = _mm256_maddubs_epi16(w0, v);
                        c[r][1] = _mm256_maddubs_epi16(w1, v);
                    } else {
                        if (fresh) c[r][0] = c[r][1] = _mm256_setzero_si256();
                        POTOK_MUBS(c[r][0], w0, v);
                        POTOK_MUBS(c[r][1], w1, v);
                    }
                }
            }
            Scales scales;
            POTOK_UNROLL for (int i = 0; i < 2; i++) {
                scales.d[i] = _mm256_load_ps(chunk.d[halves * g + half] + 8 * i);
                if (has_minimum(F)) scales.m[i] = _mm256_load_ps(chunk.m[halves * g + half] + 8 * i);
            }
            POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                __m256i dot0 = widened(c[r][0]), dot1 = widened(c[r][1]);
                if (in_two_sums<F>()) {
                    dot0 = _mm256_add_epi32(dot0, load_i256(first + r * kPanel));
                    dot1 = _mm256_add_epi32(dot1, load_i256(first + r * kPanel + 8));
                }
                finish_group<F>(acc + r * kPanel, dot0, dot1, scales, a, (size_t)r * (k / kGroup) + g, half);
            }
        }
    }
}

// F is a form with the same scales and no zero point.
template <Packed F, int Rows>
static void unpacked_a16(const Chunk& chunk, int groups, const IntRows<int16_t>& a, int k, float* acc) {
    constexpr int halves = scales_per_group(F), pairs = 16 / halves;
    const uint8_t* w = chunk.w;
    for (int g = 0; g < groups; g++) {
        POTOK_UNROLL for (int half = 0; half < halves; half++) {
            const int16_t* x = a.q + g * kGroup + 2 * pairs * half;
            __m256i c[Rows][2];
            POTOK_UNROLL for (int p = 0; p < pairs; p++, w += 64) {
                __m256i w0 = load_i256(w), w1 = load_i256(w + 32);
                POTOK_KEEP(w0);
                POTOK_KEEP(w1);
                POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                    const __m256i v = broadcast32(x + (size_t)r * k + 2 * p);
                    if (p == 0) {
                        c[r][0] = _mm256_madd_epi16(v, w0);
                        c[r][1] = _mm256_madd_epi16(v, w1);
                    } else {
                        POTOK_MADD(c[r][0], v, w0);
                        POTOK_MADD(c[r][1], v, w1);
                    }
                }
            }
            Scales scales;
            POTOK_UNROLL for (int i = 0; i < 2; i++) {
                scales.d[i] = _mm256_load_ps(chunk.d[halves * g + half] + 8 * i);
                if (has_minimum(F)) scales.m[i] = _mm256_load_ps(chunk.m[halves * g + half] + 8 * i);
            }
            POTOK_UNROLL for (int r = 0; r < Rows; r++) {
                finish_group<F>(acc + r * kPanel, c[r][0], c[r][1], scales, a, (size_t)r * (k / kGroup) + g, half);
            }
        }
    }
}

template <int Rows>
static void unpacked_float(const float* w, int chunk_k, const float* a, int k, float* acc) {
    __m256 c[Rows][2];
    POTOK_UNROLL for (int r = 0; r < Rows; r++) {
        c[r][0] = _mm256_load_ps(acc + r * kPanel);
        c[r][1] = _mm256_load_ps(acc + r * kPanel + 8);
    }
    for (int i = 0; i < chunk_k; i++, w += kPanel) {
        __m256 w0 = _mm256_load_ps(w), w1 = _mm256_load_ps(w + 8);
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

// The form whose scales and minimums are the same, so that few tiles serve all forms.
static constexpr Packed like_a8(Packed f) {
    return f == Packed::P4K ? Packed::P4M : f == Packed::P5K ? Packed::P5M : f;
}
static constexpr Packed like_a16(Packed f) {
    return f == Packed::P2K ? f : has_minimum(f) ? Packed::P4M : scales_per_group(f) == 2 ? Packed::P8K : Packed::P8;
}

template <class T>
static inline IntRows<T> from_group(const IntRows<T>& rows, int row, int k, int k0) {
    const IntRows<T> a = from_row(rows, row, k);
    const int group = k0 / kGroup;
    return {a.q + k0, a.d + group, a.s + group, a.sum + group, a.s16 ? a.s16 + 2 * group : 0};
}

// One tile of at most `Rows` rows, `row` of the task's activations on; k = [k0, k0 + n).
template <Packed F, Act A, int Rows>
static inline void unpacked_tile(const LinearTask& t, const Chunk& chunk, const uint8_t* panel, int k0, int n, int rows,
                                 int row, float* acc) {
    if constexpr (Rows > 2) {
        if (rows < Rows) return unpacked_tile<F, A, Rows - 1>(t, chunk, panel, k0, n, rows, row, acc);
        const int k = t.weight->k;
        if constexpr (A == Act::F32) {
            const void* w = F == Packed::F32 ? panel + panel_bytes(F, k0) : chunk.w;
            unpacked_float<Rows>((const float*)w, n, t.acts->f32 + (size_t)row * k + k0, k, acc);
        } else if constexpr (A == Act::A8) {
            unpacked_a8<like_a8(F), Rows>(chunk, n / kGroup, from_group(t.acts->a8, row, k, k0), k, acc);
        } else {
            unpacked_a16<like_a16(F), Rows>(chunk, n / kGroup, from_group(t.acts->a16, row, k, k0), k, acc);
        }
    }
}

template <Packed F, Act A>
static void linear_unpacked(const LinearTask& t) {
    constexpr int height = A == Act::F32 ? kFloatTileHeight : kTileHeight;
    const int k = t.weight->k;
    Chunk chunk;
    alignas(64) float acc[kRowsAtOnce * kPanel];
    for (int panel = t.panel0; panel < t.panel1; panel++) {
        const uint8_t* data = t.weight->data + (size_t)panel * panel_bytes(F, k);
        for (int row = t.row0; row < t.row1;) {
            const int rows = even_part(t.row1 - row, kRowsAtOnce);
            prefetch_out(t, row, rows, panel);
            zero_tile(acc, rows * kPanel);
            for (int k0 = 0; k0 < k; k0 += chunk_k<A>()) {
                const int n = k - k0 < chunk_k<A>() ? k - k0 : chunk_k<A>();
                if constexpr (F != Packed::F32) unpack<F, A>(data, k0, n, chunk);
                const uint8_t* next = data + panel_bytes(F, k0 + n);
                for (int r = 0; r < rows;) {
                    const int tile_rows = even_part(rows - r, height);
                    const uint8_t* until = next + panel_bytes(F, n) * tile_rows / rows;
                    for (; next < until; next += 64) _mm_prefetch((const char*)next, _MM_HINT_T0);
                    unpacked_tile<F, A, height>(t, chunk, data, k0, n, tile_rows, row + r, acc + r * kPanel);
                    r += tile_rows;
                }
            }
            store_tile(t, acc, row, rows, panel);
            row += rows;
        }
    }
}
