// The portable kernels at AVX2 width, with F16C conversions.
#define HSWQ_KERNELS kAvx2Kernels
#include "cpu/kernels_all.inl"
