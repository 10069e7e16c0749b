// The number formats, one value at a time: E2M1, E4M3, Philox. For host code too, so that they can be tested
// anywhere. The rules stand in hswq_lab/formats; sources are compiled without contraction into fused
// operations, and where one is written out (fmaf) its single rounding is wanted.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HSWQ_FN __host__ __device__ __forceinline__
#else
#include <cmath>
#define HSWQ_FN inline
#endif

namespace hswq::cuda {

constexpr uint32_t kNanScale = 127, kMaxScale = 126;

HSWQ_FN uint32_t bits(float x) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(x);
#else
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
#endif
}

HSWQ_FN float floating(uint32_t u) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(u);
#else
    float x;
    std::memcpy(&x, &u, 4);
    return x;
#endif
}

// ---- E4M3
// ----------------------------------------------------------------------------------------------------

// An E4M3 code's bits stand like those of an fp32 whose exponent is 120 too small, subnormals included.
HSWQ_FN float e4m3_value(uint32_t code) {
    const float magnitude = floating((code & 127u) << 20) * 0x1p120f;
    return (code & 127u) == kNanScale ? floating(0x7fc00000u) : (code & 128u) ? -magnitude : magnitude;
}

// The code of a magnitude up to 448, to nearest even; NaN becomes 127. Adding the power of two whose last bit
// weighs one step of the format at that magnitude rounds, and the sum's low bits count steps.
HSWQ_FN uint32_t e4m3_code(float magnitude) {
    const uint32_t u = bits(magnitude);
    if (u > 0x7f800000u) return kNanScale;
    const uint32_t raw = u & 0x7f800000u, least = (127u - 6u) << 23;
    const uint32_t octave = raw > least ? raw : least;
    const uint32_t sum = bits(magnitude + floating(octave + (20u << 23)));
    return (sum & 31u) + ((octave - least) >> 20);
}

// E4M3 of any value: saturates at 448, keeps NaN.
HSWQ_FN uint32_t e4m3_signed(float x) {
    const float magnitude = floating(bits(x) & 0x7fffffffu);
    return e4m3_code(magnitude > 448.0f ? 448.0f : magnitude) | ((bits(x) >> 24) & 128u);
}

// ---- E2M1
// ----------------------------------------------------------------------------------------------------

constexpr float kWhole = 8388608.0f;  // 2^23: adding it to a number below rounds to an integer, ties to even

// The code is the nearest integer to a concave function made of three lines, 2y, y + 2 and y / 2 + 4:
// rounding is monotonic, so it is the least of the three rounded values. Each is one operation with one
// rounding, and ties fall to the even code. The low bits of the result are the code; it exceeds 7 from y = 7
// on.
HSWQ_FN float e2m1_steps(float magnitude) {
    const float a = fmaf(magnitude, 2.0f, kWhole), b = magnitude + (kWhole + 2.0f),
                c = fmaf(magnitude, 0.5f, kWhole + 4.0f);
    return fminf(fminf(a, b), c);
}

HSWQ_FN uint32_t e2m1_code(float y) {
    const float magnitude = floating(bits(y) & 0x7fffffffu);
    const uint32_t code = bits(e2m1_steps(fminf(magnitude, 6.0f))) & 7u;
    return code | ((bits(y) >> 28) & 8u);
}

// E2M1 bits stand like those of an fp32 whose exponent is 126 too small.
HSWQ_FN float e2m1_value(uint32_t code) {
    const float magnitude = floating((code & 7u) << 22) * 0x1p126f;
    return floating(bits(magnitude) | ((code & 8u) << 28));
}

// One of the two codes around y: the upper one where u is less than the fraction of the gap above the lower.
HSWQ_FN uint32_t e2m1_code_stochastic(float y, float u) {
    const float magnitude = fminf(floating(bits(y) & 0x7fffffffu), 6.0f);
    const uint32_t below = magnitude >= 6.0f   ? 7u
                           : magnitude >= 4.0f ? 6u
                           : magnitude >= 2.0f ? 2u + uint32_t(magnitude)
                                               : uint32_t(2.0f * magnitude);
    const float per_gap = below < 4u ? 2.0f : below < 6u ? 1.0f : 0.5f;
    const float fraction = (magnitude - e2m1_value(below)) * per_gap;
    return (below + (u < fraction ? 1u : 0u)) | ((bits(y) >> 28) & 8u);
}

// ---- random bits
// ---------------------------------------------------------------------------------------------

// Philox4x32-10, key = seed, counter = element index: u in [0, 1), 24 bits.
HSWQ_FN float uniform(uint64_t seed, uint64_t index) {
    uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1);
        c3 = uint32_t(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return float(c0 >> 8) * 0x1p-24f;
}

// ---- a block of 16
// -------------------------------------------------------------------------------------------

// The plain scale of a block from a sixth of its largest magnitude; `clipped`: the tensor scale is too small.
HSWQ_FN uint32_t plain_scale(float sixth, float tensor_scale, float factor, bool& clipped) {
    const float ratio = sixth / tensor_scale;
    const float r = sixth == 0.0f ? sixth : factor == 1.0f ? ratio : factor * ratio;
    clipped = r > 448.0f;
    return e4m3_code(clipped ? 448.0f : r);
}

// Whether `divide` is safe: nothing over- or underflows where it could change a code.
HSWQ_FN bool can_divide(float divisor, float largest) {
    return divisor >= 0x1p-60f && divisor <= 0x1p60f && largest <= 0x1p64f;
}

// The correctly rounded x / divisor, given the correctly rounded 1 / divisor: one step of Newton's method,
// whose residual is exact (Markstein, "Computation of elementary functions on the IBM RISC System/6000",
// 1990).
HSWQ_FN float divide(float x, float divisor, float reciprocal) {
    const float q = x * reciprocal;
    return fmaf(fmaf(-q, divisor, x), reciprocal, q);
}

}  // namespace hswq::cuda
