// The C++ face of the CUDA kernels. Every pointer is device memory of the device that is current, except
// where said; every call only enqueues work on `stream` and returns the launch's error. Nothing here
// allocates, synchronises, or knows Python or torch. The numbers are defined in hswq_lab/formats.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cpu/kernels.h"

namespace hswq::cuda {

// E2M1 codes of `x`, rotated first, and their block scales, with one tensor scale.
struct Quantize {
    Matrix x;
    int group;  // 0: no rotation
    const float* tensor_scale;
    Method method;
    const float* importance;  // [cols], or null
    bool stochastic;
    uint64_t seed;
    const uint8_t* kept_scales;  // swizzled codes that are kept where they suffice, or null
    uint8_t* codes;
    uint8_t* scales;
    unsigned long long* clipped;  // how many blocks the tensor scale clipped, or null
};

enum class Int8Scales : int { own = 0, kept, kept_scalar };

// `amax` [rows] (one element for kept_scalar) is scratch; `scale` is an input for the kept kinds, and
// `new_scale` is always written.
struct QuantizeInt8 {
    Matrix x;
    int group;
    bool stochastic;
    uint64_t seed;
    Int8Scales kind;
    const float* scale;
    uint32_t* amax;
    float* new_scale;
    int8_t* q;  // [rows, cols], dense
};

// How int32 or fp32 sums [rows, cols] become y: sum * (x_scale[row] * w_scale[col]) + bias[col], in fp32.
struct Finish {
    const void* sums;
    int64_t sums_stride;
    bool integer;
    const float* x_scale;  // null: 1
    const float* w_scale;  // null: 1
    bool scalar_w_scale;
    const float* bias;  // or null
    MutableMatrix y;
};

// Y [m, n] = (X [m, k] W [n, k]^T) * (x_scale * w_scale) + bias, in fp32, rounded once to bf16 or fp16. X, W
// and rows of Y start at multiples of 16 bytes, k is a multiple of 16, n of 8.
struct Int8Product {
    int64_t m, n, k;
    const void* x;
    int64_t x_stride;
    const void* w;
    int64_t w_stride;
    const float* x_scale;  // [m]
    const float* w_scale;  // [n], or one number
    bool scalar_w_scale;
    const float* bias;  // [n], or null
    MutableMatrix y;
};

// Y [M, N] = alpha * X W^T + bias, without W's tensor scale. X is bf16 or fp16 with 16-byte aligned rows;
// w.cols = K is a multiple of 32.
struct W4Product {
    Matrix x;
    Nvfp4 w;
    const float* first_scale;   // alpha is the product of the two
    const float* second_scale;  // null: 1
    const float* bias;          // [N], or null
    MutableMatrix y;
};

constexpr int64_t kSkinnyRows = 64;

// At most kSkinnyRows rows of X, any dtype of Y.
cudaError_t skinny(const W4Product& job, cudaStream_t stream);
// Whether this device and this build have `w4_product` (capability 9.0, target 90a).
bool has_w4_product(int device);
// Codes and scales 16-byte aligned, N a multiple of 8, Y of X's dtype with 16-byte aligned rows.
cudaError_t w4_product(const W4Product& job, cudaStream_t stream);
// Whether this device and this build have `int8_product` (capability 9.0, target 90a).
bool has_int8_product(int device);
cudaError_t int8_product(const Int8Product& job, cudaStream_t stream);
cudaError_t amax(const Matrix& x, float* result, cudaStream_t stream);
cudaError_t rotate(const Matrix& x, int group, const MutableMatrix& y, cudaStream_t stream);
cudaError_t quantize(const Quantize& job, cudaStream_t stream);
// The exact values code * block scale that `quantize` by "rtn" stands for, without the tensor scale. y may
// have up to 15 columns more than x: they become 0. Its dtype is bf16 or fp16 (6 significant bits, 2^-10 to
// 2688).
cudaError_t rounded_values(const Matrix& x, int group, const float* tensor_scale, const MutableMatrix& y,
                           cudaStream_t stream);
// E4M3(rotated x / (6 * input_scale)), zeros kept as they are. `y` [rows, cols], cols up to 15 more than x's.
cudaError_t quantize_fp8(const Matrix& x, int group, const float* input_scale, uint8_t* y, int64_t y_cols,
                         cudaStream_t stream);
// tensor_scale null: block scales only.
cudaError_t dequantize(const Nvfp4& w, const float* tensor_scale, int group, const MutableMatrix& y,
                       cudaStream_t stream);
// E4M3 with a power of two a row. y [rows, ceil16 cols].
cudaError_t fp8_weight(const Nvfp4& w, float* row_scale, uint8_t* y, cudaStream_t stream);
cudaError_t quantize_int8(const QuantizeInt8& job, cudaStream_t stream);
cudaError_t dequantize_int8(const int8_t* q, const float* scale, bool scalar, int group,
                            const MutableMatrix& y, cudaStream_t stream);
cudaError_t swizzle(const uint8_t* linear, int64_t rows, int64_t cols, uint8_t* swizzled,
                    cudaStream_t stream);
cudaError_t unswizzle(const uint8_t* swizzled, int64_t rows, int64_t cols, uint8_t* linear,
                      cudaStream_t stream);
cudaError_t finish(const Finish& job, cudaStream_t stream);
// `count` numbers factor * a * b (null: 1), and a 0 after them: alpha and beta of a product whose scales lie
// on the card, or a row of equal scales.
cudaError_t alpha_beta(float factor, const float* a, const float* b, int64_t count, float* numbers,
                       cudaStream_t stream);

}  // namespace hswq::cuda
