// Rotate and quantise by the plain rule in one pass over x: to packed codes and swizzled scales, or to the
// exact values of those codes. The kernel that every NVFP4 layer runs on its activations; see NOTES.md.
#include "cuda/codes.cuh"
#include "cuda/kernels.h"

namespace hswq::cuda {
namespace {

// Adds up over a warp how many blocks were clipped.
__device__ __forceinline__ void count(unsigned long long* clipped, unsigned mine) {
    if (clipped == nullptr || !__any_sync(0xffffffffu, mine != 0)) return;
    const unsigned sum = __reduce_add_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) atomicAdd(clipped, static_cast<unsigned long long>(sum));
}

struct CodesSink {
    const float* tensor_scale;
    uint8_t* codes;
    uint8_t* scales;
    unsigned long long* clipped;
    int64_t rows16, cols16, chunks;

    template <bool kWide>
    __device__ __forceinline__ void store(const Place& place, float (&v)[kValues], float factor) const {
        const float s = *tensor_scale;
        PlainBlock blocks[4];
        unsigned over = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            blocks[b] = plain_block(v + 16 * b, factor, s);
            over += blocks[b].clipped;
        }
        count(clipped, over);
        store_codes<kWide>(place, blocks);
        store_scales<kWide>(place, blocks);
    }

    template <bool kWide>
    __device__ __forceinline__ void store_codes(const Place& place, const PlainBlock (&blocks)[4]) const {
        if (place.row >= rows16) return;
        uint8_t* row = codes + place.row * (cols16 / 2);
        if (kWide) {  // then cols16 is a multiple of 256
#pragma unroll
            for (int b = 0; b < 4; b += 2) {
                const uint2 low = blocks[b].codes, high = blocks[b + 1].codes;
                *reinterpret_cast<uint4*>(row + place.column(16 * b) / 2) =
                    make_uint4(low.x, low.y, high.x, high.y);
            }
        } else {
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const int64_t col = place.column(16 * b);
                if (col < cols16) *reinterpret_cast<uint2*>(row + col / 2) = blocks[b].codes;
            }
        }
    }

    template <bool kWide>
    __device__ __forceinline__ void store_scales(const Place& place, const PlainBlock (&blocks)[4]) const {
        uint32_t first = blocks[0].scale | blocks[1].scale << 8,
                 second = blocks[2].scale | blocks[3].scale << 8;
        int64_t chunk = place.first / 64;
        if (kWide) {
            // Two lanes have halves of two words: each gives one half away and completes the other.
            const bool odd = place.lane % 2;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
            if (odd) {
                first = other;
                chunk += 1;
            } else {
                second = other;
            }
        }
        if (chunk < chunks)
            *reinterpret_cast<uint32_t*>(scales + scale_word(place.row, chunk, chunks)) = first | second
                                                                                                      << 16;
    }
};

// The values of the codes, value * block scale: exact in 16 bits.
struct ValuesSink {
    MatrixSink out;
    const float* tensor_scale;

    template <bool kWide>
    __device__ __forceinline__ void store(const Place& place, float (&v)[kValues], float factor) const {
        const float s = *tensor_scale;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            const PlainBlock block = plain_block(v + 16 * b, factor, s);
            const float scale = e4m3_value(block.scale);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const uint32_t word = i < 8 ? block.codes.x : block.codes.y;
                v[16 * b + i] = e2m1_value(word >> nibble(i % 8)) * scale;
            }
        }
        out.store<kWide>(place, v, 1.0f);
    }
};

}  // namespace

cudaError_t rotate_quantize(const Quantize& job, cudaStream_t stream) {
    const int64_t cols16 = ceil_to(job.x.cols, 16);
    const CodesSink sink{job.tensor_scale,        job.codes, job.scales,           job.clipped,
                         ceil_to(job.x.rows, 16), cols16,    (cols16 / 16 + 3) / 4};
    return run_chunks(MatrixSource(job.x), sink, job.x.rows, cols16, job.group, stream);
}

cudaError_t rounded_values(const Matrix& x, int group, const float* tensor_scale, const MutableMatrix& y,
                           cudaStream_t stream) {
    return run_chunks(MatrixSource(x), ValuesSink{MatrixSink(y), tensor_scale}, x.rows, y.cols, group,
                      stream);
}

}  // namespace hswq::cuda
