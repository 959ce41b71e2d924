// Panels and rows as every table with AVX-512 reads them: levels and scales in registers of 16 columns, and addresses
// of rows. POTOK_KEEP pins a vector in a register, POTOK_KEEP_ADDRESS a pointer or a stride: GCC left alone computes
// them again wherever they are used.
#define POTOK_KEEP_ADDRESS(x) __asm__("" : "+r"(x))
#if defined(POTOK_SIMDE)
#define POTOK_UNROLL
#define POTOK_KEEP(x)
#else
#define POTOK_UNROLL _Pragma("GCC unroll 16")
#define POTOK_KEEP(x) __asm__("" : "+v"(x))
#endif

static inline __m512i load_i512(const void* p) {
    return _mm512_loadu_si512(p);
}

// Where the rows of a tile stand, in few registers: the address of every fourth row, the stride and three times it.
template <class T, int Rows>
struct Addresses {
    Addresses(const T* first, size_t row_stride) : stride(row_stride), stride3(3 * row_stride) {
        POTOK_KEEP_ADDRESS(stride3);
        POTOK_UNROLL for (int i = 0; i < kBases; i++) base[i] = first + 4 * i * stride;
    }
    const T* operator[](int row) const { return base[row / 4] + (row % 4 == 3 ? stride3 : row % 4 * stride); }
    void advance(int n) {
        POTOK_UNROLL for (int i = 0; i < kBases; i++) {
            base[i] += n;
            POTOK_KEEP_ADDRESS(base[i]);
        }
    }
    static constexpr int kBases = (Rows + 3) / 4;
    const T* base[kBases];
    size_t stride, stride3;
};

struct Scales {
    Lanes d, m;
};

static inline Lanes unsigned16(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

template <Packed F>
static inline Scales scales_of(const uint8_t* panel, int group, int half) {
    Scales out;
    const uint8_t* header = panel + header_at(F, group);
    const uint8_t* own = panel + qblock_at(F, group) + level_bytes(F);
    const int sixteen = 2 * (group % 8) + half;
    if (F == Packed::P4LS) {
        out.d = load((const float*)(own + 64 * half));
    } else if (has_signed_scales(F)) {
        out.d = mul(load_f16((const uint16_t*)header), load_i8((const int8_t*)header + 32 + 16 * sixteen));
    } else if (F == Packed::P2K) {
        const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(header + 64 + 16 * sixteen)));
        const Lanes sc = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
        const Lanes mn = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
        out.d = mul(load_f16((const uint16_t*)header), sc);
        out.m = _mm512_xor_ps(set1(-0.0f), mul(load_f16((const uint16_t*)(header + 32)), mn));
    } else if (has_header(F)) {
        const uint8_t* row = header + 64 + 16 * (group % 8);
        out.d = mul(load_f16((const uint16_t*)header), unsigned16(row));
        out.m = _mm512_xor_ps(set1(-0.0f), mul(load_f16((const uint16_t*)(header + 32)), unsigned16(row + 128)));
    } else {
        out.d = load_f16((const uint16_t*)own);
        if (has_minimum(F)) out.m = load_f16((const uint16_t*)(own + 32));
    }
    return out;
}

// `levels` with bit `bit` of the plane's bytes or 16-bit lanes, moved to bit 4, where the mask has it.
template <Packed F>
static inline __m512i with_bit4(__m512i levels, const uint8_t* q, int bit, __m512i mask) {
    if (!has_high_bits(F)) return levels;
    const __m512i plane = load_i512(q + 256);
    const __m512i moved = bit <= 4 ? _mm512_slli_epi16(plane, 4 - bit) : _mm512_srli_epi16(plane, bit - 4);
    return _mm512_ternarylogic_epi32(moved, mask, levels, 0xea);  // moved & mask | levels
}

// The list of a panel that has one, as 16-bit lanes, twice: look-ups take five bits, and the fifth may be anything.
template <Packed F>
static inline __m512i list_of(const uint8_t* panel) {
    if (!has_list(F)) return _mm512_setzero_si512();
    return _mm512_broadcast_i64x4(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)panel)));
}

// Step 0..7 of a group: k = 4 step + 0..3 of 16 columns, as unsigned bytes.
template <Packed F>
static inline __m512i levels_of(int8_t, const uint8_t* q, __m512i, int step) {
    if (F == Packed::P2K) {
        const __m512i moved = _mm512_srli_epi16(load_i512(q + 64 * (step / 4)), 2 * (step % 4));
        return _mm512_and_si512(moved, _mm512_set1_epi8(3));
    }
    const __m512i nibbles = load_i512(q + 64 * (step / 2));
    const __m512i v = _mm512_and_si512(step % 2 ? _mm512_srli_epi16(nibbles, 4) : nibbles, _mm512_set1_epi8(15));
    return with_bit4<F>(v, q, step, _mm512_set1_epi8(16));
}

// Step 0..15 of a group: one pair of k (packed.h) of 16 columns, as 16-bit lanes.
template <Packed F>
static inline __m512i levels_of(int16_t, const uint8_t* q, __m512i list, int step) {
    if (F == Packed::P2K) {
        const __m512i moved = _mm512_srli_epi16(load_i512(q + 64 * (step / 8)), step % 8 / 2 * 2 + 8 * (step % 2));
        return _mm512_and_si512(moved, _mm512_set1_epi16(3));
    }
    if (has_bytes(F)) return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(q + 32 * step)));
    const int j = step / 4, p = step % 4, shift = p == 0 ? 0 : p == 1 ? 8 : p == 2 ? 4 : 12;
    const __m512i moved = _mm512_srli_epi16(load_i512(q + 64 * j), shift);
    if (has_list(F)) return _mm512_permutexvar_epi16(moved, list);
    const __m512i v = shift == 12 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16(15));
    return with_bit4<F>(v, q, 2 * j + p / 2 + 8 * (p % 2), _mm512_set1_epi16(16));
}
