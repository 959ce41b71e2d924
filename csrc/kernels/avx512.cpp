// The table for AVX-512 with VNNI; this file alone is compiled for them. With POTOK_SIMDE it is compiled for AVX2, on
// top of SIMDe, to test its results on machines without AVX-512.
#define POTOK_ISA avx512vnni
#define POTOK_AVX512
#include "kernels/kernels.inl"
