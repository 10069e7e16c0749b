// Y [M, N] = alpha * X [M, K] W [N, K]^T + bias for few rows of X, 16-bit X and NVFP4 weights: a product that
// is bound by reading W, once, as it is stored.
//
// A block takes 16 rows of W, its eight warps share out K. In a step a warp reads 128 columns: each lane 16
// bytes (32 codes, two blocks) of two rows, decodes them in registers (value * block scale is exact in 16
// bits) and multiplies them on the tensor cores, W being the left operand. Which columns meet in one
// instruction is free as long as both operands agree, so a lane multiplies exactly what it has read, in
// order, and nothing moves between lanes. The warps' sums meet in shared memory, in a fixed order.
#include <type_traits>

#include "cuda/chunks.cuh"

namespace hswq::cuda {
namespace {

constexpr int kWarps = 8, kRows = 16, kStep = 128;

// Two codes of a byte, the even column first, as 16-bit floats without their exponent's offset (2^126 for
// bf16, 2^14 for fp16): the bits of E2M1 stand as those of a wider float's.
template <class T>
__device__ __forceinline__ uint32_t spread(uint32_t byte) {
    constexpr int kShift = std::is_same<T, __half>::value ? 9 : 6;
    return ((byte & 0x70u) << (kShift - 4)) | ((byte & 0x07u) << (kShift + 16)) | ((byte & 0x80u) << 8) |
           ((byte & 0x08u) << 28);
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b, __half) {
    const __half2 y = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&y);
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b, __nv_bfloat16) {
    const __nv_bfloat162 y =
        __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&y);
}

template <class T>
__device__ __forceinline__ uint32_t twice(float value) {
    constexpr Dtype dtype = std::is_same<T, __half>::value ? Dtype::f16 : Dtype::bf16;
    return narrow(value, value, dtype);
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             __half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 32 codes of a row and the scales of their two blocks; zeros beyond K.
struct Piece {
    uint4 codes;
    uint32_t scales;

    __device__ __forceinline__ uint32_t byte(int i) const {
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        return words[i / 4] >> (8 * (i % 4));
    }
};

__device__ __forceinline__ Piece read(const Skinny& job, int64_t row, int64_t col, int64_t chunks) {
    Piece piece{make_uint4(0, 0, 0, 0), 0};
    if (col < job.w.cols) {
        piece.codes = __ldcs(reinterpret_cast<const uint4*>(job.w.codes + row * (job.w.cols / 2) + col / 2));
        piece.scales = *reinterpret_cast<const uint16_t*>(job.w.scales + scale_word(row, col / 64, chunks) +
                                                          (col / 16) % 4);
    }
    return piece;
}

template <class T, int kTiles>
__device__ __forceinline__ void step(const Skinny& job, const Piece (&w)[2], int64_t col,
                                     float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t offset = twice<T>(std::is_same<T, __half>::value ? 0x1p14f : 0x1p126f);
    uint32_t scale[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        scale[r][0] = twice<T>(e4m3_value(w[r].scales & 255u));
        scale[r][1] = twice<T>(e4m3_value(w[r].scales >> 8));
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // two instructions each, 8 columns a lane
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t raw = spread<T>(w[r].byte(4 * pair + 2 * i + half));
                    a[i][2 * half + r] = times(times(raw, offset, T()), scale[r][pair / 2], T());
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const int64_t m = 8 * tile + lane / 4;
            uint4 x = make_uint4(0, 0, 0, 0);
            if (m < job.x.rows && col < job.w.cols)
                x = *reinterpret_cast<const uint4*>(static_cast<const T*>(job.x.data) + m * job.x.stride +
                                                    col + 8 * pair);
            multiply_add(sums[tile], a[0], x.x, x.y, T());
            multiply_add(sums[tile], a[1], x.z, x.w, T());
        }
    }
}

template <class T, int kTiles>
__global__ void __launch_bounds__(32 * kWarps) skinny_kernel(Skinny job) {
    __shared__ float partial[kWarps][8 * kTiles][kRows];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t row = int64_t(blockIdx.x) * kRows + lane / 4, chunks = (job.w.cols / 16 + 3) / 4;
    float sums[kTiles][4] = {};
    const int64_t own = 32 * (lane % 4);
    Piece next[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) next[r] = read(job, row + 8 * r, warp * kStep + own, chunks);
    for (int64_t base = warp * kStep; base < job.w.cols; base += kWarps * kStep) {
        const Piece w[2] = {next[0], next[1]};
#pragma unroll
        for (int r = 0; r < 2; ++r) next[r] = read(job, row + 8 * r, base + kWarps * kStep + own, chunks);
        step<T>(job, w, base + own, sums);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            partial[warp][8 * tile + 2 * (lane % 4) + i % 2][lane / 4 + 8 * (i / 2)] = sums[tile][i];
    }
    __syncthreads();
    const float alpha = *job.first_scale * (job.second_scale ? *job.second_scale : 1.0f);
    for (int at = threadIdx.x; at < 8 * kTiles * kRows; at += 32 * kWarps) {
        const int64_t m = at / kRows, n = int64_t(blockIdx.x) * kRows + at % kRows;
        if (m >= job.y.rows || n >= job.y.cols) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += partial[w][m][at % kRows];
        sum = sum * alpha + (job.bias ? job.bias[n] : 0.0f);
        const int64_t to = m * job.y.stride + n;
        if (job.y.dtype == Dtype::f32) {
            static_cast<float*>(job.y.data)[to] = sum;
        } else {
            static_cast<uint16_t*>(job.y.data)[to] = uint16_t(narrow(sum, 0.0f, job.y.dtype));
        }
    }
}

template <class T>
cudaError_t launch(const Skinny& job, cudaStream_t stream) {
    const unsigned blocks = unsigned((job.w.rows + kRows - 1) / kRows);
    constexpr int kThreadsHere = 32 * kWarps;
    if (job.x.rows <= 8) {
        skinny_kernel<T, 1><<<blocks, kThreadsHere, 0, stream>>>(job);
    } else if (job.x.rows <= 16) {
        skinny_kernel<T, 2><<<blocks, kThreadsHere, 0, stream>>>(job);
    } else if (job.x.rows <= 32) {
        skinny_kernel<T, 4><<<blocks, kThreadsHere, 0, stream>>>(job);
    } else {
        skinny_kernel<T, 8><<<blocks, kThreadsHere, 0, stream>>>(job);
    }
    return cudaGetLastError();
}

}  // namespace

cudaError_t skinny(const Skinny& job, cudaStream_t stream) {
    if (job.x.rows == 0 || job.w.rows == 0) return cudaSuccess;
    if (job.x.rows > kSkinnyRows || job.w.cols % 32 != 0 || job.x.dtype == Dtype::f32)
        return cudaErrorInvalidValue;
    return job.x.dtype == Dtype::f16 ? launch<__half>(job, stream) : launch<__nv_bfloat16>(job, stream);
}

}  // namespace hswq::cuda
