// What one instruction set's kernels offer, and the plain structures that they work on. No function here starts threads: each does
// a range of rows or columns, and api.cpp divides the work.
#pragma once

#include <cstdint>

namespace hswq {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2 };

inline int64_t ceil_to(int64_t n, int64_t multiple) {
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

// NVFP4 as on disk: packed codes [ceil16 rows, ceil16 cols / 2], swizzled block scales [ceil128 rows, ceil4(ceil16 cols / 16)].
struct Nvfp4 {
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t rows, cols;  // logical
};

enum class Method : int { rtn = 0, four_six = 1, sweep = 2 };

struct QuantizeJob {
    Matrix x;
    int group;                  // rotation before quantising; 0: none
    float tensor_scale;
    Method method;
    const float* importance;    // [cols], or null
    bool stochastic;
    uint64_t seed;
    const uint8_t* kept_scales; // swizzled codes that are kept where they suffice, or null
    uint8_t* codes;
    uint8_t* scales;
};

struct Int8Job {
    Matrix w;
    int group;
    bool stochastic;
    uint64_t seed;
    bool keep_scales;           // `scale` holds what is kept where it suffices; else it is computed
    bool scalar_scale;          // one scale for the whole matrix instead of one a row (only with keep_scales, already final)
    float* scale;
    int8_t* q;                  // [rows, cols], dense
};

// Y[m, n] = epilogue(sum over k of x[m, k] w[n, k]); y is [x rows, w rows].
struct Epilogue {
    MutableMatrix y;
    double alpha;               // fp4: multiplies in fp64; w4a16, w4a8: the fp32 scale
    const float* row_scale;     // [N] multiplies alpha in fp32, or null (w4a8, int8)
    const float* col_scale;     // [M] scale of each row of x, or null (int8)
    const float* bias;          // [N] or null
};

struct Kernels {
    void (*amax)(const Matrix& x, int64_t begin, int64_t end, float* result);
    void (*rotate)(const Matrix& x, int group, const MutableMatrix& y, int64_t begin, int64_t end);
    // Returns how many blocks the tensor scale clipped (amax / 6 / s > 448).
    int64_t (*quantize)(const QuantizeJob& job, int64_t begin, int64_t end);
    void (*dequantize)(const Nvfp4& w, float tensor_scale, int group, const MutableMatrix& y, int64_t begin, int64_t end);
    void (*quantize_int8)(const Int8Job& job, int64_t begin, int64_t end);
    void (*amax_rows)(const Matrix& x, int group, float* amax, int64_t begin, int64_t end);
    void (*dequantize_int8)(const int8_t* q, const float* scale, bool scalar, int group, const MutableMatrix& y,
                            int64_t begin, int64_t end);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace hswq
