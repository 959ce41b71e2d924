// Lanes: 16 floats, the virtual lanes of the numerics contract. One definition per ISA, chosen by the including
// translation unit; kernels are written once on top and are bit-equal on every ISA because every operation here is
// correctly rounded and every reduction has one fixed tree.
//
//   max(a, b)     a > b ? a : b, lane by lane (so b where either is NaN), as x86 has it
//   sum_tree      ((0+8)+(4+12)) + ... : halves are added until one lane is left; max_tree likewise
//   sum_trees     of eight at once, lane r that of a[r]; max_trees likewise. Lanes from 8 on are 0
//   not_less      also where either is NaN
//   fma           one rounding
//   store_whole   whole numbers as bytes, or as 16 bits in pair order (packed.h): every four as 0 2 1 3
//
// Included inside the namespace of an ISA. Plain static functions only: an inline function of the standard library
// compiled here with wider instructions could be picked by the linker for the whole program.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(POTOK_AVX512) && defined(POTOK_SIMDE)
#include "kernels/simde.h"
#elif defined(POTOK_AVX2) || defined(POTOK_AVX512)
#include <immintrin.h>
#else
#include <math.h>
#endif

namespace potok {
namespace POTOK_ISA {

static constexpr float kLargest = 0x1.fffffep127f;  // that is finite

#if defined(POTOK_AVX2)

static constexpr int kSums = 6;       // Lanes to sum in that leave registers for the operands
static constexpr int kRegisters = 8;  // Lanes that the registers hold
struct Lanes {
    __m256 lo, hi;
};
struct Mask {
    __m256 lo, hi;
};

static inline Lanes load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static inline void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
static inline Lanes set1(float x) {
    return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
static inline Lanes broadcast(const float* p) {
    const __m256 v = _mm256_broadcast_ss(p);
    return {v, v};
}
static inline __m256 low_half(Lanes a) {
    return a.lo;
}
static inline __m256 high_half(Lanes a) {
    return a.hi;
}
static inline Lanes from_half(__m256 a) {
    return {a, _mm256_setzero_ps()};
}
static inline Lanes load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline Lanes load_i8(const int8_t* p) {
    const __m128i v = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
// bf16 is the upper half of a float
static inline Lanes load_bf16(const uint16_t* p) {
    return {
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16))};
}
static inline void store_f16(uint16_t* p, Lanes a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
static inline Lanes add(Lanes a, Lanes b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline Lanes sub(Lanes a, Lanes b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline Lanes mul(Lanes a, Lanes b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline Lanes div(Lanes a, Lanes b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static inline Lanes max(Lanes a, Lanes b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static inline Lanes min(Lanes a, Lanes b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Lanes abs(Lanes a) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, m), _mm256_and_ps(a.hi, m)};
}
static inline Lanes round_even(Lanes a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline Mask less(Lanes a, Lanes b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
static inline Mask not_less(Lanes a, Lanes b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ)};
}
static inline Mask greater_equal(Lanes a, Lanes b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)};
}
static inline Lanes select(Mask m, Lanes yes, Lanes no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
// bit i is set where lane i of the mask is
static inline uint32_t bits(Mask m) {
    return (uint32_t)_mm256_movemask_ps(m.lo) | (uint32_t)_mm256_movemask_ps(m.hi) << 8;
}
static inline Mask both(Mask a, Mask b) {
    return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)};
}
// a where the mask is set, else 0
static inline Lanes where(Mask m, Lanes a) {
    return {_mm256_and_ps(a.lo, m.lo), _mm256_and_ps(a.hi, m.hi)};
}
// Of every byte, the places of its set bits.
struct SetBits {
    constexpr SetBits() : of() {
        for (int byte = 0; byte < 256; byte++) {
            for (int bit = 0, n = 0; bit < 8; bit++) {
                if (byte >> bit & 1) of[byte][n++] = (uint8_t)bit;
            }
        }
    }
    uint8_t of[256][8];
};
static constexpr SetBits kSetBits;
static inline __m256 pack8(__m256 a, uint32_t bits) {
    const __m128i places = _mm_loadl_epi64((const __m128i*)kSetBits.of[bits]);
    return _mm256_permutevar8x32_ps(a, _mm256_cvtepu8_epi32(places));
}
// The lanes where the mask is set, side by side; anything after them, up to 16 in all.
static inline void store_packed(float* p, Mask m, Lanes a) {
    const uint32_t low = (uint32_t)_mm256_movemask_ps(m.lo), high = (uint32_t)_mm256_movemask_ps(m.hi);
    _mm256_storeu_ps(p, pack8(a.lo, low));
    _mm256_storeu_ps(p + __builtin_popcount(low), pack8(a.hi, high));
}
// a 2^n where m holds, else 0. Where it holds, n is a whole number from -126 to 127, or NaN.
static inline Lanes scale_exp2(Mask m, Lanes a, Lanes n) {
    const __m256i bias = _mm256_set1_epi32(127);
    n = max(n, set1(-126));  // NaN too becomes a number here, and what is left out a harmless one
    const __m256i lo = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.lo), bias), 23);
    const __m256i hi = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.hi), bias), 23);
    return where(m, mul(a, {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)}));
}
// a 2^n, where `shifted` holds n + 1.5 * 2^23 and neither a nor the result is subnormal or infinite
static inline Lanes times_exp2(Lanes a, Lanes shifted) {
    const __m256i lo = _mm256_slli_epi32(_mm256_castps_si256(shifted.lo), 23);
    const __m256i hi = _mm256_slli_epi32(_mm256_castps_si256(shifted.hi), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), lo)),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), hi))};
}
static inline __m256i whole_i16(Lanes a) {
    const __m256i halves = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    return _mm256_permute4x64_epi64(halves, 0xd8);
}
static inline void store_whole(int8_t* p, Lanes a) {
    const __m256i v = whole_i16(a);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static inline void store_whole(int16_t* p, Lanes a) {
    const __m256i v = _mm256_shufflelo_epi16(whole_i16(a), 0xd8);
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(v, 0xd8));
}
static inline float sqrt1(float x) {
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}
static inline float fma1(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
static inline float sum_tree(Lanes a) {
    const __m256 v8 = _mm256_add_ps(a.lo, a.hi);
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}
static inline float max_tree(Lanes a) {
    const __m256 v8 = _mm256_max_ps(a.lo, a.hi);
    const __m128 v4 = _mm_max_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_max_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_max_ss(v2, _mm_movehdup_ps(v2)));
}
// 16 running sums in double
struct Wide {
    __m256d v[4];
};
static inline Wide wide_zero() {
    const __m256d z = _mm256_setzero_pd();
    return {{z, z, z, z}};
}
static inline Wide wide_add(Wide sum, Lanes a) {
    return {{_mm256_add_pd(sum.v[0], _mm256_cvtps_pd(_mm256_castps256_ps128(a.lo))),
             _mm256_add_pd(sum.v[1], _mm256_cvtps_pd(_mm256_extractf128_ps(a.lo, 1))),
             _mm256_add_pd(sum.v[2], _mm256_cvtps_pd(_mm256_castps256_ps128(a.hi))),
             _mm256_add_pd(sum.v[3], _mm256_cvtps_pd(_mm256_extractf128_ps(a.hi, 1)))}};
}
static inline void wide_store(double* p, Wide a) {
    for (int i = 0; i < 4; i++) _mm256_storeu_pd(p + 4 * i, a.v[i]);
}
static inline float f16_to_f32(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

#elif defined(POTOK_AVX512)

static constexpr int kSums = 24;
static constexpr int kRegisters = 32;
using Lanes = __m512;
using Mask = __mmask16;

static inline Lanes load(const float* p) {
    return _mm512_loadu_ps(p);
}
static inline void store(float* p, Lanes a) {
    _mm512_storeu_ps(p, a);
}
static inline Lanes set1(float x) {
    return _mm512_set1_ps(x);
}
static inline Lanes broadcast(const float* p) {
    return _mm512_set1_ps(*p);
}
static inline __m256 low_half(Lanes a) {
    return _mm512_castps512_ps256(a);
}
static inline __m256 high_half(Lanes a) {
    return _mm512_extractf32x8_ps(a, 1);
}
static inline Lanes from_half(__m256 a) {
    return _mm512_insertf32x8(_mm512_setzero_ps(), a, 0);
}
static inline Lanes load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline Lanes load_i8(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// bf16 is the upper half of a float
static inline Lanes load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
static inline void store_f16(uint16_t* p, Lanes a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(low_half(a), _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(high_half(a), _MM_FROUND_TO_NEAREST_INT));
}
static inline Lanes add(Lanes a, Lanes b) {
    return _mm512_add_ps(a, b);
}
static inline Lanes sub(Lanes a, Lanes b) {
    return _mm512_sub_ps(a, b);
}
static inline Lanes mul(Lanes a, Lanes b) {
    return _mm512_mul_ps(a, b);
}
static inline Lanes div(Lanes a, Lanes b) {
    return _mm512_div_ps(a, b);
}
static inline Lanes max(Lanes a, Lanes b) {
    return _mm512_max_ps(a, b);
}
static inline Lanes min(Lanes a, Lanes b) {
    return _mm512_min_ps(a, b);
}
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return _mm512_fmadd_ps(a, b, c);
}
static inline Lanes abs(Lanes a) {
    return _mm512_abs_ps(a);
}
static inline Lanes round_even(Lanes a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline Mask less(Lanes a, Lanes b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
static inline Mask not_less(Lanes a, Lanes b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ);
}
static inline Mask greater_equal(Lanes a, Lanes b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}
static inline Lanes select(Mask m, Lanes yes, Lanes no) {
    return _mm512_mask_blend_ps(m, no, yes);
}
static inline uint32_t bits(Mask m) {
    return m;
}
static inline Mask both(Mask a, Mask b) {
    return (Mask)(a & b);
}
static inline Lanes where(Mask m, Lanes a) {
    return _mm512_maskz_mov_ps(m, a);
}
static inline void store_packed(float* p, Mask m, Lanes a) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps(m, a));
}
static inline Lanes scale_exp2(Mask m, Lanes a, Lanes n) {
    return _mm512_maskz_scalef_ps(m, a, n);
}
static inline Lanes times_exp2(Lanes a, Lanes shifted) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), n));
}
static inline void store_whole(int8_t* p, Lanes a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
static inline void store_whole(int16_t* p, Lanes a) {
    const __m256i v = _mm256_shufflelo_epi16(_mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a)), 0xd8);
    _mm256_storeu_si256((__m256i*)p, _mm256_shufflehi_epi16(v, 0xd8));
}
static inline float sqrt1(float x) {
    return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
}
static inline float fma1(float a, float b, float c) {
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}
static inline float sum_tree(Lanes a) {
    const __m256 v8 = _mm256_add_ps(low_half(a), high_half(a));
    const __m128 v4 = _mm_add_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_add_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_add_ss(v2, _mm_movehdup_ps(v2)));
}
static inline float max_tree(Lanes a) {
    const __m256 v8 = _mm256_max_ps(low_half(a), high_half(a));
    const __m128 v4 = _mm_max_ps(_mm256_castps256_ps128(v8), _mm256_extractf128_ps(v8, 1));
    const __m128 v2 = _mm_max_ps(v4, _mm_movehl_ps(v4, v4));
    return _mm_cvtss_f32(_mm_max_ss(v2, _mm_movehdup_ps(v2)));
}
struct Wide {
    __m512d lo, hi;
};
static inline Wide wide_zero() {
    return {_mm512_setzero_pd(), _mm512_setzero_pd()};
}
static inline Wide wide_add(Wide sum, Lanes a) {
    return {_mm512_add_pd(sum.lo, _mm512_cvtps_pd(low_half(a))), _mm512_add_pd(sum.hi, _mm512_cvtps_pd(high_half(a)))};
}
static inline void wide_store(double* p, Wide a) {
    _mm512_storeu_pd(p, a.lo);
    _mm512_storeu_pd(p + 8, a.hi);
}
static inline float f16_to_f32(uint16_t h) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

#else

static constexpr int kSums = 6;
static constexpr int kRegisters = 8;
struct Lanes {
    float v[16];
};
struct Mask {
    bool v[16];
};

#define POTOK_LANES(type, expr)                   \
    type r;                                       \
    for (int i = 0; i < 16; i++) r.v[i] = (expr); \
    return r

// IEEE half <-> single without any instruction for it. Rounds to nearest even; NaN stays NaN (quieted, payload kept).
static inline float f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    uint32_t u;
    if (exponent == 31) {
        u = sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0);
    } else if (exponent != 0) {
        u = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        // a subnormal half is fraction * 2^-24, exactly representable
        const float f = (float)fraction * 0x1p-24f;
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint16_t f32_to_f16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u >= 0x7f800000) {  // infinity, NaN
        return (uint16_t)(sign | 0x7c00 | (u > 0x7f800000 ? 0x200 | (u >> 13 & 0x3ff) : 0));
    }
    if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to 2^16 or more
    if (u < 0x38800000) {                                   // subnormal half, or zero
        float scaled;
        memcpy(&scaled, &u, 4);
        // Adding 0.5 leaves value / 2^-24, rounded to nearest even, in the low bits of the sum.
        scaled += 0.5f;
        memcpy(&u, &scaled, 4);
        return (uint16_t)(sign | (u - 0x3f000000));
    }
    return (uint16_t)(sign | ((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13));
}
static inline Lanes load(const float* p) {
    POTOK_LANES(Lanes, p[i]);
}
static inline void store(float* p, Lanes a) {
    memcpy(p, a.v, sizeof a.v);
}
static inline Lanes set1(float x) {
    POTOK_LANES(Lanes, x);
}
static inline Lanes broadcast(const float* p) {
    return set1(*p);
}
static inline Lanes load_f16(const uint16_t* p) {
    POTOK_LANES(Lanes, f16_to_f32(p[i]));
}
static inline Lanes load_i8(const int8_t* p) {
    POTOK_LANES(Lanes, (float)p[i]);
}
static inline Lanes load_bf16(const uint16_t* p) {
    Lanes r;
    for (int i = 0; i < 16; i++) {
        const uint32_t u = (uint32_t)p[i] << 16;
        memcpy(&r.v[i], &u, 4);
    }
    return r;
}
static inline void store_f16(uint16_t* p, Lanes a) {
    for (int i = 0; i < 16; i++) p[i] = f32_to_f16(a.v[i]);
}
static inline Lanes add(Lanes a, Lanes b) {
    POTOK_LANES(Lanes, a.v[i] + b.v[i]);
}
static inline Lanes sub(Lanes a, Lanes b) {
    POTOK_LANES(Lanes, a.v[i] - b.v[i]);
}
static inline Lanes mul(Lanes a, Lanes b) {
    POTOK_LANES(Lanes, a.v[i] * b.v[i]);
}
static inline Lanes div(Lanes a, Lanes b) {
    POTOK_LANES(Lanes, a.v[i] / b.v[i]);
}
static inline Lanes max(Lanes a, Lanes b) {
    POTOK_LANES(Lanes, a.v[i] > b.v[i] ? a.v[i] : b.v[i]);
}
static inline Lanes min(Lanes a, Lanes b) {
    POTOK_LANES(Lanes, a.v[i] < b.v[i] ? a.v[i] : b.v[i]);
}
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    POTOK_LANES(Lanes, ::fmaf(a.v[i], b.v[i], c.v[i]));
}
static inline Lanes abs(Lanes a) {
    POTOK_LANES(Lanes, ::fabsf(a.v[i]));
}
static inline Lanes round_even(Lanes a) {
    POTOK_LANES(Lanes, ::nearbyintf(a.v[i]));
}
static inline Mask less(Lanes a, Lanes b) {
    POTOK_LANES(Mask, a.v[i] < b.v[i]);
}
static inline Mask not_less(Lanes a, Lanes b) {
    POTOK_LANES(Mask, !(a.v[i] < b.v[i]));
}
static inline Mask greater_equal(Lanes a, Lanes b) {
    POTOK_LANES(Mask, a.v[i] >= b.v[i]);
}
static inline Lanes select(Mask m, Lanes yes, Lanes no) {
    POTOK_LANES(Lanes, m.v[i] ? yes.v[i] : no.v[i]);
}
static inline uint32_t bits(Mask m) {
    uint32_t b = 0;
    for (int i = 0; i < 16; i++) b |= (uint32_t)m.v[i] << i;
    return b;
}
static inline Mask both(Mask a, Mask b) {
    POTOK_LANES(Mask, a.v[i] && b.v[i]);
}
static inline Lanes where(Mask m, Lanes a) {
    POTOK_LANES(Lanes, m.v[i] ? a.v[i] : 0);
}
static inline void store_packed(float* p, Mask m, Lanes a) {
    for (int i = 0, n = 0; i < 16; i++) {
        if (m.v[i]) p[n++] = a.v[i];
    }
}
static inline Lanes scale_exp2(Mask m, Lanes a, Lanes n) {
    for (int i = 0; i < 16; i++) {
        const uint32_t u = (uint32_t)(n.v[i] > -126 ? (int32_t)n.v[i] + 127 : 1) << 23;
        float power;
        memcpy(&power, &u, 4);
        a.v[i] = m.v[i] ? a.v[i] * power : 0;
    }
    return a;
}
static inline Lanes times_exp2(Lanes a, Lanes shifted) {
    for (int i = 0; i < 16; i++) {
        uint32_t u, n;
        memcpy(&u, &a.v[i], 4);
        memcpy(&n, &shifted.v[i], 4);
        u += n << 23;
        memcpy(&a.v[i], &u, 4);
    }
    return a;
}
static inline void store_whole(int8_t* p, Lanes a) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)a.v[i];
}
static inline void store_whole(int16_t* p, Lanes a) {
    for (int i = 0; i < 16; i++) p[i / 4 * 4 + (i % 2 * 2 + i / 2 % 2)] = (int16_t)a.v[i];
}
static inline float sqrt1(float x) {
    return ::sqrtf(x);
}
static inline float fma1(float a, float b, float c) {
    return ::fmaf(a, b, c);
}
static inline float sum_tree(Lanes a) {
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) a.v[i] = a.v[i] + a.v[i + n];
    return a.v[0];
}
static inline float max_tree(Lanes a) {
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) a.v[i] = a.v[i] > a.v[i + n] ? a.v[i] : a.v[i + n];
    return a.v[0];
}
static inline Lanes sum_trees(const Lanes (&a)[8]) {
    POTOK_LANES(Lanes, i < 8 ? sum_tree(a[i]) : 0);
}
static inline Lanes max_trees(const Lanes (&a)[8]) {
    POTOK_LANES(Lanes, i < 8 ? max_tree(a[i]) : 0);
}
struct Wide {
    double v[16];
};
static inline Wide wide_zero() {
    POTOK_LANES(Wide, 0);
}
static inline Wide wide_add(Wide sum, Lanes a) {
    POTOK_LANES(Wide, sum.v[i] + (double)a.v[i]);
}
static inline void wide_store(double* p, Wide a) {
    memcpy(p, a.v, sizeof a.v);
}

#undef POTOK_LANES
#endif

#if defined(POTOK_AVX2) || defined(POTOK_AVX512)

// A step folds two rows, or sets of rows, into one vector: 22 shuffles and operations for eight trees after the first
// halves, where one by one they are 48, each waiting for the one before.
template <class Op>
static inline Lanes fold_trees(const Lanes (&a)[8], Op op) {
    __m256 v[8];
    for (int r = 0; r < 8; r++) v[r] = op(low_half(a[r]), high_half(a[r]));
    for (int r = 0; r < 4; r++) {
        v[r] = op(_mm256_permute2f128_ps(v[r], v[r + 4], 0x20), _mm256_permute2f128_ps(v[r], v[r + 4], 0x31));
    }
    for (int r = 0; r < 2; r++) {
        v[r] = op(_mm256_shuffle_ps(v[r], v[r + 2], 0x44), _mm256_shuffle_ps(v[r], v[r + 2], 0xee));
    }
    // rows 0, 2, 1, 3 and 4, 6, 5, 7
    v[0] = op(_mm256_shuffle_ps(v[0], v[1], 0x88), _mm256_shuffle_ps(v[0], v[1], 0xdd));
    return from_half(_mm256_permute_ps(v[0], 0xd8));
}
static inline Lanes sum_trees(const Lanes (&a)[8]) {
    return fold_trees(a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
}
static inline Lanes max_trees(const Lanes (&a)[8]) {
    return fold_trees(a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}

#endif

}  // namespace POTOK_ISA
}  // namespace potok
