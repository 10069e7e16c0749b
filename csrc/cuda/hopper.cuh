// Hopper's own instructions and what the host prepares for them: shared by the products on wgmma.
#pragma once

#include <cuda.h>
#include <dlfcn.h>

#include "cuda/chunks.cuh"

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // for other cards the kernels are empty and call nothing
#endif

namespace hswq::cuda {
namespace {

constexpr int kGroupThreads = 128;

// ---- one instruction each: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "mbarrier",
// ---- "cp.async.bulk.tensor"

// Shared memory is named by its own 32-bit addresses: a pointer's has to be found again at every use.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int column, int row,
                                          uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], "
        "[%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Rows of 128 bytes, swizzled over 128 bytes, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64_t descriptor(uint32_t tile) {
    return ((tile & 0x3ffffu) >> 4) | (uint64_t(1) << 16) | (uint64_t(64) << 32) | (uint64_t(1) << 62);
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

// Tiles of a product, and how many steps of K each takes.
constexpr int kBand = 16;

struct Tiling {
    int rows, columns, steps;

    // Bands of rows of tiles, so that what runs at the same time shares operands in the second-level cache.
    __device__ __forceinline__ void place(int tile, int& row, int& column) const {
        const int band = tile / (kBand * columns), left = tile - band * kBand * columns,
                  height = min(kBand, rows - band * kBand);
        row = band * kBand + left % height;
        column = left / height;
    }
    __host__ __device__ int count() const { return rows * columns; }
};

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

// A matrix of bytes for copies of box_rows x box_bytes; what lies outside is read as zeros.
bool describe(const void* data, int64_t rows, int64_t bytes, int64_t stride, int box_rows, int box_bytes,
              CUtensorMapSwizzle swizzle, CUtensorMap& map) {
    const cuuint64_t sizes[2] = {cuuint64_t(bytes), cuuint64_t(rows)}, strides[1] = {cuuint64_t(stride)};
    const cuuint32_t box[2] = {cuuint32_t(box_bytes), cuuint32_t(box_rows)}, steps[2] = {1, 1};
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(data), sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Whether the device is Hopper and `kernel` was compiled for it; compiled for an older card, it is empty.
template <class Kernel>
bool runs_on_hopper(Kernel* kernel, int device) {
    int major = 0, minor = 0;
    cudaFuncAttributes code{};
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           10 * major + minor == 90 && encoder() != nullptr &&
           cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
}

}  // namespace
}  // namespace hswq::cuda
