// Eight-bit formats: INT8 by rows, FP8 activations and FP8 weights, and the largest magnitudes that they
// need.
#include <cuda_fp8.h>

#include "cuda/chunks.cuh"
#include "cuda/codes.cuh"
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

__device__ __forceinline__ float int8_scale(const QuantizeInt8& job, int64_t row) {
    if (job.kind == Int8Scales::own) {
        const float amax = floating(job.amax[row]);
        if (amax != amax) return floating(0x7fc00000u);
        return (amax < 1e-6f ? 1e-6f : amax) / 127.0f;
    }
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

template <bool kWide>
__device__ __forceinline__ void store_e4m3(const Place& place, uint8_t* y, int64_t rows, int64_t cols,
                                           const float (&v)[kValues]) {
    uint32_t words[kValues / 4];
#pragma unroll
    for (int i = 0; i < kValues; i += 4) {
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[i], v[i + 1]), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high =
            __nv_cvt_float2_to_fp8x2(make_float2(v[i + 2], v[i + 3]), __NV_SATFINITE, __NV_E4M3);
        words[i / 4] = low | high << 16;
    }
    store_bytes<kWide>(place, y, rows, cols, words);
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
        store_e4m3<kWide>(place, y, rows, cols, v);
    }
};

struct Fp8WeightSink {
    const uint32_t* amax;
    float* row_scale;
    uint8_t* y;
    int64_t rows, cols;

    template <bool kWide>
    __device__ void store(const Place& place, float (&v)[kValues], float) const {
        // The least e with amax / 2^e <= 448 = 1.75 * 2^8.
        const uint32_t largest = place.row < rows ? amax[place.row] : 0;
        const int e = largest == 0 ? 0 : int(largest >> 23) - 127 - 8 + ((largest & 0x7fffffu) > 0x600000u);
        if (place.first == 0 && place.row < rows) row_scale[place.row] = floating(uint32_t(127 + e) << 23);
        const float inverse = floating(uint32_t(127 - e) << 23);
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[i] *= inverse;
        store_e4m3<kWide>(place, y, rows, cols, v);
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
    return run_chunks(MatrixSource(x), Fp8Sink{input_scale, y, x.rows, y_cols}, x.rows, y_cols, group,
                      stream);
}

cudaError_t fp8_weight(const Nvfp4& w, uint32_t* amax, float* row_scale, uint8_t* y, cudaStream_t stream) {
    const int64_t cols16 = ceil_to(w.cols, 16);
    cudaError_t error = cudaMemsetAsync(amax, 0, size_t(w.rows) * sizeof *amax, stream);
    if (error != cudaSuccess) return error;
    const CodesSource source(w, nullptr);
    error = run_chunks(source, AmaxSink{amax, w.rows, false}, w.rows, cols16, 0, stream);
    if (error != cudaSuccess) return error;
    return run_chunks(source, Fp8WeightSink{amax, row_scale, y, w.rows, cols16}, w.rows, cols16, 0, stream);
}

}  // namespace hswq::cuda
