// Packed NVFP4 to wider values in the stored basis, for products: E4M3 with a power of two a row, or 16 bits.
//
// A block of 16 codes has eight magnitudes at most. Each thread computes them once, as bytes of a table in
// two (or four) registers, and a byte permutation looks four codes up at a time.
#include <cuda_fp8.h>

#include "cuda/packed.cuh"

namespace hswq::cuda {
namespace {

constexpr int kRowsAtOnce = 8;  // a warp a row: r, r + 32, r + 64, r + 96 and the same of r + 1, whose scales
                                // share 32 bytes

__device__ __forceinline__ int64_t warp_row() {
    const int warp = threadIdx.x / 32;
    return int64_t(blockIdx.x / 16) * 128 + blockIdx.x % 16 * 2 + warp / 4 + 32 * (warp % 4);
}

// Eight codes with the even column's nibble first, as a permutation selects them: column i in nibble i.
__device__ __forceinline__ uint32_t in_order(uint32_t codes) {
    return ((codes >> 4) & 0x0f0f0f0fu) | ((codes << 4) & 0xf0f0f0f0u);
}

// The sign bits of four codes, in the top bit of four bytes. Bit 3 of a selector makes the selected byte's
// top bit fill it: 0x80 becomes 0xff. (__byte_perm does not promise that.)
__device__ __forceinline__ uint32_t sign_bytes(uint32_t codes) {
    uint32_t filled;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(filled) : "r"(0x80808080u), "r"(codes));
    return (filled << 7) & 0x80808080u;
}

__device__ __forceinline__ float block_scale(const Nvfp4& w, int64_t row, int64_t block, int64_t chunks) {
    return e4m3_value(w.scales[scale_word(row, block / 4, chunks) + block % 4]);
}

__device__ __forceinline__ uint32_t largest_code(uint32_t codes) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 4) largest = max(largest, (codes >> i) & 7u);
    return largest;
}

// The E4M3 bytes of the magnitudes 0, .5, 1, 1.5 and 2, 3, 4, 6 times `factor`.
__device__ __forceinline__ uint2 e4m3_table(float factor) {
    const auto two = [factor](float a, float b) {
        return uint32_t(
            __nv_cvt_float2_to_fp8x2(make_float2(a * factor, b * factor), __NV_SATFINITE, __NV_E4M3));
    };
    return make_uint2(two(0.0f, 0.5f) | two(1.0f, 1.5f) << 16, two(2.0f, 3.0f) | two(4.0f, 6.0f) << 16);
}

// hswq_lab.formats.fp8_weight. y [rows, 16 * blocks].
__global__ void __launch_bounds__(32 * kRowsAtOnce)
    fp8_weight_kernel(Nvfp4 w, int64_t blocks, float* row_scale, uint8_t* y) {
    const int64_t row = warp_row(), chunks = (blocks + 3) / 4;
    const int lane = threadIdx.x % 32;
    if (row >= w.rows) return;
    const auto* codes = reinterpret_cast<const uint2*>(w.codes + row * blocks * 8);
    float amax = 0.0f;
#pragma unroll 4
    for (int64_t block = lane; block < blocks; block += 32) {
        const uint2 q = codes[block];
        const float magnitude = e2m1_value(max(largest_code(q.x), largest_code(q.y)));
        amax = fmaxf(amax, magnitude * block_scale(w, row, block, chunks));
    }
    const uint32_t largest = __reduce_max_sync(0xffffffffu, bits(amax));
    // The least e with amax / 2^e <= 448 = 1.75 * 2^8.
    const int e = largest == 0 ? 0 : int(largest >> 23) - 127 - 8 + ((largest & 0x7fffffu) > 0x600000u);
    if (lane == 0) row_scale[row] = floating(uint32_t(127 + e) << 23);
    const float inverse = floating(uint32_t(127 - e) << 23);
    auto* out = reinterpret_cast<uint4*>(y + row * blocks * 16);
#pragma unroll 4
    for (int64_t block = lane; block < blocks; block += 32) {
        const uint2 q = codes[block];
        const uint2 table = e4m3_table(block_scale(w, row, block, chunks) * inverse);
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t four = in_order(i < 2 ? q.x : q.y) >> (16 * (i % 2));
            words[i] = __byte_perm(table.x, table.y, four & 0x7777u) | sign_bytes(four);
        }
        out[block] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// value * factor in 16 bits, a thread eight codes. y [w.rows, 16 * blocks].
__global__ void __launch_bounds__(32 * kRowsAtOnce)
    sixteen_bits_kernel(Nvfp4 w, int64_t blocks, const float* tensor_scale, MutableMatrix y) {
    const int64_t row = warp_row(), chunks = (blocks + 3) / 4;
    if (row >= w.rows) return;
    const float s = tensor_scale ? *tensor_scale : 1.0f;
    const auto* codes = reinterpret_cast<const uint32_t*>(w.codes + row * blocks * 8);
    auto* out = reinterpret_cast<uint4*>(static_cast<uint16_t*>(y.data) + row * y.stride);
#pragma unroll 4
    for (int64_t half = threadIdx.x % 32; half < 2 * blocks; half += 32) {
        const uint32_t q = in_order(codes[half]);
        const float factor = s * block_scale(w, row, half / 2, chunks);
        uint32_t magnitudes[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            magnitudes[i] = narrow(e2m1_value(2 * i) * factor, e2m1_value(2 * i + 1) * factor, y.dtype);
        const uint32_t low[2] = {__byte_perm(magnitudes[0], magnitudes[1], 0x6420),
                                 __byte_perm(magnitudes[2], magnitudes[3], 0x6420)},
                       high[2] = {__byte_perm(magnitudes[0], magnitudes[1], 0x7531),
                                  __byte_perm(magnitudes[2], magnitudes[3], 0x7531)};
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t four = q >> (16 * i), lower = __byte_perm(low[0], low[1], four & 0x7777u),
                           upper = __byte_perm(high[0], high[1], four & 0x7777u) | sign_bytes(four);
            words[2 * i] = __byte_perm(lower, upper, 0x5140);
            words[2 * i + 1] = __byte_perm(lower, upper, 0x7362);
        }
        out[half] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

unsigned row_blocks(int64_t rows) {
    return unsigned(ceil_to(rows, 128) / kRowsAtOnce);
}

}  // namespace

cudaError_t fp8_weight(const Nvfp4& w, float* row_scale, uint8_t* y, cudaStream_t stream) {
    if (w.rows == 0) return cudaSuccess;
    fp8_weight_kernel<<<row_blocks(w.rows), 32 * kRowsAtOnce, 0, stream>>>(w, ceil_to(w.cols, 16) / 16,
                                                                           row_scale, y);
    return cudaGetLastError();
}

cudaError_t dequantize(const Nvfp4& w, const float* tensor_scale, int group, const MutableMatrix& y,
                       cudaStream_t stream) {
    const bool aligned = reinterpret_cast<uintptr_t>(y.data) % 16 == 0 && y.stride % 8 == 0;
    if (group != 0 || y.dtype == Dtype::f32 || !aligned || y.cols % 16 != 0)
        return run_chunks(CodesSource(w, tensor_scale), MatrixSink(y), y.rows, y.cols, group, stream);
    if (y.rows == 0) return cudaSuccess;
    sixteen_bits_kernel<<<row_blocks(w.rows), 32 * kRowsAtOnce, 0, stream>>>(w, y.cols / 16, tensor_scale, y);
    return cudaGetLastError();
}

}  // namespace hswq::cuda
