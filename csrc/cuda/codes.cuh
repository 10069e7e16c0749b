// Blocks of 16 values to E2M1 codes by the plain rule: what rotate_quantize and rounded_values share.
#pragma once

#include "cuda/chunks.cuh"

namespace hswq::cuda {

// The largest magnitude of a block, NaN if a value is.
__device__ __forceinline__ float block_amax(const float* v) {
    float a = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float magnitude = fabsf(v[i]);
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(magnitude));
    }
    return a;
}

// The sign bits of 8 values as bit 3 of 8 nibbles, the even value's nibble above the odd one's.
__device__ __forceinline__ uint32_t signs(const float* v) {
    const uint32_t even = __byte_perm(__byte_perm(bits(v[0]), bits(v[2]), 0x0073),
                                      __byte_perm(bits(v[4]), bits(v[6]), 0x0073), 0x5410);
    const uint32_t odd = __byte_perm(__byte_perm(bits(v[1]), bits(v[3]), 0x0073),
                                     __byte_perm(bits(v[5]), bits(v[7]), 0x0073), 0x5410);
    return (even & 0x80808080u) | ((odd & 0x80808080u) >> 4);
}

// Where value i of 8 has its nibble in a word of codes.
__host__ __device__ constexpr int nibble(int i) {
    return 8 * (i / 2) + (i % 2 ? 0 : 4);
}

// The 16 codes of v / divisor as two words, `largest` being the block's largest magnitude. Nearly every block
// takes the first way; both give the same codes, those of the correctly rounded quotient.
__device__ __forceinline__ uint2 block_codes(const float* v, float divisor, float largest) {
    uint32_t words[2] = {0, 0};
    const float reciprocal = __frcp_rn(divisor);
    if (can_divide(divisor, largest) && e2m1_steps(divide(largest, divisor, reciprocal)) < kWhole + 8.0f) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const float* block = v + 8 * w;
            // The upper bits of each sum are those of 2^23; what they leave in the word is taken off at the
            // end.
            uint32_t sum = 0u - (0x4B000000u + (0x4B000000u << 4));
#pragma unroll
            for (int i = 0; i < 8; ++i)
                sum += bits(e2m1_steps(divide(fabsf(block[i]), divisor, reciprocal))) << nibble(i);
            words[w] = sum | signs(block);
        }
    } else if (divisor > 0.0f) {
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i / 8] |= e2m1_code(v[i] / divisor) << nibble(i % 8);
    }
    return make_uint2(words[0], words[1]);
}

struct PlainBlock {
    uint32_t scale;
    bool clipped;
    uint2 codes;
};

// A block by the plain rule. v still lacks the rotation's last factor, a power of two: it goes into the
// divisor, which changes no quotient where `can_divide` holds; elsewhere it is multiplied in.
__device__ __forceinline__ PlainBlock plain_block(float* v, float factor, float tensor_scale) {
    PlainBlock block;
    const float raw = block_amax(v);
    block.scale = plain_scale(raw * factor / 6.0f, tensor_scale, 1.0f, block.clipped);
    const float t = tensor_scale * e4m3_value(block.scale);
    float divisor = t / factor;
    if (!can_divide(t, raw)) {
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] *= factor;
        divisor = t;
    }
    block.codes = block_codes(v, divisor, raw);
    return block;
}

}  // namespace hswq::cuda
