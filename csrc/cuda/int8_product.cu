// Y [M, N] = (X [M, K] W [N, K]^T) * (x_scale * w_scale) + bias of INT8 operands, on Hopper's wgmma.
//
// A block of three warpgroups takes one tile of Y after another. The first warpgroup lets the copy engine
// fill a ring of shared memory with 128 bytes of K of each row; the other two multiply, 64 rows each, and
// finish their sums in registers: what a library's product leaves to another pass over an int32 result. Tiles
// are 256 columns wide, or 128 where that leaves fewer processors idle.
#include <cuda.h>
#include <cuda_bf16.h>
#include <dlfcn.h>

#include "cuda/chunks.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // for other cards the kernel is empty and calls nothing
#endif

namespace hswq::cuda {
namespace {

constexpr int kTileM = 128, kTileK = 128, kGroupThreads = 128, kProductThreads = 3 * kGroupThreads;
constexpr int kRing = 192 << 10, kBand = 16;

template <int kN>
constexpr int kStages = kRing / ((kTileM + kN) * kTileK);
constexpr int kSharedBytes = kRing + 1024 + 256;  // alignment, barriers

// ---- one instruction each: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier",
// ---- "cp.async.bulk.tensor"

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap& map, int column, int row,
                                          uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], "
        "[%4];" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// Rows of 128 bytes, swizzled over 128 bytes, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(const void* p) {
    return ((shared_address(p) & 0x3ffffu) >> 4) | (uint64_t(1) << 16) | (uint64_t(64) << 32) |
           (uint64_t(1) << 62);
}

__device__ __forceinline__ void product_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void product_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kLeft>
__device__ __forceinline__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

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

struct Tiling {
    int rows, columns, steps;  // tiles of Y, and of K

    // Bands of rows of tiles, so that what runs at the same time shares operands in the second-level cache.
    __device__ __forceinline__ void place(int tile, int& row, int& column) const {
        const int band = tile / (kBand * columns), left = tile - band * kBand * columns,
                  height = min(kBand, rows - band * kBand);
        row = band * kBand + left % height;
        column = left / height;
    }
    __host__ __device__ int count() const { return rows * columns; }
};

template <int kN>
struct Ring {
    uint8_t* x;  // [stages][kTileM][kTileK]
    uint8_t* w;  // [stages][kN][kTileK]
    uint64_t* full;
    uint64_t* empty;
    int stage = 0, phase = 0;

    __device__ explicit Ring(uint8_t* shared) {
        x = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(shared) + 1023) & ~uintptr_t(1023));
        w = x + kStages<kN> * kTileM * kTileK;
        full = reinterpret_cast<uint64_t*>(x + kRing);
        empty = full + kStages<kN>;
    }
    __device__ __forceinline__ void* x_tile() const { return x + stage * kTileM * kTileK; }
    __device__ __forceinline__ void* w_tile() const { return w + stage * kN * kTileK; }
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
            barrier_wait(ring.empty + ring.stage, ring.phase ^ 1);
            barrier_expect(ring.full + ring.stage, (kTileM + kN) * kTileK);
            copy_tile(ring.x_tile(), x, step * kTileK, row * kTileM, ring.full + ring.stage);
            copy_tile(ring.w_tile(), w, step * kTileK, column * kN, ring.full + ring.stage);
        }
    }
}

// 64 rows of a tile: K in steps of 128 bytes, four instructions each.
template <int kN>
__device__ __forceinline__ void sum_tile(Ring<kN>& ring, int half, int steps, int (&sums)[kN / 2]) {
    uint64_t* before = nullptr;
    for (int step = 0; step < steps; ++step, ring.next()) {
        barrier_wait(ring.full + ring.stage, ring.phase);
        const uint64_t a = descriptor(static_cast<uint8_t*>(ring.x_tile()) + half * 64 * kTileK),
                       b = descriptor(ring.w_tile());
        product_fence();
#pragma unroll
        for (int i = 0; i < kTileK / 32; ++i) multiply(sums, a + 2 * i, b + 2 * i, step + i != 0);
        product_commit();
        product_wait<1>();  // the step before is done: its place in the ring is free
        if (before && threadIdx.x % 32 == 0) barrier_arrive(before);
        before = ring.empty + ring.stage;
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
    Ring<kN> ring(shared);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages<kN>; ++i) {
            barrier_init(ring.full + i, 1);
            barrier_init(ring.empty + i, 2 * kGroupThreads / 32);
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

using Encode = decltype(&cuTensorMapEncodeTiled);

// From the driver that is there: nothing is linked against it.
Encode encoder() {
    static const Encode found = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW);
        return driver ? reinterpret_cast<Encode>(dlsym(driver, "cuTensorMapEncodeTiled")) : nullptr;
    }();
    return found;
}

bool describe(const void* data, int64_t rows, int64_t k, int64_t stride, int box_rows, CUtensorMap& map) {
    const cuuint64_t sizes[2] = {cuuint64_t(k), cuuint64_t(rows)}, strides[1] = {cuuint64_t(stride)};
    const cuuint32_t box[2] = {kTileK, cuuint32_t(box_rows)}, steps[2] = {1, 1};
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

Tiling tiling_for(const Int8Product& job, int width) {
    return {int((job.m + kTileM - 1) / kTileM), int((job.n + width - 1) / width),
            int((job.k + kTileK - 1) / kTileK)};
}

template <int kN>
cudaError_t launch(const Int8Product& job, int processors, cudaStream_t stream) {
    CUtensorMap x, w;
    if (!describe(job.x, job.m, job.k, job.x_stride, kTileM, x) ||
        !describe(job.w, job.n, job.k, job.w_stride, kN, w))
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
    int major = 0, minor = 0;
    cudaFuncAttributes code{};
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           10 * major + minor == 90 && encoder() != nullptr &&
           // Compiled for an older card, the kernel is empty.
           cudaFuncGetAttributes(&code, product_kernel<128>) == cudaSuccess && code.ptxVersion >= 90;
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
