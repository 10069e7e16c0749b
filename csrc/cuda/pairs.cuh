// Two 16-bit floats in a word, and E2M1 codes as such.
#pragma once

#include <type_traits>

#include "cuda/chunks.cuh"

namespace hswq::cuda {

template <class T>
constexpr bool kHalf = std::is_same<T, __half>::value;

// What turns an E2M1 code whose bits stand in a wider float's place into its value: the exponents'
// difference.
template <class T>
constexpr float kCodeOffset = kHalf<T> ? 0x1p14f : 0x1p126f;

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
    return narrow(value, value, kHalf<T> ? Dtype::f16 : Dtype::bf16);
}

// c += a * b on the tensor cores: a 16 x 16 by rows, b 16 x 8 by columns, both of 16-bit floats.
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

}  // namespace hswq::cuda
