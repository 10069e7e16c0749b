// NVFP4 on both sides, exact: what may be summed in fp32, and the norms that say so.
//
// A tile unit adds in fp32. That is exact over a range of K whenever no partial sum needs more than 24
// bits: all products are multiples of u_x u_w, with u the last bit of the smallest block scale of the range,
// and by Cauchy and Schwarz no partial sum exceeds |x| |w|, the norms over the range. So with q = |.| / u of
// a row, q_x q_w < 2^24 is enough. For each tile the largest q of its 16 rows is kept for ranges of 1, 2, 4
// up to 32 chunks, and the longest range that passes is summed in one go; a single block always passes (its
// dot product is an integer below 2^19). Ranges are then added in fp64, exactly as long as the sums of a row
// fit 53 bits; where its scales range too widely for that, block by block in the order of the definition.

constexpr int kLevels = 6;  // ranges of 1, 2, 4, ... 32 chunks
constexpr int kRange = 1 << (kLevels - 1);
static_assert(kRange == kChunks, "the longest range is what is decoded at a time");
constexpr int kBlockBits = 19;                     // 2304 * 15 * 15 < 2^19
constexpr float kExactSquared = 0x1p48f * 0.999f;  // (2^24)^2, less what rounding the norms may hide

// The squares of q of a tile, for all ranges of all levels: level l, range i at offset(l) + i.
inline int64_t norms_per_tile(int64_t chunks) {
    return kLevels * ceil_to(chunks, kRange);
}

struct Fp4Packed {
    int64_t chunks, row_tiles, norms_at, ranges_at, bytes;
    Fp4Packed(int64_t m, int64_t k) : chunks((k + 31) / 32), row_tiles(tiles_of(m)) {
        norms_at = row_tiles * chunks * kTile;
        ranges_at = norms_at + row_tiles * norms_per_tile(chunks) * 4;
        bytes = ranges_at + row_tiles;  // a byte for each row tile
    }
};

inline int scale_exponent(uint8_t code) {
    const int exponent = (code & 127) >> 3;
    return exponent > 0 ? exponent : 1;
}

inline int larger(int a, int b) {
    return a > b ? a : b;
}

// The widest range of scale exponents in one of 16 rows.
inline uint8_t range_of_tile(const Nvfp4& w, int64_t first) {
    int widest = 0;
    for (int64_t r = first; r < first + kTileRows; ++r) {
        const CodeRow row(w, r);
        int low = 15, high = 1;
        for (int64_t b = 0; b < row.blocks; ++b) {
            const uint8_t code = row.scale_code(b);
            const int exponent = scale_exponent(code);
            if ((code & 127) == 0) continue;
            low = exponent < low ? exponent : low;
            high = larger(exponent, high);
        }
        widest = larger(widest, high - low);
    }
    return uint8_t(widest);
}

// Norms of 16 rows over a range of chunks: squares of the values, and the exponent of the smallest scale.
struct RangeNorm {
    __m512 squares = _mm512_setzero_ps();
    __m512i exponent = _mm512_set1_epi32(15);

    void add(__m512 more, const uint8_t* scale_codes) {
        const __m512i code = _mm512_and_si512(
            _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scale_codes))),
            _mm512_set1_epi32(127));
        const __m512i e = _mm512_max_epi32(_mm512_srli_epi32(code, 3), _mm512_set1_epi32(1));
        squares = _mm512_add_ps(squares, more);
        exponent = _mm512_mask_min_epi32(exponent, _mm512_test_epi32_mask(code, code), exponent, e);
    }

    void add(const RangeNorm& other) {
        squares = _mm512_add_ps(squares, other.squares);
        exponent = _mm512_min_epi32(exponent, other.exponent);
    }

    // The largest q squared. A value is a multiple of half its scale's last bit, which weighs 2^(exponent -
    // 10).
    float largest() const {
        const __m512i power = _mm512_slli_epi32(
            _mm512_sub_epi32(_mm512_set1_epi32(127 + 22), _mm512_slli_epi32(exponent, 1)), 23);
        return _mm512_reduce_max_ps(_mm512_mul_ps(squares, _mm512_castsi512_ps(power)));
    }
};

// One chunk of 16 rows as a left-hand tile.
inline RangeNorm decode_chunk(const CodeRow* rows, int64_t chunk, uint8_t* tile) {
    __m512 first[kTileRows], second[kTileRows];
    alignas(16) uint8_t c0[kTileRows], c1[kTileRows];
    for (int r = 0; r < kTileRows; ++r) {
        __m512 v0, v1;
        rows[r].decode(chunk, &v0, &v1);
        c0[r] = rows[r].scale_code(2 * chunk);
        c1[r] = rows[r].scale_code(2 * chunk + 1);
        _mm512_store_si512(tile + 64 * r, upper_halves(v0, v1));
        first[r] = _mm512_mul_ps(v0, v0);
        second[r] = _mm512_mul_ps(v1, v1);
    }
    RangeNorm norm;
    norm.add(reduce16<Plus>(first), c0);
    norm.add(reduce16<Plus>(second), c1);
    return norm;
}

// `chunks` left-hand tiles of 16 rows, and their norms; norms[l * stride + i] is range i of level l.
inline void decode_tiles(const Nvfp4& w, int64_t first_row, int64_t first_chunk, int64_t chunks,
                         uint8_t* tiles, float* norms, int64_t stride) {
    CodeRow rows[kTileRows];
    for (int r = 0; r < kTileRows; ++r) rows[r] = CodeRow(w, first_row + r);
    for (int64_t c = 0; c < chunks; c += kRange) {
        RangeNorm of[kRange];
        for (int64_t i = 0; i < kRange && c + i < chunks; ++i)
            of[i] = decode_chunk(rows, first_chunk + c + i, tiles + (c + i) * kTile);
        for (int level = 0; level < kLevels; ++level) {
            for (int64_t i = 0; i < kRange >> level; ++i) {
                norms[level * stride + (c >> level) + i] = of[i].largest();
            }
            for (int64_t i = 0; i < kRange >> (level + 1); ++i) {
                of[i] = of[2 * i];
                of[i].add(of[2 * i + 1]);
            }
        }
    }
}
