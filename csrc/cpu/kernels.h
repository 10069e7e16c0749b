// What one instruction set's kernels offer, and the plain structures that they work on. No function here
// starts threads: each does a range of rows, and api.cpp divides the work.
#pragma once

#include <cstdint>

namespace hswq {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int64_t ceil_to(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// A row-major matrix of floats; `stride` counts elements from one row to the next.
struct Matrix {
    const void* data;
    int64_t rows, cols, stride;
    Dtype dtype;
};

struct MutableMatrix {
    void* data;
    int64_t rows, cols, stride;
    Dtype dtype;
};

// NVFP4 as on disk: codes [ceil16 rows, ceil16 cols / 2], swizzled block scales [ceil128 rows, ceil4(ceil16
// cols / 16)].
struct Nvfp4 {
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t rows, cols;  // logical
};

enum class Method : int { rtn = 0, four_six = 1, sweep = 2 };

struct QuantizeJob {
    Matrix x;
    int group;  // rotation before quantising; 0: none
    float tensor_scale;
    Method method;
    const float* importance;  // [cols], or null
    bool stochastic;
    uint64_t seed;
    const uint8_t* kept_scales;  // swizzled codes that are kept where they suffice, or null
    uint8_t* codes;
    uint8_t* scales;
};

struct Int8Job {
    Matrix w;
    int group;
    bool stochastic;
    uint64_t seed;
    bool keep_scales;   // `scale` holds what is kept where it suffices; else it is computed
    bool scalar_scale;  // one scale, already final, for the whole matrix
    float* scale;
    int8_t* q;  // [rows, cols], dense
};

enum class WeightKind : int { dense = 0, nvfp4 = 1, int8 = 2 };

// A weight in any form. `dense` gives rows and columns; its data are read for the dense kind only.
struct Weight {
    WeightKind kind;
    Matrix dense;
    int group;              // the packed kinds' rotation; 0: none
    const uint8_t* codes;   // NVFP4
    const uint8_t* scales;  // NVFP4, swizzled
    const int8_t* q;        // INT8 [rows, cols]
    const float* scale;     // NVFP4: the tensor's; INT8: the rows', or one in all
    bool scalar_scale;
};

// What is added to an unrotated weight [rows, cols]: left [rows, rank] times down [rank, cols], or left
// itself, [rows, cols = rank], where down is null.
struct Delta {
    const float* left;
    const float* down;
    int64_t rank, cols;
};

struct BakeJob {
    Weight from;
    Delta delta;
    uint64_t seed;
    uint8_t* codes;  // NVFP4
    uint8_t* scales;
    int8_t* q;  // INT8
    float* row_scale;
};

// Sums over a row of W, the weight before, C its change, D the delta, S a source: see lora/change.py.
enum : int {
    kTouched,
    kCC,
    kCD,
    kDD,
    kWW,
    kWD,
    kMissed,
    kCRotated,
    kErrorBefore,
    kSource,
    kErrorAfter,
    kSourceAfter,
    kChangeSums
};

struct ChangeJob {
    Weight before, after;
    Delta delta;
    Matrix source;  // data null without one
    double* sums;   // [rows, kChangeSums]
};

// How sums become Y [x rows, w rows]: fp4: sum * alpha + bias in fp64; otherwise sum * (x_scale * w_scale) +
// bias in fp32, with one number a row of x (null: `alpha`) and one a row of w (null: none).
struct Epilogue {
    MutableMatrix y;
    float alpha;
    const float* x_scale;
    const float* w_scale;
    bool scalar_w_scale;
    const float* bias;  // [N], or null
};

// A matrix product works on x packed once (rows in units of 16) and on w decoded panel by panel (likewise),
// so that its own layout is nobody else's business. k is the padded number of columns.
struct Fp4Gemm {
    int64_t (*packed_bytes)(int64_t m, int64_t k);
    void (*pack)(const Nvfp4& x, uint8_t* packed, int64_t begin, int64_t end);
    void (*multiply)(const uint8_t* packed, const Nvfp4& w, const Epilogue& e, int64_t begin, int64_t end);
};

struct Int8Gemm {
    int64_t (*packed_bytes)(int64_t m, int64_t k);
    void (*pack)(const int8_t* q, int64_t m, int64_t k, uint8_t* packed, int64_t begin, int64_t end);
    void (*multiply)(const uint8_t* packed, const int8_t* w, int64_t n, int64_t k, const Epilogue& e,
                     int64_t begin, int64_t end);
};

// 16-bit or 8-bit activations on NVFP4 weights, in bf16 with fp32 sums; null where the instruction set has no
// fast way. With fp8_scale > 0 activations are rounded to E4M3 at that scale, and weights to E4M3 with a
// power of two a row.
struct W4Gemm {
    int64_t (*packed_bytes)(int64_t m, int64_t k);
    void (*pack)(const Matrix& x, int group, bool fp8, float fp8_scale, uint8_t* packed, int64_t begin,
                 int64_t end);
    void (*multiply)(const uint8_t* packed, const Nvfp4& w, bool fp8, const Epilogue& e, int64_t begin,
                     int64_t end);
};

struct Kernels {
    void (*amax_rows)(const Matrix& x, int group, float* amax, int64_t begin, int64_t end);
    void (*rotate)(const Matrix& x, int group, const MutableMatrix& y, int64_t begin, int64_t end);
    // Returns how many blocks the tensor scale clipped (amax / 6 / s > 448).
    int64_t (*quantize)(const QuantizeJob& job, int64_t begin, int64_t end);
    void (*dequantize)(const Nvfp4& w, float tensor_scale, int group, const MutableMatrix& y, int64_t begin,
                       int64_t end);
    void (*quantize_int8)(const Int8Job& job, int64_t begin, int64_t end);
    void (*dequantize_int8)(const int8_t* q, const float* scale, bool scalar, int group,
                            const MutableMatrix& y, int64_t begin, int64_t end);
    // Both return the bits of the largest magnitude that was rounded (a NaN is above all).
    int32_t (*bake_nvfp4)(const BakeJob& job, int64_t begin, int64_t end);
    int32_t (*bake_int8)(const BakeJob& job, int64_t begin, int64_t end);
    void (*change_sums)(const ChangeJob& job, int64_t begin, int64_t end);
    Fp4Gemm fp4;
    Int8Gemm int8;
    W4Gemm w4;
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;
#endif

}  // namespace hswq
