// The frame of all element-wise kernels: a source gives each lane 64 values of one row, they are rotated, a
// sink takes them. A warp works on a tile of 8 rows x 256 columns.
//
// Which rows and columns is chosen for two reasons. The rows are r, r + 32, r + 64, r + 96 and the same of r
// + 1: in the 128x4 order of block scales, what a warp writes for 64 columns is then one whole sector of 32
// bytes. And with a group of 256, a lane holds columns [32h, 32h + 32) of the quarters 2Q and 2Q + 1, so that
// the butterflies at strides 1 and 4 stay in the lane, and each pair that strides 16 and 64 need lies in two
// lanes: both send their difference, keep their sum, and no lane has to choose. Four lanes share a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/api.h"
#include "cuda/numbers.cuh"

namespace hswq::cuda {

constexpr int kValues = 64, kThreads = 128;
constexpr int kBlocks = 4;                      // at once on a multiprocessor: 128 registers a thread
constexpr int kTileRows = 8, kTileUnits = 256;  // units of 16 bytes: 8 rows of 256 columns, 2 bytes each

// Where a lane's values are: v[0..31] from column `first`, v[32..63] from column `second`; and the warp's
// tile.
struct Place {
    int64_t row;
    int64_t first, second;
    int lane;      // 0 to 3 within the row
    int64_t top;   // the tile's first row
    int64_t left;  // and column
    uint4* scratch;

    __device__ int64_t column(int i) const { return i < 32 ? first + i : second + (i - 32); }
    __device__ int64_t tile_row(int i) const { return top + i / 4 + 32 * (i % 4); }
};

struct Tiles {
    int64_t rows;  // every row below is visited, and perhaps some above
    unsigned columns, count;
};

inline Tiles tiles_for(int64_t rows, int64_t cols) {
    const int64_t columns = (cols + 255) / 256, count = ceil_to(rows, 128) / 8 * columns;
    return {rows, unsigned(columns), unsigned(count)};
}

__device__ __forceinline__ void butterfly(float& a, float& b, float& c, float& d) {
    const float p = a + b, m = a - b, s = c + d, t = c - d;
    a = p + t;
    b = p - t;
    c = m + s;
    d = s - m;
}

// A butterfly whose first or last two values are here and the others in the lane `mask` away.
__device__ __forceinline__ void half_butterfly(float& a, float& b, int mask) {
    const float kept = a + b, other = __shfl_xor_sync(0xffffffffu, a - b, mask);
    a = kept + other;
    b = kept - other;
}

template <int kStride>
__device__ __forceinline__ void stage(float (&v)[kValues]) {
#pragma unroll
    for (int base = 0; base < kValues; base += 4 * kStride) {
#pragma unroll
        for (int i = base; i < base + kStride; ++i)
            butterfly(v[i], v[i + kStride], v[i + 2 * kStride], v[i + 3 * kStride]);
    }
}

// All stages but the last multiplication, which is returned: 1 / sqrt(group), or 1.
template <bool kWide>
__device__ __forceinline__ float rotate_values(float (&v)[kValues], int group) {
    if (kWide) {
        stage<1>(v);
        stage<4>(v);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            half_butterfly(v[i], v[i + 16], 1);
            half_butterfly(v[i + 32], v[i + 48], 1);
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) half_butterfly(v[i], v[i + 32], 2);
        return 0.0625f;
    }
    if (group >= 4) stage<1>(v);
    if (group >= 16) stage<4>(v);
    if (group >= 64) stage<16>(v);
    return group == 64 ? 0.125f : group == 16 ? 0.25f : group == 4 ? 0.5f : 1.0f;
}

__device__ __forceinline__ void scale_values(float (&v)[kValues], float factor) {
    if (factor == 1.0f) return;  // so that a NaN's bits stay
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] *= factor;
}

template <bool kWide>
__device__ __forceinline__ Place place_of(const Tiles& tiles, unsigned tile, uint4* scratch) {
    const unsigned band = tile / tiles.columns, columns = tile - band * tiles.columns;
    const int lane = threadIdx.x % 32;
    Place place;
    place.lane = lane % 4;
    place.top = int64_t(band / 16) * 128 + (band % 16) * 2;
    place.left = int64_t(columns) * 256;
    place.row = place.tile_row(lane / 4);
    place.first = place.left + (kWide ? 128 * (place.lane / 2) + 32 * (place.lane % 2) : 64 * place.lane);
    place.second = place.first + (kWide ? 64 : 32);
    place.scratch = scratch;
    return place;
}

// A warp takes tile after tile; while it works on one, the next is on its way into the other half of its
// scratch.
template <bool kWide, class Source, class Sink>
__device__ __forceinline__ void rotate_chunks(const Source& source, const Sink& sink, const Tiles& tiles,
                                              int group, uint4 (&scratch)[2][kTileUnits]) {
    const unsigned warp = threadIdx.x / 32, step = gridDim.x * (kThreads / 32);
    unsigned tile = blockIdx.x * (kThreads / 32) + warp, turn = 0;
    if (tile >= tiles.count) return;
    source.template prefetch<kWide>(place_of<kWide>(tiles, tile, scratch[turn]));
    asm volatile("cp.async.commit_group;");
    for (; tile < tiles.count; tile += step, turn ^= 1) {
        if (tile + step < tiles.count)
            source.template prefetch<kWide>(place_of<kWide>(tiles, tile + step, scratch[turn ^ 1]));
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        const Place place = place_of<kWide>(tiles, tile, scratch[turn]);
        float v[kValues];
        source.template load<kWide>(place, v);
        const float factor = rotate_values<kWide>(v, group);
        sink.template store<kWide>(place, v, factor);
        __syncwarp();
    }
}

template <bool kWide, class Source, class Sink>
__global__ void __launch_bounds__(kThreads, kBlocks)
    chunk_kernel(Source source, Sink sink, Tiles tiles, int group) {
    __shared__ uint4 scratch[kThreads / 32][2][kTileUnits];
    rotate_chunks<kWide>(source, sink, tiles, group, scratch[threadIdx.x / 32]);
}

// One warp a tile, but no more blocks than run at once.
inline unsigned blocks_for_tiles(const Tiles& tiles) {
    const unsigned needed = (tiles.count + kThreads / 32 - 1) / (kThreads / 32);
    int device = 0, processors = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return 1;  // the launch will report what is wrong
    return needed < unsigned(processors) * kBlocks ? needed : unsigned(processors) * kBlocks;
}

template <class Source, class Sink>
cudaError_t run_chunks(const Source& source, const Sink& sink, int64_t rows, int64_t cols, int group,
                       cudaStream_t stream) {
    const Tiles tiles = tiles_for(rows, cols);
    if (tiles.count == 0) return cudaSuccess;
    const unsigned blocks = blocks_for_tiles(tiles);
    if (group == 256) {
        chunk_kernel<true><<<blocks, kThreads, 0, stream>>>(source, sink, tiles, group);
    } else {
        chunk_kernel<false><<<blocks, kThreads, 0, stream>>>(source, sink, tiles, group);
    }
    return cudaGetLastError();
}

// ---- a tile in shared memory
// -------------------------------------------------------------------------------
//
// A lane's values are 64 contiguous bytes here and there: 16-byte accesses of a warp would touch 32 sectors
// of memory by halves. So whole tiles go through shared memory, a row of kRowChunks 16-byte chunks by
// neighbouring lanes; chunks are permuted within 128 bytes so that neither side's accesses share a bank.

template <bool kWide, int kRowChunks>
__device__ __forceinline__ int scratch_place(int row, int chunk) {
    return row * kRowChunks + (chunk ^ (((kWide ? row : 4 * row) + (chunk >> 3)) & 7));
}

// The chunk of a lane's values from v[i] on, in a tile of kBytes a value.
template <bool kWide, int kBytes>
__device__ __forceinline__ int lane_chunk(int lane, int i) {
    const int column =
        (kWide ? 128 * (lane / 2) + 32 * (lane % 2) : 64 * lane) + i + (kWide && i >= 32 ? 32 : 0);
    return column * kBytes / 16;
}

// Starts to read a tile's rows, zeros from row `rows` on.
template <bool kWide, int kBytes>
__device__ __forceinline__ void fetch_tile(const Place& place, const uint8_t* data, int64_t row_bytes,
                                           int64_t rows) {
    constexpr int kRowChunks = 256 * kBytes / 16;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileRows * kRowChunks / 32; ++i) {
        const int row = (32 * i + lane) / kRowChunks, chunk = (32 * i + lane) % kRowChunks;
        const int64_t r = place.tile_row(row);
        const uint8_t* from = data + (r < rows ? r : 0) * row_bytes + place.left * kBytes + 16 * chunk;
        const auto to = static_cast<uint32_t>(
            __cvta_generic_to_shared(place.scratch + scratch_place<kWide, kRowChunks>(row, chunk)));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(r < rows ? 16 : 0));
    }
}

// Writes the tile that the lanes have put into the scratch, rows below `rows` only.
template <bool kWide, int kBytes>
__device__ __forceinline__ void flush_tile(const Place& place, uint8_t* data, int64_t row_bytes,
                                           int64_t rows) {
    constexpr int kRowChunks = 256 * kBytes / 16;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTileRows * kRowChunks / 32; ++i) {
        const int row = (32 * i + lane) / kRowChunks, chunk = (32 * i + lane) % kRowChunks;
        const int64_t r = place.tile_row(row);
        if (r < rows)
            *reinterpret_cast<uint4*>(data + r * row_bytes + place.left * kBytes + 16 * chunk) =
                place.scratch[scratch_place<kWide, kRowChunks>(row, chunk)];
    }
}

// ---- reading a matrix
// ----------------------------------------------------------------------------------------

struct MatrixSource {
    Matrix x;
    bool aligned;  // rows may be read 16 bytes at a time

    explicit MatrixSource(const Matrix& m) : x(m) {
        const int64_t size = m.dtype == Dtype::f32 ? 4 : 2;
        aligned = reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride * size % 16 == 0;
    }

    __device__ __forceinline__ float value(int64_t at) const {
        if (x.dtype == Dtype::f32) return static_cast<const float*>(x.data)[at];
        const uint16_t u = static_cast<const uint16_t*>(x.data)[at];
        return x.dtype == Dtype::bf16 ? floating(uint32_t(u) << 16) : __half2float(__ushort_as_half(u));
    }

    __device__ __forceinline__ void load_half(int64_t row, int64_t col, float* v) const {
        const int64_t at = row * x.stride + col;
        if (row >= x.rows || !aligned || col + 32 > x.cols) {
#pragma unroll
            for (int i = 0; i < 32; ++i) v[i] = row < x.rows && col + i < x.cols ? value(at + i) : 0.0f;
            return;
        }
        if (x.dtype == Dtype::f32) {
            const float4* p = reinterpret_cast<const float4*>(static_cast<const float*>(x.data) + at);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float4 q = p[i];
                v[4 * i] = q.x, v[4 * i + 1] = q.y, v[4 * i + 2] = q.z, v[4 * i + 3] = q.w;
            }
            return;
        }
        const uint4* p = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.data) + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) widen(p[i], v + 8 * i);
    }

    // Eight 16-bit values as fp32.
    __device__ __forceinline__ void widen(const uint4& q, float* v) const {
        const uint32_t words[4] = {q.x, q.y, q.z, q.w};
        if (x.dtype == Dtype::bf16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[2 * i] = floating(words[i] << 16);
                v[2 * i + 1] = floating(words[i] & 0xffff0000u);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[2 * i] = __half2float(__ushort_as_half(uint16_t(words[i])));
                v[2 * i + 1] = __half2float(__ushort_as_half(uint16_t(words[i] >> 16)));
            }
        }
    }

    __device__ __forceinline__ bool staged(const Place& place) const {
        return aligned && x.dtype != Dtype::f32 && place.left + 256 <= x.cols;
    }

    template <bool kWide>
    __device__ __forceinline__ void prefetch(const Place& place) const {
        if (staged(place))
            fetch_tile<kWide, 2>(place, static_cast<const uint8_t*>(x.data), x.stride * 2, x.rows);
    }

    template <bool kWide>
    __device__ __forceinline__ void load(const Place& place, float (&v)[kValues]) const {
        if (!staged(place)) {
            load_half(place.row, place.first, v);
            load_half(place.row, place.second, v + 32);
            return;
        }
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < kValues; i += 8)
            widen(place.scratch[scratch_place<kWide, 32>(row, lane_chunk<kWide, 2>(place.lane, i))], v + i);
        __syncwarp();  // a sink may use the scratch next
    }
};

// ---- writing a matrix
// ----------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t narrow(float low, float high, Dtype dtype) {
    if (dtype == Dtype::bf16) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t*>(&pair);
    }
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}

struct MatrixSink {
    MutableMatrix y;
    bool aligned;

    explicit MatrixSink(const MutableMatrix& m) : y(m) {
        const int64_t size = m.dtype == Dtype::f32 ? 4 : 2;
        aligned = reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.stride * size % 16 == 0;
    }

    __device__ __forceinline__ void store_half(int64_t row, int64_t col, const float* v) const {
        if (row >= y.rows) return;
        const int64_t at = row * y.stride + col;
        if (!aligned || col + 32 > y.cols) {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (col + i >= y.cols) continue;
                if (y.dtype == Dtype::f32) {
                    static_cast<float*>(y.data)[at + i] = v[i];
                } else {
                    static_cast<uint16_t*>(y.data)[at + i] = uint16_t(narrow(v[i], 0.0f, y.dtype));
                }
            }
        } else if (y.dtype == Dtype::f32) {
            float4* p = reinterpret_cast<float4*>(static_cast<float*>(y.data) + at);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                p[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
        } else {
            uint4* p = reinterpret_cast<uint4*>(static_cast<uint16_t*>(y.data) + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* q = v + 8 * i;
                p[i] = make_uint4(narrow(q[0], q[1], y.dtype), narrow(q[2], q[3], y.dtype),
                                  narrow(q[4], q[5], y.dtype), narrow(q[6], q[7], y.dtype));
            }
        }
    }

    template <bool kWide>
    __device__ __forceinline__ void store(const Place& place, float (&v)[kValues], float factor) const {
        scale_values(v, factor);
        if (!aligned || y.dtype == Dtype::f32 || place.left + 256 > y.cols) {
            store_half(place.row, place.first, v);
            store_half(place.row, place.second, v + 32);
            return;
        }
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < kValues; i += 8) {
            const float* q = v + i;
            place.scratch[scratch_place<kWide, 32>(row, lane_chunk<kWide, 2>(place.lane, i))] =
                make_uint4(narrow(q[0], q[1], y.dtype), narrow(q[2], q[3], y.dtype),
                           narrow(q[4], q[5], y.dtype), narrow(q[6], q[7], y.dtype));
        }
        flush_tile<kWide, 2>(place, static_cast<uint8_t*>(y.data), y.stride * 2, y.rows);
    }
};

}  // namespace hswq::cuda
