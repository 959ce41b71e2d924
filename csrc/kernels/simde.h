// The AVX-512 that the tables use, in AVX2: SIMDe's, and the few intrinsics that it lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

namespace potok {
namespace emulated {

static inline __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
static inline __m512i cvtepi8_epi32(__m128i a) {
    return join(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
static inline __m512i cvtepu8_epi32(__m128i a) {
    return join(_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8)));
}
// 32-bit lanes cut to those of T, which fill a V.
template <class T, class V>
static inline V narrowed(__m512i a) {
    int32_t wide[16];
    T narrow[16];
    memcpy(wide, &a, sizeof wide);
    for (int i = 0; i < 16; i++) narrow[i] = (T)wide[i];
    V v;
    static_assert(sizeof v == sizeof narrow, "all of it");
    memcpy(&v, narrow, sizeof v);
    return v;
}
static inline __m512d cvtps_pd(__m256 a) {
    const __m512d low = _mm512_castpd256_pd512(_mm256_cvtps_pd(_mm256_castps256_ps128(a)));
    return _mm512_insertf64x4(low, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)), 1);
}

}  // namespace emulated
}  // namespace potok

#define _mm512_cvtepi8_epi32(a) potok::emulated::cvtepi8_epi32(a)
#define _mm512_cvtepu8_epi32(a) potok::emulated::cvtepu8_epi32(a)
#define _mm512_cvtepi32_epi8(a) (potok::emulated::narrowed<int8_t, __m128i>(a))
#define _mm512_cvtepi32_epi16(a) (potok::emulated::narrowed<int16_t, __m256i>(a))
#define _mm512_cvtps_pd(a) potok::emulated::cvtps_pd(a)
