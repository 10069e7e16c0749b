// Y [M, N] = alpha * X [M, K] W [N, K]^T + bias of 16-bit X and NVFP4 weights, on Hopper's wgmma: computed as
// Y^T = W X^T, so that a tile has 128 rows of W however few the tokens are. Packed weights are read; no wider
// copy of them is written to the card's memory.
//
// Some warpgroups decode (w4_decode.cuh), two multiply, 64 rows of W each; they meet at a ring of shared
// memory only. Where there are fewer tiles than processors, a cluster of blocks shares out K, and their sums
// meet in shared memory in a fixed order.
#include "cuda/w4_decode.cuh"
#include "cuda/wgmma.cuh"

namespace hswq::cuda {
namespace {

// ---- products
// ------------------------------------------------------------------------------------------------

// Sums of 64 rows of W and all tokens of the tile.
template <class T, class S>
__device__ __forceinline__ void sum_tile(const Room<S>& room, Ring<S::kStages>& ring, int half, int steps,
                                         float (&sums)[S::kTokens / 2]) {
    uint32_t before = 0;
    for (int step = 0; step < steps; ++step, ring.next()) {
        barrier_wait(room.full(ring.stage), ring.phase);
        const uint64_t a = descriptor(room.w + ring.stage * kWTile + half * (kWTile / 2)),
                       b = descriptor(room.x + ring.stage * S::kXTile);
        product_fence();
#pragma unroll
        for (int i = 0; i < kStep / 16; ++i) multiply(sums, a + 2 * i, b + 2 * i, step + i != 0, T());
        product_commit();
        product_wait<1>();  // the step before is done: its place in the ring is free
        if (before && threadIdx.x % 32 == 0) barrier_arrive(before);
        before = room.empty(ring.stage);
    }
    product_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(before);
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

__device__ __forceinline__ void store4(uint32_t to, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

// From the shared memory of another block of the cluster.
__device__ __forceinline__ float load_from(uint32_t rank, uint32_t address) {
    uint32_t there;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}

// How a warpgroup's sums become Y.
struct Finisher {
    const W4Product& job;
    uint32_t staged;  // [kChunk][64], pieces of 16 bytes swizzled
    int half;
    float alpha;
    int64_t token = 0, column = 0;
    float bias[2] = {0.0f, 0.0f};

    __device__ Finisher(const W4Product& product, uint32_t buffers, int warpgroup, float offset)
        : job(product),
          staged(buffers + warpgroup * kStaged),
          half(warpgroup),
          alpha(*product.first_scale * (product.second_scale ? *product.second_scale : 1.0f) * offset) {}

    __device__ __forceinline__ void start(int tile_row, int64_t first_token) {
        token = first_token;
        column = int64_t(tile_row) * kRows + 64 * half;
        if (!job.bias) return;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t n = column + 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4 + 8 * r;
            bias[r] = n < job.y.cols ? job.bias[n] : 0.0f;
        }
    }

    __device__ __forceinline__ void sync_group() const {
        asm volatile("bar.sync %0, %1;" ::"r"(2 + half), "n"(kGroupThreads) : "memory");
    }

    // 16 tokens from `first` on. Neighbouring columns of Y lie in different lanes: matrices of 8 x 8 are
    // stored transposed, then each lane takes 8 columns of a token.
    __device__ __forceinline__ void finish(int first, const float (&v)[8]) const {
        const int lane = threadIdx.x % 32, thread = threadIdx.x % kGroupThreads, warp = thread / 32;
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] =
                narrow(v[2 * i] * alpha + bias[i % 2], v[2 * i + 1] * alpha + bias[i % 2], job.y.dtype);
        const int to = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
        sync_group();  // all have read what was there
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         staged + to * 128 + ((piece ^ (to % 8)) << 4)),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
        sync_group();
        const int from = thread / 8, part = thread % 8;
        const int64_t m = token + first + from, n = column + 8 * part;
        if (m < job.y.rows && n < job.y.cols)
            *reinterpret_cast<uint4*>(static_cast<uint16_t*>(job.y.data) + m * job.y.stride + n) =
                load16(staged + from * 128 + ((part ^ (from % 8)) << 4));
    }
};

template <class S>
__device__ __forceinline__ void finish_tile(const Finisher& finisher, const float (&sums)[S::kTokens / 2]) {
#pragma unroll
    for (int c = 0; c < S::kTokens / kChunk; ++c) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = sums[8 * c + i];
        finisher.finish(c * kChunk, v);
    }
}

// Each block of the cluster finishes every so many tokens; it adds up the sums of all in the order of their
// ranks.
template <class S>
__device__ __forceinline__ void finish_shared_tile(const Finisher& finisher, const Room<S>& room, int splits,
                                                   const float (&sums)[S::kTokens / 2]) {
    // Partial sums are [kTokens / 2][threads that multiply].
    constexpr int kThreads = 32 * kProductWarps, kPitch = 4 * kThreads;
    const uint32_t partial = room.x + 4 * threadIdx.x;
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");  // all products have read their operands
#pragma unroll
    for (int i = 0; i < S::kTokens / 2; ++i) store4(partial + i * kPitch, sums[i]);
    cluster_sync();
    for (int c = int(cluster_rank()); c < S::kTokens / kChunk; c += splits) {
        float v[8] = {};
        for (int rank = 0; rank < splits; ++rank) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += load_from(rank, partial + (8 * c + i) * kPitch);
        }
        finisher.finish(c * kChunk, v);
    }
}

template <class T, class S>
__device__ __forceinline__ void multiply_tiles(const Room<S>& room, const W4Product& job, Walk walk,
                                               int splits, int half) {
    Ring<S::kStages> ring;
    Finisher finisher(job, room.staged, half, kCodeOffset<T> / kUp<T>);
    for (; !walk.done(); walk.next_tile()) {
        float sums[S::kTokens / 2];
        sum_tile<T, S>(room, ring, half, 2 * (walk.last - walk.first), sums);
        finisher.start(walk.row, int64_t(walk.column) * S::kTokens);
        if (splits == 1)
            finish_tile<S>(finisher, sums);
        else
            finish_shared_tile<S>(finisher, room, splits, sums);
    }
}

template <class T, class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    w4_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap codes, W4Product job,
              Tiling tiling, int splits) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ uint8_t shared[];
    const Room<S> room(shared_address(shared));
    if (threadIdx.x == 0) room.init();
    __syncthreads();
    const int group = threadIdx.x / kGroupThreads;
    const Walk walk(tiling, splits);
    // One decoding group leaves the products too few registers.
    if (group < 2) {
        if constexpr (S::kDecoders == 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
        multiply_tiles<T, S>(room, job, walk, splits, group);
        if (splits > 1) cluster_sync();  // nobody leaves while others read its shared memory
    } else {
        if constexpr (S::kDecoders == 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        Decoder<S>(room, x, codes, job.w, walk, group - 2).template run<T>();
        if (splits > 1) cluster_sync(), cluster_sync();  // sums lie ready, sums have been read
    }
#endif
}

// ---- the host's side
// -----------------------------------------------------------------------------------------

using Small = Shape<64, 3, 2, 6>;
using Medium = Shape<128, 2, 4, 4>;
using Large = Shape<256, 1, 3, 4>;

// How a product is cut: tokens a tile, blocks that share out K.
struct Cut {
    int tokens, splits;
};

Tiling tiling_for(const W4Product& job, int tokens) {
    return {int((job.w.rows + kRows - 1) / kRows), int((job.x.rows + tokens - 1) / tokens),
            int((job.w.cols + kSlab - 1) / kSlab)};
}

// In nanoseconds, as an H200 showed: a slab, what comes once, and what sums of a cluster cost beside.
int64_t cost(const W4Product& job, const Cut& cut, int processors) {
    const Tiling tiling = tiling_for(job, cut.tokens);
    const int64_t slab = cut.tokens == 256   ? 1520
                         : cut.tokens == 128 ? 950
                                             : 700,
                  once = 6000, slabs = (tiling.steps + cut.splits - 1) / cut.splits,
                  at_once = processors / cut.splits, waves = (tiling.count() + at_once - 1) / at_once;
    return cut.splits == 1 ? waves * slabs * slab + once : waves * (slabs * slab + once + 34 * cut.tokens);
}

Cut cut_for(const W4Product& job, int processors) {
    Cut best{256, 1};
    for (const int tokens : {64, 128, 256}) {
        for (const int splits : {1, 2, 4, 8}) {
            const Cut cut{tokens, splits};
            if (splits <= tiling_for(job, tokens).steps &&
                cost(job, cut, processors) < cost(job, best, processors))
                best = cut;
        }
    }
    return best;
}

template <class T, class S>
cudaError_t launch(const W4Product& job, int splits, int processors, cudaStream_t stream) {
    CUtensorMap x, codes;
    const int64_t bytes = job.w.cols / 2;
    if (!describe(job.x.data, job.x.rows, job.x.cols * 2, job.x.stride * 2, S::kTokens, kStep * 2,
                  CU_TENSOR_MAP_SWIZZLE_128B, x) ||
        !describe(job.w.codes, ceil_to(job.w.rows, 16), bytes, bytes, kRows, kSlab / 2,
                  CU_TENSOR_MAP_SWIZZLE_64B, codes))
        return cudaErrorInvalidValue;
    const auto kernel = w4_kernel<T, S>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
    if (error != cudaSuccess) return error;
    const Tiling tiling = tiling_for(job, S::kTokens);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(splits);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(splits == 1 ? min(processors, tiling.count()) : tiling.count() * splits));
    config.blockDim = dim3(S::kThreads);
    config.dynamicSmemBytes = S::kBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = splits > 1 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, x, codes, job, tiling, splits);
}

template <class T>
cudaError_t launch(const W4Product& job, int processors, cudaStream_t stream) {
    const Cut cut = cut_for(job, processors);
    switch (cut.tokens) {
        case 64:
            return launch<T, Small>(job, cut.splits, processors, stream);
        case 128:
            return launch<T, Medium>(job, cut.splits, processors, stream);
        default:
            return launch<T, Large>(job, cut.splits, processors, stream);
    }
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
    return job.x.dtype == Dtype::f16 ? launch<__half>(job, processors, stream)
                                     : launch<__nv_bfloat16>(job, processors, stream);
}

}  // namespace hswq::cuda
