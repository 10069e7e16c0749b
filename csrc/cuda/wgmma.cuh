// wgmma of 16-bit operands that both lie in shared memory, for the widths that are used: sums of 64 rows x N
// columns gain 16 columns of K. PTX ISA, "wgmma.mma_async". `add` 0: the sums start from here.
#pragma once

#include "cuda/hopper.cuh"

namespace hswq::cuda {
namespace {

// clang-format off
#define HSWQ_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HSWQ_8(i) HSWQ_4(i), HSWQ_4(i + 4)
#define HSWQ_32(i) HSWQ_8(i), HSWQ_8(i + 8), HSWQ_8(i + 16), HSWQ_8(i + 24)
#define HSWQ_64(i) HSWQ_32(i), HSWQ_32(i + 32)
#define HSWQ_8_NAMES "%0,%1,%2,%3,%4,%5,%6,%7"
#define HSWQ_32_NAMES HSWQ_8_NAMES ",%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HSWQ_64_NAMES HSWQ_32_NAMES \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HSWQ_128_NAMES HSWQ_64_NAMES \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define HSWQ_WGMMA(width, count, names, a_name, b_name, add_name, type, tag, ...)                          \
    __device__ __forceinline__ void multiply(float (&d)[count], uint64_t a, uint64_t b, int add, tag) {    \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_name ", 0;\n"                                 \
                     "wgmma.mma_async.sync.aligned.m64n" width "k16.f32." type "." type " {" names "}, "   \
                     a_name ", " b_name ", p, 1, 1, 0, 0;\n}"                                              \
                     : __VA_ARGS__ : "l"(a), "l"(b), "r"(add));                                            \
    }
#define HSWQ_WGMMAS(type, tag)                                                                             \
    HSWQ_WGMMA("64", 32, HSWQ_32_NAMES, "%32", "%33", "%34", type, tag, HSWQ_32(0))                        \
    HSWQ_WGMMA("128", 64, HSWQ_64_NAMES, "%64", "%65", "%66", type, tag, HSWQ_64(0))                       \
    HSWQ_WGMMA("256", 128, HSWQ_128_NAMES, "%128", "%129", "%130", type, tag, HSWQ_64(0), HSWQ_64(64))

HSWQ_WGMMAS("bf16", __nv_bfloat16)
HSWQ_WGMMAS("f16", __half)

#undef HSWQ_WGMMAS
#undef HSWQ_WGMMA
#undef HSWQ_128_NAMES
#undef HSWQ_64_NAMES
#undef HSWQ_32_NAMES
#undef HSWQ_8_NAMES
#undef HSWQ_64
#undef HSWQ_32
#undef HSWQ_8
#undef HSWQ_4
// clang-format on

}  // namespace
}  // namespace hswq::cuda
