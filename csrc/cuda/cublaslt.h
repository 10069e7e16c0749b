// Matrix products through cuBLASLt, which is found at run time: nothing of it is needed to build or to
// import.
#pragma once

#include <string>

#include "cuda/api.h"

namespace hswq::cuda {

enum class Operand : int { f32 = 0, bf16 = 1, f16 = 2, fp4 = 3 };

// Row-major Y [m, n] = alpha * X [m, k] W [n, k]^T + beta * Y (beta is 0) + bias.
struct Product {
    Operand operand;
    int64_t m, n, k;
    const void* x;
    int64_t x_stride;
    const void* w;
    int64_t w_stride;
    const void* x_scales;  // swizzled block scales, for fp4
    const void* w_scales;
    const float* alpha_beta;  // two numbers on the card
    const void* bias;         // [n], of y's dtype, or null
    void* y;
    int64_t y_stride;
    Dtype dtype;  // of y
    void* workspace;
    int64_t workspace_bytes;
};

enum class Answer { done, not_supported, failed };

// not_supported: the library has no way to do this product on this card (below capability 10 it has none for
// fp4); nothing was enqueued. failed: `message` says what went wrong.
Answer multiply(const Product& job, cudaStream_t stream, std::string& message);

// Whether the library would do an ordinary fp4 product on the current device; nothing is run.
Answer probe_fp4(std::string& message);

// 0 where no usable library is found.
int64_t library_version();

}  // namespace hswq::cuda
