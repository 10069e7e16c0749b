// Y [M, N] = alpha * X [M, K] W [N, K]^T + bias of 16-bit X and NVFP4 weights for M in the middle, on
// Hopper's wgmma: computed as Y^T = W X^T, so that decoded weights go from registers into the tensor cores
// and X from shared memory. Packed weights are read, no wider copy of them is written.
//
// One warpgroup lets the copy engine fill a ring with 64 columns of X, of codes and of block scales; one or
// two others take 64 rows of W each. A thread looks its codes up in a table of E2M1's values, four by one
// byte permutation, and multiplies with the block scale, exactly, while the tensor cores work on the columns
// before.
#include "cuda/hopper.cuh"
#include "cuda/pairs.cuh"

namespace hswq::cuda {
namespace {

constexpr int kColumns = 64, kBlocksAStep = kColumns / 16, kGroupRows = 64, kScaleBytes = 512;
constexpr int kRoom = 200 << 10;  // for the rings of a multiprocessor

// Warpgroups that multiply, tokens a tile, blocks at once on a multiprocessor.
template <int kG, int kT, int kB>
struct Shape {
    static constexpr int kGroups = kG, kTokens = kT, kResident = kB;
    static constexpr int kRows = kGroupRows * kGroups, kThreads = kGroupThreads * (1 + kGroups);
    static constexpr int kXBytes = kTokens * kColumns * 2, kCodeBytes = kRows * kColumns / 2;
    static constexpr int kStageBytes = kXBytes + kCodeBytes + kScaleBytes;
    static constexpr int kStages = kRoom / kResident / kStageBytes < 8 ? kRoom / kResident / kStageBytes : 8;
    static constexpr int kBytes = kStages * kStageBytes + 1024 + 128;  // alignment, barriers
    static_assert(kGroups * kTokens * (kGroupRows + 8) * 2 <= kStages * kStageBytes,
                  "Y^T is staged in the ring");
};

// clang-format off
#define HSWQ_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define HSWQ_16(c, i) HSWQ_4(c, i), HSWQ_4(c, i + 4), HSWQ_4(c, i + 8), HSWQ_4(c, i + 12)
#define HSWQ_32(c, i) HSWQ_16(c, i), HSWQ_16(c, i + 16)
#define HSWQ_64(c, i) HSWQ_32(c, i), HSWQ_32(c, i + 32)

__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add, __nv_bfloat16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
        : HSWQ_64("+f", 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add, __half) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
        : HSWQ_64("+f", 0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add, __nv_bfloat16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;\n}"
        : HSWQ_64("+f", 0), HSWQ_64("+f", 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int add, __half) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;\n}"
        : HSWQ_64("+f", 0), HSWQ_64("+f", 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

#undef HSWQ_64
#undef HSWQ_32
#undef HSWQ_16
#undef HSWQ_4
// clang-format on

__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

template <class S>
struct W4Ring {
    uint8_t* x;
    uint8_t* codes;
    uint8_t* scales;
    uint64_t* full;
    uint64_t* empty;
    int stage = 0, phase = 0;

    __device__ explicit W4Ring(uint8_t* shared) {
        x = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~uintptr_t(1023));
        codes = x + S::kStages * S::kXBytes;
        scales = codes + S::kStages * S::kCodeBytes;
        full = reinterpret_cast<uint64_t*>(scales + S::kStages * kScaleBytes);
        empty = full + S::kStages;
    }
    __device__ __forceinline__ void next() {
        if (++stage == S::kStages) stage = 0, phase ^= 1;
    }
};

template <class S>
__device__ __forceinline__ void fill(W4Ring<S> ring, const CUtensorMap& x, const CUtensorMap& codes,
                                     const W4Product& job, int steps) {
    const int row = blockIdx.x * S::kRows, token = blockIdx.y * S::kTokens;
    const uint8_t* scales = job.w.scales + int64_t(row / 128) * steps * kScaleBytes;
    for (int step = 0; step < steps; ++step, ring.next()) {
        uint64_t* full = ring.full + ring.stage;
        barrier_wait(ring.empty + ring.stage, ring.phase ^ 1);
        barrier_expect(full, S::kStageBytes);
        copy_tile(ring.x + ring.stage * S::kXBytes, x, step * kColumns * 2, token, full);
        copy_tile(ring.codes + ring.stage * S::kCodeBytes, codes, step * kColumns / 2, row, full);
        copy_bytes(ring.scales + ring.stage * kScaleBytes, scales + step * kScaleBytes, kScaleBytes, full);
    }
}

// Bytes of the 16-bit values 0, .5, 1, 1.5 and 2, 3, 4, 6.
template <class T>
constexpr uint32_t kUpperBytes[2] = {kHalf<T> ? 0x3e3c3800u : 0x3f3f3f00u,
                                     kHalf<T> ? 0x46444240u : 0x40404040u};
template <class T>
constexpr uint32_t kLowerBytes[2] = {kHalf<T> ? 0u : 0xc0800000u, kHalf<T> ? 0u : 0xc0804000u};

// Two bytes of codes as two pairs of values: `first` is of the low byte, the even column in its lower half.
template <class T>
__device__ __forceinline__ void look_up(uint32_t codes, uint32_t& first, uint32_t& second) {
    const uint32_t which = codes & 0x7777u;
    uint32_t filled;  // 0x80, or 0xff where bit 3 of a code is set
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(filled) : "r"(0x80808080u), "r"(codes));
    const uint32_t upper =
        __byte_perm(kUpperBytes<T>[0], kUpperBytes<T>[1], which) | ((filled << 7) & 0x80808080u);
    const uint32_t lower = __byte_perm(kLowerBytes<T>[0], kLowerBytes<T>[1], which);
    first = __byte_perm(lower, upper, 0x4051);
    second = __byte_perm(lower, upper, 0x6273);
}

// A thread's part of 64 rows x 64 columns of W, as stored: rows g and g + 8 of its warp's 16. `row` is the
// first of them within the block, `scale_row` within the 128 whose scales lie together.
struct Packed {
    uint32_t codes[2][2 * kBlocksAStep], scales[2];

    __device__ __forceinline__ Packed(const uint8_t* code_tile, const uint8_t* scale_tile, int row,
                                      int scale_row) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4* from = reinterpret_cast<const uint4*>(code_tile + (row + 8 * r) * (kColumns / 2));
            const uint4 low = from[0], high = from[1];
            codes[r][0] = low.x, codes[r][1] = low.y, codes[r][2] = low.z, codes[r][3] = low.w;
            codes[r][4] = high.x, codes[r][5] = high.y, codes[r][6] = high.z, codes[r][7] = high.w;
            const int own = scale_row + 8 * r;
            scales[r] = *reinterpret_cast<const uint32_t*>(scale_tile + own % 32 * 16 + own / 32 * 4);
        }
    }

    // Of each block of 16 columns bytes t and t + 4: the left operand of m64k16.
    template <class T>
    __device__ __forceinline__ void decode(uint32_t (&a)[kBlocksAStep][4]) const {
        const int t = threadIdx.x % 4;
        const uint32_t pick = t | (4 + t) << 4;
#pragma unroll
        for (int block = 0; block < kBlocksAStep; ++block) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t scale = twice<T>(e4m3_value(scales[r] >> (8 * block) & 255u));
                uint32_t first, second;
                look_up<T>(__byte_perm(codes[r][2 * block], codes[r][2 * block + 1], pick), first, second);
                a[block][r] = times(first, scale, T());
                a[block][2 + r] = times(second, scale, T());
            }
        }
    }
};

// Operands are computed before this point: put off until the tensor cores want them, they would make them
// wait.
__device__ __forceinline__ void settle(uint32_t (&a)[kBlocksAStep][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kBlocksAStep; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Sums of 64 rows of W and all tokens of the tile. A warpgroup decodes when its products are done; meanwhile
// the tensor cores work for the other one, or for the other block.
template <class T, class S>
__device__ __forceinline__ void sum_rows(W4Ring<S>& ring, int row, int scale_row, int steps,
                                         float (&sums)[S::kTokens / 2]) {
    uint64_t* before = nullptr;
    for (int step = 0; step < steps; ++step, ring.next()) {
        barrier_wait(ring.full + ring.stage, ring.phase);
        const Packed packed(ring.codes + ring.stage * S::kCodeBytes, ring.scales + ring.stage * kScaleBytes,
                            row, scale_row);
        product_wait<0>();
        if (before && threadIdx.x % 32 == 0) barrier_arrive(before);
        before = ring.empty + ring.stage;
        uint32_t a[kBlocksAStep][4];
        packed.decode<T>(a);
        const uint64_t b = descriptor(ring.x + ring.stage * S::kXBytes);
        settle(a);
        product_fence();
#pragma unroll
        for (int block = 0; block < kBlocksAStep; ++block)
            multiply(sums, a[block], b + 2 * block, step + block != 0, T());
        product_commit();
    }
    product_wait<0>();
}

// Y^T lies in the lanes with neighbouring rows of W, columns of Y, in different ones: it is transposed
// through shared memory, 64 columns of a token beside each other.
template <class S>
__device__ __forceinline__ void finish_rows(const W4Product& job, uint8_t* shared, int row, int64_t first_row,
                                            float alpha, const float (&sums)[S::kTokens / 2]) {
    constexpr int kPitch = kGroupRows + 8;
    auto* staged = reinterpret_cast<uint16_t*>(shared);
    const int t = threadIdx.x % 4;
    float bias[2] = {0.0f, 0.0f};
#pragma unroll
    for (int r = 0; r < 2; ++r)
        if (job.bias && first_row + row + 8 * r < job.y.cols) bias[r] = job.bias[first_row + row + 8 * r];
#pragma unroll
    for (int i = 0; i < S::kTokens / 2; ++i) {
        const int token = i / 4 * 8 + 2 * t + i % 2, r = i / 2 % 2;
        staged[token * kPitch + row + 8 * r] = uint16_t(narrow(sums[i] * alpha + bias[r], 0.0f, job.y.dtype));
    }
    asm volatile("bar.sync %0, %1;" ::"r"(2 + int(threadIdx.x / kGroupThreads)), "n"(kGroupThreads)
                 : "memory");
    const int thread = threadIdx.x % kGroupThreads;
    const int64_t column = first_row + thread % 8 * 8;
    for (int token = thread / 8; token < S::kTokens; token += kGroupThreads / 8) {
        const int64_t m = int64_t(blockIdx.y) * S::kTokens + token;
        if (m < job.y.rows && column < job.y.cols)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.y.data) + m * job.y.stride + column) =
                *reinterpret_cast<const uint4*>(staged + token * kPitch + thread % 8 * 8);
    }
}

template <class T, class S>
__global__ void __launch_bounds__(S::kThreads, S::kResident)
    w4_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap codes, W4Product job,
              int steps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t shared[];
    W4Ring<S> ring(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < S::kStages; ++i) {
            barrier_init(ring.full + i, 1);
            barrier_init(ring.empty + i, S::kGroups * kGroupThreads / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) fill<S>(ring, x, codes, job, steps);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::kGroups == 1 ? 208 : 232));
        const int thread = threadIdx.x % kGroupThreads, row = 16 * (thread / 32) + thread % 32 / 4;
        const int first = kGroupRows * (group - 1);
        float sums[S::kTokens / 2];
        sum_rows<T, S>(ring, first + row, int(blockIdx.x * S::kRows % 128) + first + row, steps, sums);
        const float alpha = *job.first_scale * (job.second_scale ? *job.second_scale : 1.0f);
        // All have read the last of the ring.
        asm volatile("bar.sync 1, %0;" ::"n"(S::kGroups * kGroupThreads) : "memory");
        finish_rows<S>(job, ring.x + (group - 1) * S::kTokens * (kGroupRows + 8) * 2, row,
                       int64_t(blockIdx.x) * S::kRows + first, alpha, sums);
    }
#endif
}

// ---- the host's side
// -----------------------------------------------------------------------------------------

template <class T, class S>
cudaError_t launch(const W4Product& job, cudaStream_t stream) {
    CUtensorMap x, codes;
    const int64_t rows16 = ceil_to(job.w.rows, 16), bytes = job.w.cols / 2;
    if (!describe(job.x.data, job.x.rows, job.x.cols * 2, job.x.stride * 2, S::kTokens, kColumns * 2,
                  CU_TENSOR_MAP_SWIZZLE_128B, x) ||
        !describe(job.w.codes, rows16, bytes, bytes, S::kRows, kColumns / 2, CU_TENSOR_MAP_SWIZZLE_NONE,
                  codes))
        return cudaErrorInvalidValue;
    const auto kernel = w4_kernel<T, S>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
    if (error != cudaSuccess) return error;
    const dim3 blocks(unsigned((job.w.rows + S::kRows - 1) / S::kRows),
                      unsigned((job.x.rows + S::kTokens - 1) / S::kTokens));
    kernel<<<blocks, S::kThreads, S::kBytes, stream>>>(x, codes, job,
                                                       int((job.w.cols + kColumns - 1) / kColumns));
    return cudaGetLastError();
}

// Waves of blocks times what one takes, in cycles a step.
template <class S>
int64_t cost(const W4Product& job, int processors, int cycles) {
    const int64_t blocks =
                      ((job.w.rows + S::kRows - 1) / S::kRows) * ((job.x.rows + S::kTokens - 1) / S::kTokens),
                  at_once = int64_t(processors) * S::kResident;
    return (blocks + at_once - 1) / at_once * cycles;
}

using Large = Shape<2, 256, 1>;
using Medium = Shape<2, 128, 1>;
using Small = Shape<1, 128, 2>;

template <class T>
cudaError_t choose(const W4Product& job, int processors, cudaStream_t stream) {
    const int64_t large = cost<Large>(job, processors, 1100), medium = cost<Medium>(job, processors, 600),
                  small = cost<Small>(job, processors, 640);
    if (large <= medium && large <= small) return launch<T, Large>(job, stream);
    return medium <= small ? launch<T, Medium>(job, stream) : launch<T, Small>(job, stream);
}

}  // namespace

bool has_w4_product(int device) {
    return runs_on_hopper(w4_kernel<__half, Medium>, device);
}

cudaError_t w4_product(const W4Product& job, cudaStream_t stream) {
    if (job.x.rows == 0 || job.w.rows == 0) return cudaSuccess;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    return job.x.dtype == Dtype::f16 ? choose<__half>(job, processors, stream)
                                     : choose<__nv_bfloat16>(job, processors, stream);
}

}  // namespace hswq::cuda
