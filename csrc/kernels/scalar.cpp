// The scalar table: the bits that every other table must reproduce. Runs on any CPU.
#define POTOK_ISA scalar
#include "kernels/kernels.inl"
