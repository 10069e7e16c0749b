// The C++ face of the CPU kernels: whole operations on plain memory, divided over threads, on the best
// instruction set allowed. Every call returns a Status; nothing here knows Python or torch.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace hswq {

enum class Status : int { ok = 0, bad_group, bad_shape, no_memory, not_here };

const char* status_message(Status status);

// x.data etc. must be valid; a group of 0 means no rotation. `threads` is the most that may be used.
Status amax(int threads, const Matrix& x, float* result);
Status rotate(int threads, const Matrix& x, int group, const MutableMatrix& y);
Status quantize(int threads, const QuantizeJob& job, int64_t* clipped);
Status dequantize(int threads, const Nvfp4& w, float tensor_scale, int group, const MutableMatrix& y);
Status quantize_int8(int threads, Int8Job job);
Status dequantize_int8(int threads, const int8_t* q, const float* scale, bool scalar, int group,
                       const MutableMatrix& y);
// `amax` becomes the largest magnitude that was rounded: NaN or infinity where the changed weight is not
// finite. The outputs are of the packed kind of job.from.
Status bake(int threads, const BakeJob& job, float* amax);
// `totals` [kChangeSums], over all rows; job.sums is not read.
Status change_sums(int threads, ChangeJob job, double* totals);
Status swizzle(const uint8_t* linear, int64_t rows, int64_t cols, uint8_t* swizzled);
Status unswizzle(const uint8_t* swizzled, int64_t rows, int64_t cols, uint8_t* linear);
Status fp4_gemm(int threads, const Nvfp4& x, const Nvfp4& w, const Epilogue& e);
Status linear_w4a4(int threads, const Matrix& x, int group, float input_scale, const Nvfp4& w,
                   const Epilogue& e);
Status linear_int8(int threads, const Matrix& x, int group, const int8_t* w, int64_t n, const Epilogue& e);
// input_scale is only read with fp8. Status::not_here where the instruction set has no bf16 tiles: see
// has_w4().
Status linear_w4(int threads, const Matrix& x, int group, bool fp8, float input_scale, const Nvfp4& w,
                 const Epilogue& e);
bool has_w4();

}  // namespace hswq
