// The work of the AMX tile unit in AVX-512 registers: a vector holds 4 bytes of columns of 16 rows of x, and
// meets the same 4 bytes of one row of w in every lane.

// Nothing to set up, and loads and stores that the compiler sees.
struct Tiles {
    Tiles() {}
};

inline void settle_memory() {}

struct Bf16 {
    static constexpr int64_t columns = 32;
    using Sum = __m512;
    static __m512 add(__m512 acc, __m512i w, __m512i x) {
        return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
    }
};

// The instruction multiplies unsigned by signed bytes. So w is stored as w + 128 and 128 sum(x) is taken off
// the result; all modulo 2^32, so nothing is lost however long the row.
struct Int8 {
    static constexpr int64_t columns = 64;
    static constexpr int kOffset = 128;
    using Sum = __m512i;
    static __m512i add(__m512i acc, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(acc, w, x); }
};

constexpr int kRowsAtOnce = 8;  // of w, by two tiles of x: sixteen sums in flight hide the latency

template <class Type>
inline void multiply_rows(const uint8_t* w, const uint8_t* x, int64_t x_next, int64_t chunks, uint8_t* sums,
                          bool fresh) {
    using Sum = typename Type::Sum;
    Sum acc[kRowsAtOnce][2];
    const auto at = [&](int r, int j) { return reinterpret_cast<Sum*>(sums + 64 * r + kTile * j); };
    for (int r = 0; r < kRowsAtOnce; ++r) {
        for (int j = 0; j < 2; ++j) acc[r][j] = fresh ? Sum{} : *at(r, j);
    }
    for (int64_t c = 0; c < chunks; ++c, w += kTile, x += kTile) {
#pragma GCC unroll 4
        for (int group = 0; group < 64; group += 4) {
            const __m512i x0 = _mm512_load_si512(x + 16 * group);
            const __m512i x1 = _mm512_load_si512(x + x_next + 16 * group);
#pragma GCC unroll 8
            for (int r = 0; r < kRowsAtOnce; ++r) {
                int32_t four;
                __builtin_memcpy(&four, w + 64 * r + group, 4);
                const __m512i same = _mm512_set1_epi32(four);
                acc[r][0] = Type::add(acc[r][0], same, x0);
                acc[r][1] = Type::add(acc[r][1], same, x1);
            }
        }
    }
    for (int r = 0; r < kRowsAtOnce; ++r) {
        for (int j = 0; j < 2; ++j) *at(r, j) = acc[r][j];
    }
}

// Four 16x16 products over some chunks, added to what is in `sums`, or in its place if `fresh`; the two tiles
// of the first left one lie side by side, those of the second at `sums_next`.
template <class Type>
inline void multiply_tiles(const TileSquare& s, int64_t chunks, uint8_t* sums, int64_t sums_next,
                           bool fresh) {
    for (int i = 0; i < 2; ++i) {
        for (int64_t row = 0; row < 64 * kTileRows; row += 64 * kRowsAtOnce) {
            multiply_rows<Type>(s.w + i * s.w_next + row, s.x, s.x_next, chunks, sums + i * sums_next + row,
                                fresh);
        }
    }
}
