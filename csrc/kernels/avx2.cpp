// The table for AVX2 with FMA and F16C; this file alone is compiled for them.
#define POTOK_ISA avx2
#define POTOK_AVX2
#include "kernels/kernels.inl"
