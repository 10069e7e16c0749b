// Quantising weights: scales by search, stochastic rounding, kept scales. Written to be read; packing runs
// once.
#include "cuda/chunks.cuh"
#include "cuda/codes.cuh"
#include "cuda/kernels.h"
#include "cuda/packed.cuh"

namespace hswq::cuda {
namespace {

constexpr int kSweepRadius = 7;

// The squared error of a block with block scale c, in units of the tensor scale squared:
// formats/block_scales.py.
__device__ float block_error(const float* v, const float* scaled, float s, float c, const float* h) {
    const float t = s * c;
    float e[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float value = t > 0.0f ? e2m1_value(e2m1_code(v[i] / t)) : 0.0f;
        const float d = value * c - scaled[i];
        e[i] = h ? h[i] * (d * d) : d * d;
    }
#pragma unroll
    for (int half = 8; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) e[i] = e[i] + e[i + half];
    }
    return e[0];
}

struct ChosenSink {
    Quantize job;
    int64_t rows16, cols16, chunks;

    __device__ uint32_t choose(const float* v, int64_t col, bool& clipped) const {
        const float s = *job.tensor_scale, sixth = block_amax(v) / 6.0f;
        const uint32_t plain = plain_scale(sixth, s, 1.0f, clipped);
        if (job.method == Method::rtn || plain == kNanScale) return plain;
        float scaled[16], weights[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            scaled[i] = v[i] / s;
            weights[i] = job.importance && col + i < job.x.cols ? job.importance[col + i] : 0.0f;
        }
        const int candidates = job.method == Method::sweep ? 2 * kSweepRadius + 1 : 2;
        uint32_t best = plain;
        float least = __int_as_float(0x7f800000);
        for (int i = 0; i < candidates; ++i) {
            uint32_t candidate = plain;
            bool ignored;
            if (job.method == Method::sweep) {
                candidate = uint32_t(min(max(int(plain) - kSweepRadius + i, 0), int(kMaxScale)));
            } else if (i == 1) {
                candidate = plain_scale(sixth, s, 1.5f, ignored);
            }
            const float error =
                block_error(v, scaled, s, e4m3_value(candidate), job.importance ? weights : nullptr);
            if (error < least) {
                least = error;
                best = candidate;
            }
        }
        return best;
    }

    __device__ uint2 encode(const float* v, float t, int64_t row, int64_t col) const {
        uint32_t words[2] = {0, 0};
        if (!(t > 0.0f)) return make_uint2(0, 0);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float y = v[i] / t;
            uint32_t code;
            if (job.stochastic) {
                const bool inside = row < job.x.rows && col + i < job.x.cols;
                code = e2m1_code_stochastic(
                    y, inside ? uniform(job.seed, uint64_t(row * job.x.cols + col + i)) : 0.0f);
            } else {
                code = e2m1_code(y);
            }
            words[i / 8] |= code << nibble(i % 8);
        }
        return make_uint2(words[0], words[1]);
    }

    template <bool kWide>
    __device__ void store(const Place& place, float (&v)[kValues], float factor) const {
        scale_values(v, factor);
        unsigned over = 0;
#pragma unroll 1
        for (int b = 0; b < 4; ++b) {
            const int64_t col = place.column(16 * b),
                          at = scale_word(place.row, col / 64, chunks) + (col / 16) % 4;
            if (col / 64 >= chunks) continue;
            float block[16];
#pragma unroll
            for (int i = 0; i < 16; ++i) block[i] = v[16 * b + i];
            bool clipped;
            uint32_t scale = choose(block, col, clipped);
            over += clipped;
            if (job.kept_scales && place.row < job.x.rows && col < cols16)
                scale = max(scale, uint32_t(job.kept_scales[at]));
            job.scales[at] = uint8_t(scale);
            if (place.row < rows16 && col < cols16) {
                *reinterpret_cast<uint2*>(job.codes + place.row * (cols16 / 2) + col / 2) =
                    encode(block, *job.tensor_scale * e4m3_value(scale), place.row, col);
            }
        }
        if (job.clipped && over) atomicAdd(job.clipped, static_cast<unsigned long long>(over));
    }
};

}  // namespace

cudaError_t quantize(const Quantize& job, cudaStream_t stream) {
    if (job.clipped) {
        const cudaError_t error = cudaMemsetAsync(job.clipped, 0, sizeof *job.clipped, stream);
        if (error != cudaSuccess) return error;
    }
    if (job.method == Method::rtn && !job.stochastic && !job.kept_scales) return rotate_quantize(job, stream);
    const int64_t cols16 = ceil_to(job.x.cols, 16);
    const ChosenSink sink{job, ceil_to(job.x.rows, 16), cols16, (cols16 / 16 + 3) / 4};
    return run_chunks(MatrixSource(job.x), sink, job.x.rows, cols16, job.group, stream);
}

}  // namespace hswq::cuda
