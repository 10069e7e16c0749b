// AVX-512: the rotation and the reductions in registers, BF16 and VNNI for matrix products.
#define HSWQ_KERNELS kAvx512Kernels
#include "cpu/kernels_all.inl"
