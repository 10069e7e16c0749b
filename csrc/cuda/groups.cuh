// Groups of 256 sixteen-bit values, rotated half on the tensor cores: the frame of what runs on activations.
//
// As a 16 x 16 matrix (row i of 16 neighbouring columns j), the rotation is H16 from both sides. The product
// from the left, strides 16 and 64, is one mma a column j with eight rows of x beside each other; its terms
// are exact, its sums differ from the definition's order by at most the last bit or two. A lane then has four
// whole blocks of 16 columns in registers: strides 1 and 4, maxima, rounding and packing move nothing between
// lanes.
#pragma once

#include "cuda/chunks.cuh"
#include "cuda/pairs.cuh"

namespace hswq::cuda {

// A warp's tile: of the 128 rows from `top`, two in each quarter; columns from 256 * column. It steps from
// tile to tile without a division.
struct TileWalk {
    unsigned band, column, columns, step_bands, step_columns;

    __device__ __forceinline__ TileWalk(const Tiles& tiles, unsigned first, unsigned step)
        : band(first / tiles.columns),
          column(first % tiles.columns),
          columns(tiles.columns),
          step_bands(step / tiles.columns),
          step_columns(step % tiles.columns) {}

    __device__ __forceinline__ void next() {
        band += step_bands;
        column += step_columns;
        if (column >= columns) {
            column -= columns;
            ++band;
        }
    }
    __device__ __forceinline__ uint32_t top() const { return band / 16 * 128 + band % 16 * 2; }
};

// After the rotation a lane has v[16 * e + j]: row(e) of the tile, block(e) of the group, column j. The last
// factor, 1/16, is missing.
struct Groups {
    TileWalk tile;
    uint4* scratch;

    __device__ static int row(int e) { return 2 * (threadIdx.x % 4) + e % 2; }  // of the tile's eight
    __device__ static int block(int e) { return 2 * (threadIdx.x % 32 / 4) + e / 2; }
    __device__ static int row_offset(int row) { return row / 4 + 32 * (row % 4); }
};

// The left operand: H16 with its rows as `Groups::block` wants them, its columns as `load_columns` reads.
template <class T>
__device__ __forceinline__ void hadamard16(uint32_t (&a)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t one = twice<T>(1.0f) & 0xffffu;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int to = 2 * g + i % 2;
        uint32_t word = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int from = 4 * t + 2 * (i / 2) + half;
            const bool minus = ((to % 4 + from % 4) == 3) != ((to / 4 + from / 4) == 3);
            word |= (one | (minus ? 0x8000u : 0u)) << (16 * half);
        }
        a[i] = word;
    }
}

// Strides 16 and 64 of a tile. Lane 4 * g + t reads rows 4t to 4t + 3 of the 16 x 16 matrix of x's row g, 128
// contiguous bytes; `from` is the shared address of the first of its eight chunks as scratch_place<false, 32>
// places them: all of them differ from it in bits 4 to 6 only.
template <class T>
__device__ __forceinline__ void multiply_columns(uint32_t from, const uint32_t (&h)[4], float (&v)[kValues]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // eight columns j
        uint32_t x[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[i][0]), "=r"(x[i][1]), "=r"(x[i][2]), "=r"(x[i][3])
                         : "r"(from ^ (16 * (2 * i + half))));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int pick = j % 2 ? 0x7632 : 0x5410;
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply_add(c, h, __byte_perm(x[0][j / 2], x[1][j / 2], pick),
                         __byte_perm(x[2][j / 2], x[3][j / 2], pick), T());
            // c: rows 2t and 2t + 1 of the tile for block 2g, then for block 2g + 1.
#pragma unroll
            for (int e = 0; e < 4; ++e) v[16 * e + 8 * half + j] = c[e];
        }
    }
    __syncwarp();  // a sink may use the scratch next
}

// Reads tiles as fetch_tile<false, 2> does; the addresses that do not change are computed once.
struct TileReader {
    const uint8_t* data;  // at this lane's chunk of the first row
    uint32_t rows, row_bytes;
    uint32_t scratch, even, odd,
        first;  // within a tile: this lane's chunks of even and odd rows; what it reads

    __device__ __forceinline__ TileReader(const Matrix& x, const uint4* to)
        : data(static_cast<const uint8_t*>(x.data) + 16 * (threadIdx.x % 32)),
          rows(uint32_t(x.rows)),
          row_bytes(uint32_t(x.stride * 2)),
          scratch(static_cast<uint32_t>(__cvta_generic_to_shared(to))),
          even(16 * scratch_place<false, 32>(0, threadIdx.x % 32)),
          odd(16 * scratch_place<false, 32>(1, threadIdx.x % 32)),
          first(16 * scratch_place<false, 32>(threadIdx.x % 32 / 4, threadIdx.x % 4 * 8)) {}

    __device__ __forceinline__ uint32_t buffer(unsigned turn) const {
        return scratch + turn * (kTileUnits * 16);
    }

    __device__ __forceinline__ void start(const TileWalk& tile, unsigned turn) const {
        const uint32_t top = tile.top(), to = buffer(turn);
        const uint8_t* from = data + uint64_t(top) * row_bytes + tile.column * 512;
        if (top + Groups::row_offset(kTileRows - 1) < rows) {
#pragma unroll
            for (int row = 0; row < kTileRows; ++row)
                copy(to, row, from + uint32_t(Groups::row_offset(row)) * row_bytes, 16);
        } else {
#pragma unroll
            for (int row = 0; row < kTileRows; ++row) {
                const bool here = top + Groups::row_offset(row) < rows;
                copy(to, row, here ? from + uint32_t(Groups::row_offset(row)) * row_bytes : data,
                     here ? 16 : 0);
            }
        }
    }

    __device__ __forceinline__ void copy(uint32_t to, int row, const uint8_t* from, int bytes) const {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row / 2 * 1024 +
                                                                           (row % 2 ? odd : even)),
                     "l"(from), "r"(bytes));
    }
};

// The frame of rotate_chunks with this rotation. `sink.begin()` says what all tiles have in common.
template <class T, class Sink>
__device__ __forceinline__ void rotate_groups(const Matrix& x, const Sink& sink, const Tiles& tiles,
                                              uint4 (&scratch)[2][kTileUnits]) {
    const unsigned step = gridDim.x * (kThreads / 32);
    unsigned tile = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, turn = 0;
    if (tile >= tiles.count) return;
    uint32_t h[4];
    hadamard16<T>(h);
    const auto common = sink.begin();
    const TileReader reader(x, scratch[0]);
    TileWalk here(tiles, tile, step), ahead = here;
    reader.start(here, 0);
    asm volatile("cp.async.commit_group;");
    for (; tile < tiles.count; tile += step, turn ^= 1, here = ahead) {
        ahead.next();
        if (tile + step < tiles.count) reader.start(ahead, turn ^ 1);
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncwarp();
        float v[kValues];
        multiply_columns<T>(reader.buffer(turn) + reader.first, h, v);
        stage<1>(v);
        stage<4>(v);
        sink.store(Groups{here, scratch[turn]}, v, common);
        __syncwarp();
    }
}

// Where `sink.quick()` says no, every value is computed as the definition says: the exact way of chunks.cuh.
template <class T, class Sink>
__global__ void __launch_bounds__(kThreads, kBlocks)
    groups_kernel(MatrixSource source, Sink sink, Tiles tiles) {
    __shared__ __align__(128) uint4 scratch[kThreads / 32][2][kTileUnits];
    if (sink.quick()) {
        rotate_groups<T>(source.x, sink, tiles, scratch[threadIdx.x / 32]);
    } else {
        rotate_chunks<true>(source, sink.exact, tiles, 256, scratch[threadIdx.x / 32]);
    }
}

inline bool in_groups(const MatrixSource& source, int group) {
    // Rows are counted in 32 bits.
    return group == 256 && source.aligned && source.x.dtype != Dtype::f32 && source.x.rows < 1 << 30;
}

template <class Sink>
cudaError_t run_groups(const MatrixSource& source, const Sink& sink, cudaStream_t stream) {
    const Tiles tiles = tiles_for(source.x.rows, source.x.cols);
    if (tiles.count == 0) return cudaSuccess;
    const unsigned blocks = blocks_for_tiles(tiles);
    if (source.x.dtype == Dtype::bf16) {
        groups_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(source, sink, tiles);
    } else {
        groups_kernel<__half><<<blocks, kThreads, 0, stream>>>(source, sink, tiles);
    }
    return cudaGetLastError();
}

}  // namespace hswq::cuda
