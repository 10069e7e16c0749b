// Blocks of 16 values to E2M1 codes by the plain rule: what rotate_quantize and rounded_values share.
#pragma once

#include <cuda_fp8.h>

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

// ---- the quick way, for rotated 16-bit activations
// ---------------------------------------------------------
//
// x / t as x times the reciprocal: a code can differ from the definition's where the quotient lies within two
// last bits of a boundary between codes, some 10^-6 of them. Exact ties are frequent only where the tensor
// scale has few significant bits; there, and where anything could over- or underflow, the exact way is taken.

__device__ __forceinline__ bool quick_scale(float s) {
    return s >= 0x1p-40f && s <= 0x1p40f && (bits(s) & 0xfffu) != 0;
}

// The same for a whole matrix.
struct TensorScale {
    float value, reciprocal;
};

__device__ __forceinline__ TensorScale tensor_scale_of(const float* s) {
    return {*s, __frcp_rn(*s)};
}

// What four blocks of 16, v[16 * e ...] without their factor of 1/16, are multiplied with and divided by.
struct QuickBlocks {
    uint32_t scales[2];   // E4M3 codes of blocks 0 and 2, and of 1 and 3, the first in the low byte
    float reciprocal[4];  // takes v to 2^-14 times the quotient
    unsigned clipped;
};

__device__ __forceinline__ float2 e4m3_values(uint32_t two) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two), __NV_E4M3);
    return __half22float2(__half2(halves));
}

// `v` comes out clamped to what has a code; it is 0 where the divisor is 0 or NaN, which makes all codes 0.
__device__ __forceinline__ QuickBlocks quick_blocks(float (&v)[kValues], const TensorScale& s) {
    QuickBlocks blocks;
    float largest[4], ratio[4], divisor[4];
    blocks.clipped = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        largest[e] = block_amax(v + 16 * e);
        float finite;  // or NaN; 2^64 is clipped as well as infinity is
        asm("min.NaN.f32 %0, %1, %2;" : "=f"(finite) : "f"(largest[e]), "f"(0x1p64f));
        ratio[e] = divide(divide(finite, 96.0f, 1.0f / 96.0f), s.value, s.reciprocal);
        blocks.clipped += ratio[e] > 448.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        blocks.scales[r] =
            __nv_cvt_float2_to_fp8x2(make_float2(ratio[r], ratio[r + 2]), __NV_SATFINITE, __NV_E4M3);
        const float2 c = e4m3_values(blocks.scales[r]);
        divisor[r] = s.value * c.x;
        divisor[r + 2] = s.value * c.y;
    }
    bool ordinary = true;  // nothing exceeds the codes, no divisor is 0 or NaN
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor[e]));
        inverse = fmaf(inverse, fmaf(-divisor[e], inverse, 1.0f), inverse);
        blocks.reciprocal[e] = inverse * 0x1p-18f;
        ordinary = ordinary && largest[e] < 7.0f * 16.0f * divisor[e];
    }
    if (!ordinary) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const bool empty = !(divisor[e] > 0.0f);
            // 0 - 0 is +0: an empty block loses its signs too.
            const float most = empty ? 0.0f : 6.5f * 16.0f * divisor[e], least = 0.0f - most;
            if (empty) blocks.reciprocal[e] = 0.0f;
#pragma unroll
            for (int i = 0; i < 16; ++i) v[16 * e + i] = fminf(fmaxf(v[16 * e + i], least), most);
        }
    }
    return blocks;
}

// Two quotients, times 2^-14, as fp16 rounded towards 0: their bits then count, by 512, E2M1's steps, below
// its least normal number too. Half a step more, and bits 9 to 11 are the code, bit 15 the sign. The even
// column is the upper half.
__device__ __forceinline__ uint32_t code_pair(float even, float odd, float reciprocal) {
    uint32_t pair;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(even * reciprocal), "f"(odd * reciprocal));
    return pair + 0x01000100u;
}

// Bits of a where the mask is set, of b elsewhere: one instruction.
__device__ __forceinline__ uint32_t pick(uint32_t mask, uint32_t a, uint32_t b) {
    uint32_t picked;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(picked) : "r"(mask), "r"(a), "r"(b));
    return picked;
}

// Eight codes of four pairs, as in memory.
__device__ __forceinline__ uint32_t pack_codes(const uint32_t (&pairs)[4]) {
    const uint32_t a = __byte_perm(pairs[0], pairs[1], 0x7351), b = __byte_perm(pairs[2], pairs[3], 0x7351),
                   even = __byte_perm(a, b, 0x7632), odd = __byte_perm(a, b, 0x5410);
    const uint32_t upper = pick(0x80808080u, even, even << 3), lower = pick(0x08080808u, odd >> 4, odd >> 1);
    return pick(0xf0f0f0f0u, upper, lower);
}

}  // namespace hswq::cuda
