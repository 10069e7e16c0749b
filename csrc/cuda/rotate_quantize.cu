// Rotate and quantise by the plain rule in one pass over x: to packed codes and swizzled scales, or to the
// exact values of those codes. The kernels that every NVFP4 layer runs on its activations; see NOTES.md.
// Groups of 256 of 16-bit x go the quick way (groups.cuh), everything else the exact one (chunks.cuh).
#include "cuda/codes.cuh"
#include "cuda/groups.cuh"
#include "cuda/kernels.h"
#include "cuda/packed.cuh"

namespace hswq::cuda {
namespace {

// Adds up over a warp how many blocks were clipped.
__device__ __forceinline__ void count(unsigned long long* clipped, unsigned mine) {
    if (clipped == nullptr || !__any_sync(0xffffffffu, mine != 0)) return;
    const unsigned sum = __reduce_add_sync(0xffffffffu, mine);
    if (threadIdx.x % 32 == 0) atomicAdd(clipped, static_cast<unsigned long long>(sum));
}

// A lane has one half of a word of scales and needs the other: it gives a half away that a lane `mask` away
// needs.
__device__ __forceinline__ uint32_t complete_word(uint32_t even, uint32_t odd, bool is_odd, int mask) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, is_odd ? even : odd, mask);
    return is_odd ? other | odd << 16 : even | other << 16;
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
        const uint32_t first = blocks[0].scale | blocks[1].scale << 8,
                       second = blocks[2].scale | blocks[3].scale << 8;
        const bool odd = kWide && place.lane % 2;
        const uint32_t word = kWide ? complete_word(first, second, odd, 1) : first | second << 16;
        const int64_t chunk = place.first / 64 + odd;
        if (chunk < chunks)
            *reinterpret_cast<uint32_t*>(scales + scale_word(place.row, chunk, chunks)) = word;
    }
};

struct QuickCodesSink {
    CodesSink exact;

    // Where a lane writes in the first tile.
    struct Common {
        TensorScale s;
        uint8_t* codes;
        uint8_t* scales;
    };

    __device__ bool quick() const { return quick_scale(*exact.tensor_scale); }

    // Lanes four apart complete each other's words of scales: one for row 0, the other for row 1.
    __device__ static int scales_row() { return Groups::block(0) / 2 % 2; }

    __device__ __forceinline__ Common begin() const {
        const int row = Groups::row(scales_row());
        return {tensor_scale_of(exact.tensor_scale),
                exact.codes + Groups::row_offset(Groups::row(0)) * (exact.cols16 / 2) + 8 * Groups::block(0),
                exact.scales + Groups::block(0) / 4 * 512 + row / 4 * 16 + row % 4 * 4};
    }

    __device__ __forceinline__ void store(const Groups& at, float (&v)[kValues], const Common& common) const {
        const QuickBlocks blocks = quick_blocks(v, common.s);
        if (exact.clipped) count(exact.clipped, blocks.clipped);
        uint2 codes[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) codes[e] = encode(v + 16 * e, blocks.reciprocal[e]);
        const uint32_t row_bytes = uint32_t(exact.cols16 / 2), top = at.tile.top();
        uint8_t* to = common.codes + uint64_t(top) * row_bytes + at.tile.column * 128;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (top + at.row_offset(at.row(e)) < uint32_t(exact.rows16))
                *reinterpret_cast<uint4*>(to + 32 * e * row_bytes) =
                    make_uint4(codes[e].x, codes[e].y, codes[e + 2].x, codes[e + 2].y);
        }
        const uint32_t word = complete_word(blocks.scales[0], blocks.scales[1], scales_row(), 4),
                       chunk = at.tile.band / 16 * uint32_t(exact.chunks) + at.tile.column * 4;
        *reinterpret_cast<uint32_t*>(common.scales + uint64_t(chunk) * 512 + at.tile.band % 16 * 32) = word;
    }

    __device__ __forceinline__ static uint2 encode(const float* v, float reciprocal) {
        uint32_t words[2];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            uint32_t pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                pairs[i] = code_pair(v[8 * w + 2 * i], v[8 * w + 2 * i + 1], reciprocal);
            words[w] = pack_codes(pairs);
        }
        return make_uint2(words[0], words[1]);
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

template <class T>
struct QuickValuesSink {
    ValuesSink exact;

    __device__ bool quick() const { return quick_scale(*exact.tensor_scale); }
    __device__ TensorScale begin() const { return tensor_scale_of(exact.tensor_scale); }

    // The value of a rounded pair, in the order of columns.
    __device__ __forceinline__ static uint32_t value(uint32_t pair, uint32_t scale) {
        pair = __byte_perm(pair, 0, 0x1032);  // the even column's half comes first in memory
        const uint32_t bits =
            kHalf<T> ? pair & 0x8e008e00u : (pair & 0x80008000u) | ((pair & 0x0e000e00u) >> 3);
        return times(times(bits, twice<T>(kCodeOffset<T>), T()), scale, T());
    }

    // Chunks of 16 bytes in the scratch, permuted so that eight lanes that access it together differ in
    // banks.
    __device__ __forceinline__ static int chunk_at(int row, int chunk) {
        return 32 * row + (chunk ^ (row / 2 % 4));
    }

    __device__ __forceinline__ void store(const Groups& at, float (&v)[kValues], const TensorScale& s) const {
        const QuickBlocks blocks = quick_blocks(v, s);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 c = e4m3_values(blocks.scales[e % 2]);
            const uint32_t scale = twice<T>(e < 2 ? c.x : c.y);
            uint32_t words[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const uint32_t pair =
                    code_pair(v[16 * e + 2 * i], v[16 * e + 2 * i + 1], blocks.reciprocal[e]);
                words[i] = value(pair, scale);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                at.scratch[chunk_at(at.row(e), 2 * at.block(e) + i)] =
                    make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
        }
        __syncwarp();
        const int lane = threadIdx.x % 32;
        const uint32_t top = at.tile.top();
        auto* y = static_cast<uint16_t*>(exact.out.y.data) + int64_t(top) * exact.out.y.stride +
                  at.tile.column * 256 + 8 * lane;
#pragma unroll
        for (int row = 0; row < kTileRows; ++row) {
            const int offset = at.row_offset(row);
            if (top + offset < exact.out.y.rows)
                *reinterpret_cast<uint4*>(y + offset * uint32_t(exact.out.y.stride)) =
                    at.scratch[chunk_at(row, lane)];
        }
    }
};

}  // namespace

cudaError_t rotate_quantize(const Quantize& job, cudaStream_t stream) {
    const int64_t cols16 = ceil_to(job.x.cols, 16);
    const CodesSink sink{job.tensor_scale,        job.codes, job.scales,           job.clipped,
                         ceil_to(job.x.rows, 16), cols16,    (cols16 / 16 + 3) / 4};
    const MatrixSource source(job.x);
    if (in_groups(source, job.group)) return run_groups(source, QuickCodesSink{sink}, stream);
    return run_chunks(source, sink, job.x.rows, cols16, job.group, stream);
}

cudaError_t rounded_values(const Matrix& x, int group, const float* tensor_scale, const MutableMatrix& y,
                           cudaStream_t stream) {
    const ValuesSink sink{MatrixSink(y), tensor_scale};
    const MatrixSource source(x);
    if (in_groups(source, group) && sink.out.aligned && y.dtype == Dtype::bf16)
        return run_groups(source, QuickValuesSink<__nv_bfloat16>{sink}, stream);
    if (in_groups(source, group) && sink.out.aligned && y.dtype == Dtype::f16)
        return run_groups(source, QuickValuesSink<__half>{sink}, stream);
    return run_chunks(source, sink, x.rows, y.cols, group, stream);
}

}  // namespace hswq::cuda
