// Small kernels around the products: the order of block scales, epilogues that no library has, alpha and
// beta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/packed.cuh"

namespace hswq::cuda {
namespace {

constexpr int kBlockThreads = 256;

unsigned blocks_for(int64_t items) {
    return unsigned((items + kBlockThreads - 1) / kBlockThreads);
}

__device__ __forceinline__ int64_t thread_index() {
    return int64_t(blockIdx.x) * kBlockThreads + threadIdx.x;
}

// One thread a byte of the swizzled scales.
__global__ void swizzle_kernel(const uint8_t* linear, int64_t rows, int64_t cols, int64_t chunks,
                               int64_t bytes, uint8_t* swizzled) {
    const int64_t at = thread_index();
    if (at >= bytes) return;
    const int64_t tile = at / 512, row = tile / chunks * 128 + (at % 512) / 16 + 32 * ((at % 16) / 4),
                  col = tile % chunks * 4 + at % 4;
    swizzled[at] = row < rows && col < cols ? linear[row * cols + col] : 0;
}

__global__ void unswizzle_kernel(const uint8_t* swizzled, int64_t rows, int64_t cols, int64_t chunks,
                                 uint8_t* linear) {
    const int64_t at = thread_index();
    if (at >= rows * cols) return;
    const int64_t row = at / cols, col = at % cols;
    linear[at] = swizzled[scale_word(row, col / 4, chunks) + col % 4];
}

// Eight sums of a row, loaded 16 bytes at a time where `fast`.
__device__ __forceinline__ void load_sums(const Finish& job, int64_t at, int count, bool fast,
                                          float (&sums)[8]) {
    uint32_t raw[8] = {};
    const auto* words = static_cast<const uint32_t*>(job.sums) + at;
    if (fast) {
        const uint4 a = reinterpret_cast<const uint4*>(words)[0],
                    b = reinterpret_cast<const uint4*>(words)[1];
        raw[0] = a.x, raw[1] = a.y, raw[2] = a.z, raw[3] = a.w;
        raw[4] = b.x, raw[5] = b.y, raw[6] = b.z, raw[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = i < count ? words[i] : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = job.integer ? __int2float_rn(int(raw[i])) : floating(raw[i]);
}

// One thread for up to 8 columns of a row.
__global__ void finish_kernel(Finish job, int64_t groups, bool fast) {
    const int64_t at = thread_index();
    if (at >= job.y.rows * groups) return;
    const int64_t row = at / groups, first = at % groups * 8;
    const int count = int(min(int64_t(8), job.y.cols - first));
    const float row_scale = job.x_scale ? job.x_scale[row] : 1.0f;
    float y[8];
    load_sums(job, row * job.sums_stride + first, count, fast, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int64_t col = i < count ? first + i : first;
        y[i] *= row_scale * (job.w_scale ? job.w_scale[job.scalar_w_scale ? 0 : col] : 1.0f);
        if (job.bias) y[i] += job.bias[col];
    }
    const int64_t to = row * job.y.stride + first;
    if (fast && job.y.dtype != Dtype::f32) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.y.data) + to) =
            make_uint4(narrow(y[0], y[1], job.y.dtype), narrow(y[2], y[3], job.y.dtype),
                       narrow(y[4], y[5], job.y.dtype), narrow(y[6], y[7], job.y.dtype));
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i >= count) continue;
        if (job.y.dtype == Dtype::f32) {
            static_cast<float*>(job.y.data)[to + i] = y[i];
        } else {
            static_cast<uint16_t*>(job.y.data)[to + i] = uint16_t(narrow(y[i], 0.0f, job.y.dtype));
        }
    }
}

__global__ void alpha_beta_kernel(float factor, const float* a, const float* b, int64_t count,
                                  float* numbers) {
    const int64_t at = thread_index();
    if (at <= count) numbers[at] = at < count ? factor * (a ? *a : 1.0f) * (b ? *b : 1.0f) : 0.0f;
}

}  // namespace

cudaError_t swizzle(const uint8_t* linear, int64_t rows, int64_t cols, uint8_t* swizzled,
                    cudaStream_t stream) {
    const int64_t chunks = (cols + 3) / 4, bytes = ceil_to(rows, 128) * 4 * chunks;
    if (bytes == 0) return cudaSuccess;
    swizzle_kernel<<<blocks_for(bytes), kBlockThreads, 0, stream>>>(linear, rows, cols, chunks, bytes,
                                                                    swizzled);
    return cudaGetLastError();
}

cudaError_t unswizzle(const uint8_t* swizzled, int64_t rows, int64_t cols, uint8_t* linear,
                      cudaStream_t stream) {
    if (rows * cols == 0) return cudaSuccess;
    unswizzle_kernel<<<blocks_for(rows * cols), kBlockThreads, 0, stream>>>(swizzled, rows, cols,
                                                                            (cols + 3) / 4, linear);
    return cudaGetLastError();
}

cudaError_t finish(const Finish& job, cudaStream_t stream) {
    const int64_t groups = (job.y.cols + 7) / 8;
    if (job.y.rows * groups == 0) return cudaSuccess;
    const auto together = reinterpret_cast<uintptr_t>(job.sums) | reinterpret_cast<uintptr_t>(job.y.data);
    const bool fast =
        together % 16 == 0 && job.y.cols % 8 == 0 && job.y.stride % 8 == 0 && job.sums_stride % 8 == 0;
    finish_kernel<<<blocks_for(job.y.rows * groups), kBlockThreads, 0, stream>>>(job, groups, fast);
    return cudaGetLastError();
}

cudaError_t alpha_beta(float factor, const float* a, const float* b, int64_t count, float* numbers,
                       cudaStream_t stream) {
    alpha_beta_kernel<<<blocks_for(count + 1), kBlockThreads, 0, stream>>>(factor, a, b, count, numbers);
    return cudaGetLastError();
}

}  // namespace hswq::cuda
