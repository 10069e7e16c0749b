// Packed NVFP4: where block scales lie, and codes as a source of values.
#pragma once

#include "cuda/chunks.cuh"

namespace hswq::cuda {

// The word with the scales of rows r and 64 columns from 64 * chunk: four columns of the 128x4 order.
__host__ __device__ __forceinline__ int64_t scale_word(int64_t row, int64_t chunk, int64_t chunks) {
    return ((row >> 7) * chunks + chunk) * 512 + (row & 31) * 16 + ((row & 127) >> 5) * 4;
}

// value * (tensor scale * block scale); without a tensor scale, value * block scale. Columns go up to ceil16.
struct CodesSource {
    Nvfp4 w;
    const float* tensor_scale;
    int64_t bytes, chunks;  // of a row

    CodesSource(const Nvfp4& codes, const float* scale)
        : w(codes),
          tensor_scale(scale),
          bytes(ceil_to(codes.cols, 16) / 2),
          chunks((ceil_to(codes.cols, 16) / 16 + 3) / 4) {}

    __device__ __forceinline__ void load_block(int64_t row, int64_t col, float s, float* v) const {
        uint32_t words[2] = {0, 0};
        float factor = 0.0f;
        if (row < w.rows && col < 2 * bytes) {
            const uint2 q = *reinterpret_cast<const uint2*>(w.codes + row * bytes + col / 2);
            words[0] = q.x, words[1] = q.y;
            factor = s * e4m3_value(w.scales[scale_word(row, col / 64, chunks) + (col / 16) % 4]);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            // Byte i / 2 of the block, the even column in its high nibble.
            const uint32_t code = words[i / 8] >> (8 * ((i % 8) / 2) + (i % 2 ? 0 : 4));
            v[i] = e2m1_value(code) * factor;
        }
    }

    template <bool kWide>
    __device__ __forceinline__ void prefetch(const Place&) const {}

    template <bool kWide>
    __device__ __forceinline__ void load(const Place& place, float (&v)[kValues]) const {
        const float s = tensor_scale ? *tensor_scale : 1.0f;
#pragma unroll
        for (int i = 0; i < kValues; i += 16) load_block(place.row, place.column(i), s, v + i);
    }
};

}  // namespace hswq::cuda
