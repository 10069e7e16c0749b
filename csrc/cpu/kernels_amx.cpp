// AVX-512 with the tile unit for all matrix products.
#define HSWQ_KERNELS kAmxKernels
#include "cpu/kernels_all.inl"
