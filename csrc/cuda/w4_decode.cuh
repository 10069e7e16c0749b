// How a block of w4_product.cu is laid out, and the warpgroups of it that decode: they have the copy engine
// fetch packed weights and X, and write value * block scale, exact in 16 bits, to a ring of shared memory.
#pragma once

#include "cuda/hopper.cuh"
#include "cuda/pairs.cuh"

namespace hswq::cuda {
namespace {

constexpr int kRows = 128, kStep = 64;     // of W, and columns that one round of products takes
constexpr int kSlab = 2 * kStep;           // columns that a decoder fetches at once: 64 bytes of codes a row
constexpr int kWTile = kRows * kStep * 2;  // bytes, decoded
constexpr int kSlabCodes = kRows * kSlab / 2, kSlabBytes = kSlabCodes + 2 * 512;  // codes, then block scales
constexpr int kProductWarps = 8, kChunk = 16;  // tokens that are finished at once
constexpr int kStaged = 64 * kChunk * 2;       // bytes, of a warpgroup's rows

// Tokens a tile, warpgroups that decode, slabs that each has on its way, and steps in the ring of operands.
template <int kT, int kD, int kS, int kR>
struct Shape {
    static constexpr int kTokens = kT, kDecoders = kD, kSlabs = kS, kStages = kR, kXTile = kT * kStep * 2;
    static constexpr int kThreads = kGroupThreads * (2 + kDecoders);
    static constexpr int kOperands = kStages * (kXTile + kWTile);
    static constexpr int kBytes = 1024 + kOperands + kDecoders * kSlabs * kSlabBytes + 2 * kStaged +
                                  16 * (kStages + kDecoders * kSlabs);
    static_assert(kStages / 2 % kDecoders == 0, "two steps of the ring belong to one decoder");
    static_assert(kBytes <= 227 << 10, "more than a multiprocessor has");
    static_assert(kRows * kT * 4 <= kOperands, "partial sums lie where the operands were");
};

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ uint4 load16(uint32_t from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint32_t load4(uint32_t from) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store16(uint32_t to, const uint32_t (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]),
                 "r"(v[3])
                 : "memory");
}

__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The slabs of K that a block takes, tile after tile; row and column are the tile's.
struct Walk {
    Tiling tiling;
    int tile, stride, slab, first, last, row, column;

    __device__ __forceinline__ Walk(const Tiling& tiles, int splits) : tiling(tiles) {
        const int rank = splits == 1 ? 0 : int(cluster_rank());
        tile = int(blockIdx.x) / splits, stride = int(gridDim.x) / splits;
        first = tiling.steps * rank / splits, last = tiling.steps * (rank + 1) / splits, slab = first;
        tiling.place(tile, row, column);
    }
    __device__ __forceinline__ bool done() const { return tile >= tiling.count(); }
    __device__ __forceinline__ void next_tile() {
        tile += stride, slab = first;
        tiling.place(tile, row, column);
    }
    __device__ __forceinline__ void advance(int by) {
        slab += by;
        while (slab >= last && !done()) {
            const int beyond = slab - last;
            next_tile();
            slab += beyond;
        }
    }
};

// Where in shared memory what lies: operands, packed slabs, what is finished, and barriers.
template <class S>
struct Room {
    uint32_t x, w, slabs, staged, barriers;

    __device__ explicit Room(uint32_t shared) {
        x = (shared + 1023) & ~1023u;
        w = x + S::kStages * S::kXTile;
        slabs = w + S::kStages * kWTile;
        staged = slabs + S::kDecoders * S::kSlabs * kSlabBytes;
        barriers = staged + 2 * kStaged;
    }
    __device__ __forceinline__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(S::kStages + stage); }
    __device__ __forceinline__ uint32_t slab_full(int slot) const { return full(2 * S::kStages + slot); }
    __device__ __forceinline__ uint32_t slab_empty(int slot) const {
        return slab_full(S::kDecoders * S::kSlabs + slot);
    }
    __device__ void init() const {
        for (int i = 0; i < S::kStages; ++i) {
            barrier_init(full(i), 1 + 4);  // X is on its way, four warps have decoded
            barrier_init(empty(i), kProductWarps);
        }
        for (int i = 0; i < S::kDecoders * S::kSlabs; ++i) {
            barrier_init(slab_full(i), 2);  // codes and scales are on their way
            barrier_init(slab_empty(i), kGroupThreads);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

template <int kCount>
struct Ring {
    int stage = 0, phase = 0;

    __device__ __forceinline__ void next() {
        if (++stage == kCount) stage = 0, phase ^= 1;
    }
};

// ---- the decoders
// --------------------------------------------------------------------------------------------

// Byte i of eight codes as two 16-bit floats without their exponent's offset, the even column, which is the
// high nibble, in the lower half; `up` is codes << 4. The bits of E2M1 stand as those of a wider float's. The
// byte lies in both bytes of its half: its sign is in place.
template <class T>
__device__ __forceinline__ uint32_t spread(uint32_t codes, uint32_t up, int i) {
    constexpr int kShift = kHalf<T> ? 5 : 2;
    constexpr uint32_t kMagnitudes = kHalf<T> ? 0x0e000e00u : 0x01c001c0u;
    const uint32_t bytes = __byte_perm(codes, up, 0x4400 + 0x1111 * i);
    return (bytes << kShift & kMagnitudes) | (bytes & 0x80008000u);
}

template <class T>
constexpr float kUp = kHalf<T> ? 0x1p7f : 0x1p100f;  // of a scale, so that products are normal numbers

// Four block scales times kUp, each in both halves of a word. E4M3's bits, too, stand as those of a wider
// float's.
template <class T>
__device__ __forceinline__ void widen(uint32_t scales, uint32_t (&wide)[4]) {
    constexpr int kShift = kHalf<T> ? 7 : 4;
    const bool plain = (scales & 0x80808080u) == 0 && ((scales + 0x01010101u) & 0x80808080u) == 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t bits = __byte_perm(scales, 0, 0x4040 + 0x0101 * j) << kShift;
        if constexpr (kHalf<T>) {
            wide[j] = times(bits, 0x78007800u, T());  // 2^15
        } else {
            wide[j] = times(times(bits, 0x7f007f00u, T()), 0x6e006e00u, T());  // 2^127, 2^93
        }
    }
    if (!plain) {  // negative or not a number
#pragma unroll
        for (int j = 0; j < 4; ++j) wide[j] = twice<T>(e4m3_value(scales >> (8 * j) & 255u) * kUp<T>);
    }
}

// A row's 64 columns from a slab to a row of 128 bytes of a tile; pieces of 16 bytes are swizzled in both.
template <class T>
__device__ __forceinline__ void decode_row(const uint4 (&codes)[2], uint32_t scales, uint32_t to, int row) {
    uint32_t wide[4];
    widen<T>(scales, wide);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const uint4& q = codes[j / 4];
        const uint32_t word = j % 4 == 0 ? q.x : j % 4 == 1 ? q.y : j % 4 == 2 ? q.z : q.w, up = word << 4;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = times(spread<T>(word, up, i), wide[j / 2], T());
        store16(to + ((j ^ (row % 8)) << 4), v);
    }
}

// A thread's part of a slab: a row.
struct Piece {
    uint4 codes[2][2];
    uint32_t scales[2];

    __device__ __forceinline__ void load(uint32_t slab) {
        const int row = threadIdx.x % kGroupThreads;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                codes[half][i] = load16(slab + row * 64 + ((2 * half + i) ^ (row / 2 % 4)) * 16);
            scales[half] = load4(slab + kSlabCodes + half * 512 + row % 32 * 16 + row / 32 * 4);
        }
    }
};

// Every kDecoders-th slab of the block, from the group's own on.
template <class S>
struct Turns {
    Walk walk;
    int count;  // of the block's slabs

    __device__ __forceinline__ Turns(const Walk& start, int group) : walk(start), count(group) {
        walk.advance(group);
    }
    __device__ __forceinline__ void next() {
        walk.advance(S::kDecoders);
        count += S::kDecoders;
    }
};

// A warpgroup that decodes. A thread of each warp lets the copy engine fetch: X, X, codes, block scales.
template <class S>
struct Decoder {
    const Room<S>& room;
    const CUtensorMap &x, &codes;
    const Nvfp4& w;
    int first_slot, columns, chunks;  // of K, of 64 columns
    Turns<S> now, ahead;
    Ring<S::kSlabs> slot, filled;

    __device__ __forceinline__ Decoder(const Room<S>& place, const CUtensorMap& x_map,
                                       const CUtensorMap& w_map, const Nvfp4& weights, const Walk& walk,
                                       int group)
        : room(place),
          x(x_map),
          codes(w_map),
          w(weights),
          first_slot(group * S::kSlabs),
          columns(int(weights.cols)),
          chunks((columns + 63) / 64),
          now(walk, group),
          ahead(walk, group) {}

    __device__ __forceinline__ uint32_t slab(int slot) const { return room.slabs + slot * kSlabBytes; }

    // The next slab's codes, and its block scales: by two threads, each with its own `ahead` and `filled`.
    __device__ __forceinline__ void fetch_codes() {
        if (ahead.walk.done()) return;
        const int slot = expect_slab(kSlabCodes);
        copy_tile(slab(slot), codes, ahead.walk.slab * (kSlab / 2), ahead.walk.row * kRows,
                  room.slab_full(slot));
        ahead.next();
    }

    __device__ __forceinline__ void fetch_scales() {
        if (ahead.walk.done()) return;
        const int chunk = 2 * ahead.walk.slab, bytes = min(2, chunks - chunk) * 512,
                  slot = expect_slab(bytes);
        copy_bytes(slab(slot) + kSlabCodes, w.scales + (int64_t(ahead.walk.row) * chunks + chunk) * 512,
                   bytes, room.slab_full(slot));
        ahead.next();
    }

    __device__ __forceinline__ int expect_slab(int bytes) {
        const int slot = first_slot + filled.stage;
        barrier_wait(room.slab_empty(slot), filled.phase ^ 1);
        barrier_expect(room.slab_full(slot), bytes);
        filled.next();
        return slot;
    }

    __device__ __forceinline__ void fetch_x(int stage, int half) const {
        barrier_expect(room.full(stage), S::kXTile);
        copy_tile(room.x + stage * S::kXTile, x, (now.walk.slab * kSlab + half * kStep) * 2,
                  now.walk.column * S::kTokens, room.full(stage));
    }

    __device__ __forceinline__ void read_slab(Piece& piece) const {
        barrier_wait(room.slab_full(first_slot + slot.stage), slot.phase);
        piece.load(slab(first_slot + slot.stage));
    }

    // Where K ends within a slab, codes are zeros, and scales, which may be anything, are made so.
    __device__ __forceinline__ uint32_t scale_mask(int half) const {
        const int left = columns - (now.walk.slab * kSlab + half * kStep);
        return left >= kStep ? ~0u : left > 0 ? 0xffffu : 0u;
    }

    template <class T>
    __device__ __forceinline__ void run() {
        const int row = threadIdx.x % kGroupThreads, lane = row % 32;
        const uint32_t tile_row = room.w + row * 128;
        const auto fetch_slab = [&] {
            if (row == 64) fetch_codes();
            if (row == 96) fetch_scales();
        };
        for (int i = 0; i + 1 < S::kSlabs; ++i) fetch_slab();
        __syncwarp();
        Piece next;
        if (!now.walk.done()) read_slab(next);
        while (!now.walk.done()) {
            const Piece piece = next;
            const uint32_t masks[2] = {scale_mask(0), scale_mask(1)};
            const int stage = 2 * (now.count % (S::kStages / 2)), phase = now.count / (S::kStages / 2) & 1;
            fetch_slab();
            barrier_wait(room.empty(stage), phase ^ 1);
            if (row == 0) fetch_x(stage, 0);
            decode_row<T>(piece.codes[0], piece.scales[0] & masks[0], tile_row + stage * kWTile, row);
            barrier_arrive(room.slab_empty(first_slot + slot.stage));
            slot.next();
            barrier_wait(room.empty(stage + 1), phase ^ 1);
            if (row == 32) fetch_x(stage + 1, 1);
            now.next();
            if (!now.walk.done()) read_slab(next);
            decode_row<T>(piece.codes[1], piece.scales[1] & masks[1], tile_row + (stage + 1) * kWTile, row);
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __syncwarp();
            if (lane == 0) barrier_arrive(room.full(stage)), barrier_arrive(room.full(stage + 1));
        }
    }
};

}  // namespace
}  // namespace hswq::cuda
