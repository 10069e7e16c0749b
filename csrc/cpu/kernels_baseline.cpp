// The portable kernels, for whatever the compiler takes as its base: SSE2 on x86-64, NEON on aarch64.
#define HSWQ_KERNELS kBaselineKernels
#include "cpu/kernels_all.inl"
