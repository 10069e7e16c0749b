// The loops around a tile unit: parts of w and x that fit the caches, every sum finished once.

// Sizes that keep the decoded part of w and the sums in a core's second-level cache while x streams past.
constexpr int64_t kRowsOfW = 256, kRowsOfX = 1024, kChunks = 32;

// Y = w x^T for rows begin .. end of w, with `decode(row tile, chunk, chunks, tiles)` making left-hand tiles
// and `finish(first row of w, first row of x, sums)` storing 16x16 sums.
template <class Type, class Decode, class Finish>
inline void multiply_blocked(const uint8_t* packed, int64_t m, int64_t k, int64_t begin, int64_t end,
                             const Decode& decode, const Finish& finish) {
    const int64_t chunks = (k + Type::columns - 1) / Type::columns, x_row = chunks * kTile;
    const int64_t most_w = tiles_of(end - begin < kRowsOfW ? end - begin : kRowsOfW);
    const int64_t most_x = ceil_to(tiles_of(m < kRowsOfX ? m : kRowsOfX), 2);
    Scratch<uint8_t> left(most_w * kChunks * kTile), sums(ceil_to(most_w, 2) * most_x * kTile);
    const Tiles tiles;
    for (int64_t n0 = begin; n0 < end; n0 += kRowsOfW) {
        const int64_t w_tiles = tiles_of(end - n0 < kRowsOfW ? end - n0 : kRowsOfW);
        for (int64_t m0 = 0; m0 < m; m0 += kRowsOfX) {
            const int64_t x_tiles = tiles_of(m - m0 < kRowsOfX ? m - m0 : kRowsOfX),
                          sums_row = ceil_to(x_tiles, 2) * kTile;
            __builtin_memset(sums.data, 0, size_t(ceil_to(w_tiles, 2) * sums_row));
            for (int64_t c0 = 0; c0 < chunks; c0 += kChunks) {
                const int64_t c = chunks - c0 < kChunks ? chunks - c0 : kChunks;
                for (int64_t i = 0; i < w_tiles; ++i)
                    decode(n0 + i * kTileRows, c0, c, left.data + i * c * kTile);
                settle_memory();
                for (int64_t j = 0; j < x_tiles; j += 2) {
                    const uint8_t* x = packed + (m0 / kTileRows + j) * x_row + c0 * kTile;
                    for (int64_t i = 0; i < w_tiles; i += 2) {
                        const TileSquare square{left.data + i * c * kTile, i + 1 < w_tiles ? c * kTile : 0, x,
                                                j + 1 < x_tiles ? x_row : 0};
                        multiply_tiles<Type>(square, c, sums.data + i * sums_row + j * kTile, sums_row,
                                             false);
                    }
                }
                settle_memory();
            }
            for (int64_t i = 0; i < w_tiles; ++i) {
                for (int64_t j = 0; j < x_tiles; ++j) {
                    finish(n0 + i * kTileRows, m0 + j * kTileRows, sums.data + i * sums_row + j * kTile);
                }
            }
        }
    }
}
