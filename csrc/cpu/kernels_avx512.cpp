// AVX-512: the rotation and the reductions in registers, VNNI for the integer products.
#define HSWQ_KERNELS kAvx512Kernels
#include "cpu/kernels_all.inl"
