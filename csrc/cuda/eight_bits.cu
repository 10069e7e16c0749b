// Eight-bit formats: INT8 by rows, FP8 activations, and the largest magnitudes that they need.
#include <cuda_fp8.h>

#include "cuda/chunks.cuh"
#include "cuda/codes.cuh"
#include "cuda/groups.cuh"
#include "cuda/kernels.h"

namespace hswq::cuda {
namespace {

__device__ __forceinline__ float lane_amax(const float (&v)[kValues]) {
    float a = 0.0f;
#pragma unroll
    for (int b = 0; b < kValues; b += 16) {
        const float block = block_amax(v + b);
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(a) : "f"(a), "f"(block));
    }
    return a;
}

// Largest magnitudes as bits: integers compare as the floats they stand for, NaN above all, and their maximum
// does not depend on the order. `amax` starts at 0.
struct AmaxSink {
    uint32_t* amax;
    int64_t rows;
    bool whole;  // one for the matrix instead of one a row

    template <bool kWide>
    __device__ void store(const Place& place, float (&v)[kValues], float factor) const {
        // Multiplying by the factor is monotonic: the largest product is that of the largest value.
        uint32_t largest = bits(lane_amax(v) * factor) & 0x7fffffffu;
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        if (whole) {
            largest = __reduce_max_sync(0xffffffffu, largest);
            // Looking first spares nearly every warp its turn at the one address.
            if (threadIdx.x % 32 == 0 && largest > *static_cast<volatile uint32_t*>(amax))
                atomicMax(amax, largest);
        } else if (place.lane == 0 && place.row < rows) {
            atomicMax(amax + place.row, largest);
        }
    }
};

// A lane's 64 bytes of a row of `cols`; through the scratch where the tile lies inside the matrix.
template <bool kWide>
__device__ __forceinline__ void store_bytes(const Place& place, uint8_t* y, int64_t rows, int64_t cols,
                                            const uint32_t (&words)[kValues / 4]) {
    if (cols % 16 == 0 && place.left + 256 <= cols) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < kValues / 4; i += 4)
            place.scratch[scratch_place<kWide, 16>(row, lane_chunk<kWide, 1>(place.lane, 4 * i))] =
                make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
        flush_tile<kWide, 1>(place, y, cols, rows);
        return;
    }
    if (place.row >= rows) return;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
        const int64_t col = place.column(i);
        if (col < cols) y[place.row * cols + col] = uint8_t(words[i / 4] >> (8 * (i % 4)));
    }
}

// ---- INT8
// ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float own_scale(float amax) {
    if (amax != amax) return floating(0x7fc00000u);
    return (amax < 1e-6f ? 1e-6f : amax) / 127.0f;
}

__device__ __forceinline__ float int8_scale(const QuantizeInt8& job, int64_t row) {
    if (job.kind == Int8Scales::own) return own_scale(floating(job.amax[row]));
    const int64_t at = job.kind == Int8Scales::kept ? row : 0;
    const float amax = floating(job.amax[at]);
    return amax / job.scale[at] > 127.5f ? amax / 127.0f : job.scale[at];
}

// One code as a byte; a quotient that is NaN (from a NaN or infinite scale) becomes 0.
__device__ __forceinline__ uint32_t int8_code(float y, bool stochastic, float u) {
    if (y != y) return 0;
    float rounded = rintf(y);
    if (stochastic) {
        const float magnitude = fabsf(y), low = floorf(magnitude);
        rounded = copysignf(u < magnitude - low ? low + 1.0f : low, y);
    }
    return uint32_t(int(fminf(fmaxf(rounded, -127.0f), 127.0f))) & 255u;
}

template <bool kStochastic>
struct Int8Sink {
    QuantizeInt8 job;

    __device__ __forceinline__ uint32_t code(float v, float scale, int64_t row, int64_t col) const {
        const bool inside = col < job.x.cols;
        return int8_code(v / scale, kStochastic,
                         kStochastic && inside ? uniform(job.seed, uint64_t(row * job.x.cols + col)) : 0.0f);
    }

    template <bool kWide>
    __device__ void store(const Place& place, float (&v)[kValues], float factor) const {
        // Lanes below the last row go along: the warp stores its tile together.
        const int64_t from = place.row < job.x.rows ? place.row : 0;
        const float scale = int8_scale(job, from), reciprocal = __frcp_rn(scale), largest = lane_amax(v);
        scale_values(v, factor);
        if (place.first == 0 && place.row < job.x.rows &&
            (place.row == 0 || job.kind != Int8Scales::kept_scalar))
            job.new_scale[place.row] = scale;
        uint32_t words[kValues / 4] = {};
        if (!kStochastic && can_divide(scale, largest)) {
            const float whole = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded quotient's
#pragma unroll
            for (int i = 0; i < kValues; ++i) {
                const float y = fminf(fmaxf(divide(v[i], scale, reciprocal), -127.0f), 127.0f);
                words[i / 4] |= (bits(y + whole) & 255u) << (8 * (i % 4));
            }
        } else {
#pragma unroll(kStochastic ? 1 : kValues)
            for (int i = 0; i < kValues; ++i)
                words[i / 4] |= code(v[i], scale, place.row, place.column(i)) << (8 * (i % 4));
        }
        store_bytes<kWide>(place, reinterpret_cast<uint8_t*>(job.q), job.x.rows, job.x.cols, words);
    }
};

// All of a row in one block, a warp 256 columns of eight rows: x is read and rotated once, and stays in
// registers while the rows' largest magnitudes are compared. For own scales, rounded to nearest.
constexpr int kRowWarps = 16;

struct RowMaxima {
    uint32_t bits[3][kTileRows];  // the third is being emptied: one barrier a turn is then enough
};

// Codes of v, which lacks `factor`, as bytes.
__device__ __forceinline__ void int8_codes(float (&v)[kValues], float factor, float scale, float amax,
                                           uint32_t (&words)[kValues / 4]) {
    scale_values(v, factor);
    if (!can_divide(scale, amax)) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            const uint32_t code = int8_code(v[i] / scale, false, 0.0f) << (8 * (i % 4));
            words[i / 4] = i % 4 ? words[i / 4] | code : code;
        }
        return;
    }
    const float reciprocal = __frcp_rn(scale), whole = 12582912.0f;  // 1.5 * 2^23
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
        uint32_t sums[4];  // no magnitude exceeds the row's largest: no code exceeds 127
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] = bits(divide(v[i + j], scale, reciprocal) + whole);
        words[i / 4] =
            __byte_perm(__byte_perm(sums[0], sums[1], 0x0040), __byte_perm(sums[2], sums[3], 0x0040), 0x5410);
    }
}

__global__ void __launch_bounds__(32 * kRowWarps, 1)
    int8_rows_kernel(MatrixSource source, QuantizeInt8 job, unsigned bands, unsigned columns) {
    extern __shared__ uint4 tiles[];  // [columns][2][kTileUnits]
    __shared__ RowMaxima maxima;
    const unsigned warp = threadIdx.x / 32;
    const Tiles all{job.x.rows, columns, bands * columns};
    const auto place = [&](unsigned band, unsigned turn) {
        return place_of<true>(all, band * columns + warp, tiles + (2 * warp + turn % 2) * kTileUnits);
    };
    if (threadIdx.x < 3 * kTileRows) maxima.bits[threadIdx.x / kTileRows][threadIdx.x % kTileRows] = 0;
    source.prefetch<true>(place(blockIdx.x, 0));
    asm volatile("cp.async.commit_group;");
    __syncthreads();
    unsigned turn = 0;
    for (unsigned band = blockIdx.x; band < bands; band += gridDim.x, ++turn) {
        if (band + gridDim.x < bands) source.prefetch<true>(place(band + gridDim.x, turn + 1));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        const Place here = place(band, turn);
        float v[kValues];
        source.load<true>(here, v);
        const float factor = rotate_values<true>(v, 256);
        // Multiplying by the factor is monotonic.
        uint32_t largest = bits(lane_amax(v) * factor) & 0x7fffffffu;
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        uint32_t* row_maximum = &maxima.bits[turn % 3][threadIdx.x % 32 / 4];
        if (here.lane == 0) atomicMax(row_maximum, largest);
        __syncthreads();
        if (threadIdx.x < kTileRows) maxima.bits[(turn + 2) % 3][threadIdx.x] = 0;
        const float amax = floating(*row_maximum), scale = own_scale(amax);
        if (here.first == 0 && here.row < job.x.rows) job.new_scale[here.row] = scale;
        uint32_t words[kValues / 4];
        int8_codes(v, factor, scale, amax, words);
        store_bytes<true>(here, reinterpret_cast<uint8_t*>(job.q), job.x.rows, job.x.cols, words);
        __syncwarp();
    }
}

// How many warps have room for two tiles each in a block's shared memory on the current device.
int64_t row_warps() {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
        return 0;
    const int fit = (bytes - int(sizeof(RowMaxima))) / int(2 * kTileUnits * sizeof(uint4));
    return fit < kRowWarps ? fit : kRowWarps;
}

cudaError_t run_rows(const MatrixSource& source, const QuantizeInt8& job, cudaStream_t stream) {
    const Tiles tiles = tiles_for(job.x.rows, job.x.cols);
    if (tiles.count == 0) return cudaSuccess;
    const unsigned bands = tiles.count / tiles.columns;
    const int shared = int(tiles.columns * 2 * kTileUnits * sizeof(uint4));
    const cudaError_t error =
        cudaFuncSetAttribute(int8_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    int device = 0, processors = 1;
    cudaGetDevice(&device);  // the launch will report what is wrong
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    int8_rows_kernel<<<min(bands, unsigned(processors)), 32 * tiles.columns, shared, stream>>>(
        source, job, bands, tiles.columns);
    return cudaGetLastError();
}

struct Int8Source {
    const int8_t* q;
    const float* scale;
    bool scalar;
    int64_t rows, cols;

    template <bool kWide>
    __device__ __forceinline__ void prefetch(const Place&) const {}

    template <bool kWide>
    __device__ __forceinline__ void load(const Place& place, float (&v)[kValues]) const {
        const bool here = place.row < rows;
        const float s = here ? scale[scalar ? 0 : place.row] : 0.0f;
        const int8_t* row = q + place.row * cols;
#pragma unroll
        for (int half = 0; half < kValues; half += 32) {
            const int64_t col = place.column(half);
            if (here && cols % 16 == 0 && col + 32 <= cols) {
                const uint4* p = reinterpret_cast<const uint4*>(row + col);
                const uint4 a = p[0], b = p[1];
                const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (int i = 0; i < 32; ++i) v[half + i] = float(int8_t(words[i / 4] >> (8 * (i % 4)))) * s;
            } else {
#pragma unroll
                for (int i = 0; i < 32; ++i)
                    v[half + i] = here && col + i < cols ? float(row[col + i]) * s : 0.0f;
            }
        }
    }
};

// ---- FP8
// -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t e4m3_word(float a, float b, float c, float d) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

struct Fp8Sink {
    const float* input_scale;
    uint8_t* y;
    int64_t rows, cols;

    template <bool kWide>
    __device__ void store(const Place& place, float (&v)[kValues], float factor) const {
        const float scale = 6.0f * *input_scale, reciprocal = __frcp_rn(scale);
        const bool fast = can_divide(scale, lane_amax(v));
        scale_values(v, factor);
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            if (v[i] != 0.0f) v[i] = fast ? divide(v[i], scale, reciprocal) : v[i] / scale;
        uint32_t words[kValues / 4];
#pragma unroll
        for (int i = 0; i < kValues; i += 4) words[i / 4] = e4m3_word(v[i], v[i + 1], v[i + 2], v[i + 3]);
        store_bytes<kWide>(place, y, rows, cols, words);
    }
};

struct QuickFp8Sink {
    Fp8Sink exact;

    __device__ bool quick() const { return quick_scale(6.0f * *exact.input_scale); }
    // The reciprocal of the scale, and the rotation's last factor.
    __device__ float begin() const { return __frcp_rn(6.0f * *exact.input_scale) * 0.0625f; }

    // Chunks of 16 bytes in the scratch, permuted so that eight lanes that access it together differ in
    // banks.
    __device__ __forceinline__ static int chunk_at(int row, int chunk) {
        return 16 * row + (chunk ^ ((row / 2 & 1) | (row & 4)));
    }

    __device__ __forceinline__ void store(const Groups& at, float (&v)[kValues], float reciprocal) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* q = v + 16 * e + 4 * i;
                words[i] =
                    e4m3_word(q[0] * reciprocal, q[1] * reciprocal, q[2] * reciprocal, q[3] * reciprocal);
            }
            at.scratch[chunk_at(at.row(e), at.block(e))] = make_uint4(words[0], words[1], words[2], words[3]);
        }
        __syncwarp();
        const int lane = threadIdx.x % 32;
        const uint32_t top = at.tile.top();
        uint8_t* to = exact.y + int64_t(top) * exact.cols + at.tile.column * 256 + 16 * (lane % 16);
#pragma unroll
        for (int i = 0; i < kTileRows / 2; ++i) {
            const int row = 2 * i + lane / 16, offset = at.row_offset(row);
            if (top + offset < exact.rows)
                *reinterpret_cast<uint4*>(to + offset * uint32_t(exact.cols)) =
                    at.scratch[chunk_at(row, lane % 16)];
        }
    }
};

}  // namespace

cudaError_t amax(const Matrix& x, float* result, cudaStream_t stream) {
    uint32_t* largest = reinterpret_cast<uint32_t*>(result);
    const cudaError_t error = cudaMemsetAsync(largest, 0, sizeof *largest, stream);
    if (error != cudaSuccess) return error;
    return run_chunks(MatrixSource(x), AmaxSink{largest, x.rows, true}, x.rows, x.cols, 0, stream);
}

cudaError_t quantize_int8(const QuantizeInt8& job, cudaStream_t stream) {
    const bool whole = job.kind == Int8Scales::kept_scalar;
    const MatrixSource source(job.x);
    if (in_groups(source, job.group) && job.kind == Int8Scales::own && !job.stochastic &&
        job.x.cols <= 256 * row_warps())
        return run_rows(source, job, stream);
    cudaError_t error =
        cudaMemsetAsync(job.amax, 0, size_t(whole ? 1 : job.x.rows) * sizeof *job.amax, stream);
    if (error != cudaSuccess) return error;
    error =
        run_chunks(source, AmaxSink{job.amax, job.x.rows, whole}, job.x.rows, job.x.cols, job.group, stream);
    if (error != cudaSuccess) return error;
    if (job.stochastic)
        return run_chunks(source, Int8Sink<true>{job}, job.x.rows, job.x.cols, job.group, stream);
    return run_chunks(source, Int8Sink<false>{job}, job.x.rows, job.x.cols, job.group, stream);
}

cudaError_t dequantize_int8(const int8_t* q, const float* scale, bool scalar, int group,
                            const MutableMatrix& y, cudaStream_t stream) {
    const Int8Source source{q, scale, scalar, y.rows, y.cols};
    return run_chunks(source, MatrixSink(y), y.rows, y.cols, group, stream);
}

cudaError_t quantize_fp8(const Matrix& x, int group, const float* input_scale, uint8_t* y, int64_t y_cols,
                         cudaStream_t stream) {
    const MatrixSource source(x);
    const Fp8Sink sink{input_scale, y, x.rows, y_cols};
    if (in_groups(source, group)) return run_groups(source, QuickFp8Sink{sink}, stream);
    return run_chunks(source, sink, x.rows, y_cols, group, stream);
}

}  // namespace hswq::cuda
