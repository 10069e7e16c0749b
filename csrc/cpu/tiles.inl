// Matrix products by tiles of 16 rows of 64 bytes, of which a unit multiplies two and adds to a third of
// 16x16 sums: the AMX tile unit, or AVX-512 with BF16 and VNNI (tile_unit_*.inl).
//
// Operands lie in tiles of 1 KB, tile (row tile, chunk) at (row tile * chunks + chunk); a chunk is 64 bytes
// of a row: 32 columns in bf16, 64 in int8. w is the left operand as it is; x the right one, with rows and
// groups of 4 bytes of columns exchanged, which a 16x16 transposition does once. So sums come out as [row of
// w][row of x], and are transposed back at the end.

constexpr int kTile = 1024;
constexpr int kTileRows = 16;

// Two left and two right tiles and the next chunks of each; `..._next` is the distance to the second tile, 0
// where there is none: it repeats the first then.
struct TileSquare {
    const uint8_t* w;
    int64_t w_next;
    const uint8_t* x;
    int64_t x_next;
};

inline void transpose16(__m512i* r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xDD);
        }
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

// Makes a right-hand tile of 16 rows, `stride` bytes apart.
inline void pack_right(const uint8_t* rows, int64_t stride, uint8_t* tile) {
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows + i * stride);
    transpose16(r);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(tile + 64 * i, r[i]);
}

inline int64_t tiles_of(int64_t rows) {
    return (rows + kTileRows - 1) / kTileRows;
}
