// Y [M, N] = alpha * X [M, K] W [N, K]^T + bias for few rows of X, 16-bit X and NVFP4 weights: a product that
// is bound by reading W, once, as it is stored.
//
// A block takes 16 or 32 rows of W, its eight warps share out K. In a step a warp reads 128 columns: each
// lane 16 bytes (32 codes, two blocks) of two or four rows, decodes them in registers (value * block scale is
// exact in 16 bits) and multiplies them on the tensor cores, W being the left operand. Which columns meet in
// one instruction is free as long as both operands agree, so a lane multiplies exactly what it has read, in
// order, and nothing moves between lanes. The warps' sums meet in shared memory, in a fixed order.
#include "cuda/packed.cuh"
#include "cuda/pairs.cuh"

namespace hswq::cuda {
namespace {

constexpr int kWarps = 8, kRows = 16, kStep = 128;
constexpr int kRound = kWarps * kStep;  // columns of all warps together
constexpr int kAhead = 2;               // steps whose codes are on their way
constexpr int kManyRows = 8192;         // of W, that make enough blocks of 32

// Nibble i of both halves of a word of codes as two 16-bit floats without their exponent's offset: the bits
// of E2M1 stand as those of a wider float's. Columns 1 and 5, 0 and 4, 3 and 7, 2 and 6.
template <class T>
__device__ __forceinline__ uint32_t spread(uint32_t codes, int i) {
    constexpr int kShift = kHalf<T> ? 3 : 6;
    constexpr uint32_t kMagnitudes = kHalf<T> ? 0x0e000e00u : 0x01c001c0u;
    const int up = 12 - 4 * i;  // takes the nibble to the top of its half
    const uint32_t magnitudes = up >= kShift ? codes << (up - kShift) : codes >> (kShift - up);
    return (magnitudes & kMagnitudes) | ((codes << up) & 0x80008000u);
}

// The same columns of eight values of X.
__device__ __forceinline__ uint32_t columns(const uint4& x, int i) {
    const int pick = i % 2 ? 0x5410 : 0x7632;
    return i < 2 ? __byte_perm(x.x, x.z, pick) : __byte_perm(x.y, x.w, pick);
}

// 32 codes of a row and the scales of their two blocks; zeros beyond K.
struct Piece {
    uint4 codes;
    uint32_t scales;

    __device__ __forceinline__ uint32_t word(int i) const {
        return i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w;
    }
};

// Where a lane reads: its columns of rows g, g + 8, ... of the block, of their scales, and of row g, ... of
// X.
struct Reader {
    const uint8_t* codes;
    const uint8_t* scales;
    const uint8_t* x;
    int64_t eight_rows, eight_x_rows;  // bytes
    int columns_left;                  // of K, from this lane's on
    bool upper_half;                   // whether rows from 16 on exist

    __device__ __forceinline__ Reader(const W4Product& job, int rows, int lane, int64_t first) {
        const int64_t row = int64_t(blockIdx.x) * rows + lane / 4, col = first + 32 * (lane % 4);
        codes = job.w.codes + row * (job.w.cols / 2) + col / 2;
        scales = job.w.scales + scale_word(row, col / 64, (job.w.cols / 16 + 3) / 4) + (col / 16) % 4;
        x = static_cast<const uint8_t*>(job.x.data) + (lane / 4 * job.x.stride + col) * 2;
        eight_rows = 8 * (job.w.cols / 2);
        eight_x_rows = 8 * job.x.stride * 2;
        columns_left = int(job.w.cols - col);
        upper_half = row / 16 + 1 < (job.w.rows + 15) / 16;
    }

    // `steps` rounds of all warps further on; 512 bytes of scales are 64 columns.
    __device__ __forceinline__ Piece piece(int r, int steps) const {
        Piece piece{make_uint4(0, 0, 0, 0), 0};
        if (columns_left > steps * kRound && (r < 2 || upper_half)) {
            piece.codes =
                __ldcs(reinterpret_cast<const uint4*>(codes + r * eight_rows + steps * (kRound / 2)));
            piece.scales = *reinterpret_cast<const uint16_t*>(scales + r * 128 + steps * (kRound / 64 * 512));
        }
        return piece;
    }

    __device__ __forceinline__ uint4 x_columns(int tile, int word, bool row_exists) const {
        if (!row_exists || columns_left <= 0) return make_uint4(0, 0, 0, 0);
        return *reinterpret_cast<const uint4*>(x + tile * eight_x_rows + 16 * word);
    }

    __device__ __forceinline__ void next() {
        codes += kRound / 2;
        scales += kRound / 64 * 512;
        x += kRound * 2;
        columns_left -= kRound;
    }
};

// Weights are multiplied with block scale * kUp at once, not with the offset first, and the sums with the
// rest.
template <class T>
constexpr float kUp = kHalf<T> ? 0x1p7f : 0x1p100f;

template <class T, int kRowTiles, int kTiles>
__device__ __forceinline__ void step(const Reader& reader, int64_t x_rows, const Piece (&w)[2 * kRowTiles],
                                     float (&sums)[kRowTiles][kTiles][4]) {
    constexpr bool kEarly = kTiles <= 2;  // X on its way while codes are decoded, where registers suffice
    const int64_t row = threadIdx.x % 32 / 4;
    uint4 x[kTiles][4];
#pragma unroll
    for (int i = 0; i < 4 * kTiles && kEarly; ++i)
        x[i / 4][i % 4] = reader.x_columns(i / 4, i % 4, 8 * (i / 4) + row < x_rows);
    uint32_t scale[2 * kRowTiles][2];
#pragma unroll
    for (int r = 0; r < 2 * kRowTiles; ++r) {
        scale[r][0] = twice<T>(e4m3_value(w[r].scales & 255u) * kUp<T>);
        scale[r][1] = twice<T>(e4m3_value(w[r].scales >> 8) * kUp<T>);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {  // two instructions each, 8 columns a lane
        uint32_t a[kRowTiles][2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int r = 0; r < 2 * kRowTiles; ++r)
                a[r / 2][i / 2][2 * (i % 2) + r % 2] =
                    times(spread<T>(w[r].word(word), i), scale[r][word / 2], T());
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (!kEarly) x[tile][word] = reader.x_columns(tile, word, 8 * tile + row < x_rows);
            const uint4 eight = x[tile][word];
            const uint32_t b[4] = {columns(eight, 0), columns(eight, 1), columns(eight, 2),
                                   columns(eight, 3)};
#pragma unroll
            for (int rows = 0; rows < kRowTiles; ++rows) {
                multiply_add(sums[rows][tile], a[rows][0], b[0], b[1], T());
                multiply_add(sums[rows][tile], a[rows][1], b[2], b[3], T());
            }
        }
    }
}

// The warps' sums of 16 rows of W, in shared memory, added up in a fixed order and finished.
template <int kTiles>
__device__ __forceinline__ void finish_rows(const W4Product& job, int64_t first, float alpha,
                                            const float (&partial)[kWarps][8 * kTiles][kRows]) {
    for (int at = threadIdx.x; at < 8 * kTiles * kRows; at += 32 * kWarps) {
        const int64_t m = at / kRows, n = first + at % kRows;
        if (m >= job.y.rows || n >= job.y.cols) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += partial[w][m][at % kRows];
        sum = sum * alpha + (job.bias ? job.bias[n] : 0.0f);
        const int64_t to = m * job.y.stride + n;
        if (job.y.dtype == Dtype::f32) {
            static_cast<float*>(job.y.data)[to] = sum;
        } else {
            static_cast<uint16_t*>(job.y.data)[to] = uint16_t(narrow(sum, 0.0f, job.y.dtype));
        }
    }
}

template <class T, int kRowTiles, int kTiles>
__global__ void __launch_bounds__(32 * kWarps) skinny_kernel(W4Product job) {
    __shared__ float partial[kWarps][8 * kTiles][kRows];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[kRowTiles][kTiles][4] = {};
    Reader reader(job, kRowTiles * kRows, lane, warp * kStep);
    Piece next[kAhead][2 * kRowTiles];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int r = 0; r < 2 * kRowTiles; ++r) next[i][r] = reader.piece(r, i);
    }
    for (int base = warp * kStep; base < job.w.cols; base += kRound, reader.next()) {
        Piece w[2 * kRowTiles];
#pragma unroll
        for (int r = 0; r < 2 * kRowTiles; ++r) {
            w[r] = next[0][r];
#pragma unroll
            for (int i = 0; i + 1 < kAhead; ++i) next[i][r] = next[i + 1][r];
            next[kAhead - 1][r] = reader.piece(r, kAhead);
        }
        step<T>(reader, job.x.rows, w, sums);
    }
    const float alpha =
        *job.first_scale * (job.second_scale ? *job.second_scale : 1.0f) * (kCodeOffset<T> / kUp<T>);
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partial[warp][8 * tile + 2 * (lane % 4) + i % 2][lane / 4 + 8 * (i / 2)] =
                    sums[rows][tile][i];
        }
        __syncthreads();
        finish_rows<kTiles>(job, (int64_t(blockIdx.x) * kRowTiles + rows) * kRows, alpha, partial);
        if (rows + 1 < kRowTiles) __syncthreads();
    }
}

// More rows of W a block read X less often, from the second-level cache; fewer leave no processor idle.
template <class T, int kRowTiles, int kTiles>
cudaError_t launch_tiles(const W4Product& job, cudaStream_t stream) {
    const auto blocks = unsigned((job.w.rows + kRowTiles * kRows - 1) / (kRowTiles * kRows));
    skinny_kernel<T, kRowTiles, kTiles><<<blocks, 32 * kWarps, 0, stream>>>(job);
    return cudaGetLastError();
}

template <class T>
cudaError_t launch(const W4Product& job, cudaStream_t stream) {
    if (job.x.rows <= 8) return launch_tiles<T, 1, 1>(job, stream);
    if (job.x.rows <= 16)
        return job.w.rows < kManyRows ? launch_tiles<T, 1, 2>(job, stream)
                                      : launch_tiles<T, 2, 2>(job, stream);
    if (job.x.rows <= 32) return launch_tiles<T, 2, 4>(job, stream);
    return launch_tiles<T, 2, 8>(job, stream);
}

}  // namespace

cudaError_t skinny(const W4Product& job, cudaStream_t stream) {
    if (job.x.rows == 0 || job.w.rows == 0) return cudaSuccess;
    if (job.x.rows > kSkinnyRows || job.w.cols % 32 != 0 || job.x.dtype == Dtype::f32)
        return cudaErrorInvalidValue;
    return job.x.dtype == Dtype::f16 ? launch<__half>(job, stream) : launch<__nv_bfloat16>(job, stream);
}

}  // namespace hswq::cuda
