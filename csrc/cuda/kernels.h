// What the .cu files say to each other.
#pragma once

#include "cuda/api.h"

namespace hswq::cuda {

// `quantize` where method is rtn, nothing is random and no scale is kept.
cudaError_t rotate_quantize(const Quantize& job, cudaStream_t stream);

}  // namespace hswq::cuda
