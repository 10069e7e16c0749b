// One instruction set's kernels: what is compiled depends on the flags that setup.py gives the including
// file.
#include "cpu/kernels.h"

#include <cstddef>

#include "cpu/scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hswq {
namespace {

#include "cpu/simd.inl"
#include "cpu/rotate.inl"
#include "cpu/philox.inl"
#include "cpu/nvfp4.inl"
#include "cpu/int8.inl"
#include "cpu/bake.inl"
#include "cpu/epilogue.inl"
#if defined(__AVX512BF16__)
#include "cpu/gemm_tiles.inl"
constexpr W4Gemm kW4 = {w4_packed_bytes, w4_pack, w4_multiply};
#else
#include "cpu/gemm_plain.inl"
constexpr W4Gemm kW4 = {nullptr, nullptr, nullptr};
#endif

}  // namespace

extern const Kernels HSWQ_KERNELS = {
    amax_rows,
    rotate,
    quantize,
    dequantize,
    quantize_int8,
    dequantize_int8,
    bake_nvfp4,
    bake_int8,
    change_sums,
    {fp4_packed_bytes, fp4_pack, fp4_multiply},
    {int8_packed_bytes, int8_pack, int8_multiply},
    kW4,
};

}  // namespace hswq
