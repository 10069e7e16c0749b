// Y [M, N] = (X [M, K] W [N, K]^T) * (x_scale * w_scale) + bias of INT8 operands, on Hopper's wgmma.
//
// A block of three warpgroups takes one tile of Y after another. The first warpgroup lets the copy engine
// fill a ring of shared memory with 128 bytes of K of each row; the other two multiply, 64 rows each, and
// finish their sums in registers: what a library's product leaves to another pass over an int32 result. Tiles
// are 256 columns wide, or 128 where that leaves fewer processors idle.
#include "cuda/hopper.cuh"

namespace hswq::cuda {
namespace {

constexpr int kTileM = 128, kTileK = 128, kProductThreads = 3 * kGroupThreads;
constexpr int kRing = 192 << 10;

template <int kN>
constexpr int kStages = kRing / ((kTileM + kN) * kTileK);
constexpr int kSharedBytes = kRing + 1024 + 256;  // alignment, barriers

// clang-format off
#define HSWQ_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define HSWQ_16(c, i) HSWQ_4(c, i), HSWQ_4(c, i + 4), HSWQ_4(c, i + 8), HSWQ_4(c, i + 12)
#define HSWQ_64(c, i) HSWQ_16(c, i), HSWQ_16(c, i + 16), HSWQ_16(c, i + 32), HSWQ_16(c, i + 48)

__device__ __forceinline__ void multiply(int (&d)[64], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, %64, %65, p;\n}"
        : HSWQ_64("+r", 0) : "l"(a), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply(int (&d)[128], uint64_t a, uint64_t b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
        "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
        "}, %128, %129, p;\n}"
        : HSWQ_64("+r", 0), HSWQ_64("+r", 64) : "l"(a), "l"(b), "r"(add));
}

#undef HSWQ_64
#undef HSWQ_16
#undef HSWQ_4
// clang-format on

// ---- the parts of a block
// ------------------------------------------------------------------------------------

template <int kN>
struct Ring {
    uint32_t x, w, full, empty;  // addresses: [stages][kTileM][kTileK], [stages][kN][kTileK], barriers
    int stage = 0, phase = 0;

    __device__ explicit Ring(uint32_t shared) {
        x = (shared + 1023) & ~1023u;
        w = x + kStages<kN> * kTileM * kTileK;
        full = x + kRing;
        empty = full + 8 * kStages<kN>;
    }
    __device__ __forceinline__ uint32_t x_tile() const { return x + stage * kTileM * kTileK; }
    __device__ __forceinline__ uint32_t w_tile() const { return w + stage * kN * kTileK; }
    __device__ __forceinline__ uint32_t filled() const { return full + 8 * stage; }
    __device__ __forceinline__ uint32_t freed() const { return empty + 8 * stage; }
    __device__ __forceinline__ void next() {
        if (++stage == kStages<kN>) stage = 0, phase ^= 1;
    }
};

template <int kN>
__device__ __forceinline__ void fill(Ring<kN> ring, const CUtensorMap& x, const CUtensorMap& w,
                                     const Tiling& tiling) {
    for (int tile = blockIdx.x; tile < tiling.count(); tile += gridDim.x) {
        int row, column;
        tiling.place(tile, row, column);
        for (int step = 0; step < tiling.steps; ++step, ring.next()) {
            barrier_wait(ring.freed(), ring.phase ^ 1);
            barrier_expect(ring.filled(), (kTileM + kN) * kTileK);
            copy_tile(ring.x_tile(), x, step * kTileK, row * kTileM, ring.filled());
            copy_tile(ring.w_tile(), w, step * kTileK, column * kN, ring.filled());
        }
    }
}

// 64 rows of a tile: K in steps of 128 bytes, four instructions each.
template <int kN>
__device__ __forceinline__ void sum_tile(Ring<kN>& ring, int half, int steps, int (&sums)[kN / 2]) {
    uint32_t before = 0;
    for (int step = 0; step < steps; ++step, ring.next()) {
        barrier_wait(ring.filled(), ring.phase);
        const uint64_t a = descriptor(ring.x_tile() + half * 64 * kTileK), b = descriptor(ring.w_tile());
        product_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 32; ++i) multiply(sums, a + 2 * i, b + 2 * i, step + i != 0);
        product_commit();
        product_wait<1>();  // the step before is done: its place in the ring is free
        if (before && threadIdx.x % 32 == 0) barrier_arrive(before);
        before = ring.freed();
    }
    product_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(before);
}

// Lane t of four has words [q]; afterwards it has word t of each of the four, in their order.
__device__ __forceinline__ void transpose4(uint32_t (&words)[4]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & mask) continue;
            const bool upper = t & mask;
            const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[i | mask], mask);
            (upper ? words[i] : words[i | mask]) = other;
        }
    }
}

// Sums lie as wgmma leaves them: of each 8 columns a lane has columns 2t and 2t + 1 of rows g and g + 8.
template <int kN>
__device__ __forceinline__ void finish_tile(const Int8Product& job, int64_t row, int64_t column,
                                            const int (&sums)[kN / 2]) {
    const int t = threadIdx.x % 4;
    const int64_t rows[2] = {row, row + 8};
    float x_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) x_scale[r] = job.x_scale[rows[r] < job.m ? rows[r] : 0];
#pragma unroll
    for (int first = 0; first < kN / 8; first += 4) {
        uint32_t words[2][4];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            // Columns beyond n read the last ones' numbers: n is a multiple of 8.
            const int64_t col = min(column + 8 * (first + q), job.n - 8) + 2 * t;
            float2 w_scale, bias = make_float2(0.0f, 0.0f);
            if (job.scalar_w_scale) {
                w_scale.x = w_scale.y = *job.w_scale;
            } else {
                w_scale = *reinterpret_cast<const float2*>(job.w_scale + col);
            }
            if (job.bias) bias = *reinterpret_cast<const float2*>(job.bias + col);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float low = __int2float_rn(sums[4 * (first + q) + 2 * r]) * (x_scale[r] * w_scale.x),
                      high = __int2float_rn(sums[4 * (first + q) + 2 * r + 1]) * (x_scale[r] * w_scale.y);
                if (job.bias) low += bias.x, high += bias.y;
                words[r][q] = narrow(low, high, job.y.dtype);
            }
        }
        const int64_t col = column + 8 * (first + t);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            transpose4(words[r]);
            if (rows[r] < job.m && col < job.n)
                *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.y.data) + rows[r] * job.y.stride + col) =
                    make_uint4(words[r][0], words[r][1], words[r][2], words[r][3]);
        }
    }
}

template <int kN>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                   Int8Product job, Tiling tiling) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t shared[];
    Ring<kN> ring(shared_address(shared));
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages<kN>; ++i) {
            barrier_init(ring.full + 8 * i, 1);
            barrier_init(ring.empty + 8 * i, 2 * kGroupThreads / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) fill(ring, x, w, tiling);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int thread = threadIdx.x % kGroupThreads,
                  own = 64 * (group - 1) + 16 * (thread / 32) + thread % 32 / 4;
        for (int tile = blockIdx.x; tile < tiling.count(); tile += gridDim.x) {
            int row, column;
            tiling.place(tile, row, column);
            int sums[kN / 2];
            sum_tile<kN>(ring, group - 1, tiling.steps, sums);
            finish_tile<kN>(job, int64_t(row) * kTileM + own, int64_t(column) * kN, sums);
        }
    }
#endif
}

// ---- the host's side
// -----------------------------------------------------------------------------------------

Tiling tiling_for(const Int8Product& job, int width) {
    return {int((job.m + kTileM - 1) / kTileM), int((job.n + width - 1) / width),
            int((job.k + kTileK - 1) / kTileK)};
}

template <int kN>
cudaError_t launch(const Int8Product& job, int processors, cudaStream_t stream) {
    CUtensorMap x, w;
    if (!describe(job.x, job.m, job.k, job.x_stride, kTileM, kTileK, CU_TENSOR_MAP_SWIZZLE_128B, x) ||
        !describe(job.w, job.n, job.k, job.w_stride, kN, kTileK, CU_TENSOR_MAP_SWIZZLE_128B, w))
        return cudaErrorInvalidValue;
    const auto kernel = product_kernel<kN>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    const Tiling tiling = tiling_for(job, kN);
    kernel<<<min(processors, tiling.count()), kProductThreads, kSharedBytes, stream>>>(x, w, job, tiling);
    return cudaGetLastError();
}

}  // namespace

bool has_int8_product(int device) {
    return runs_on_hopper(product_kernel<128>, device);
}

cudaError_t int8_product(const Int8Product& job, cudaStream_t stream) {
    if (job.m == 0 || job.n == 0) return cudaSuccess;
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    // The time of all waves, in columns.
    const auto cost = [&](int width) {
        return (tiling_for(job, width).count() + processors - 1) / processors * (width + 16);
    };
    return cost(128) < cost(256) ? launch<128>(job, processors, stream)
                                 : launch<256>(job, processors, stream);
}

}  // namespace hswq::cuda
