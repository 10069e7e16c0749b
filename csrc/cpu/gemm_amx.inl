// Matrix products on AMX tiles: 16 rows of 64 bytes, of which the unit multiplies two and adds to a third of
// 16x16 sums.
//
// Operands lie in tiles of 1 KB, tile (row tile, chunk) at (row tile * chunks + chunk); a chunk is 64 bytes
// of a row: 32 columns in bf16, 64 in int8. w is the left operand as it is; x the right one, with rows and
// groups of 4 bytes of columns exchanged, which a 16x16 transposition does once. So sums come out as [row of
// w][row of x], and are transposed back at the end.

constexpr int kTile = 1024;
constexpr int kTileRows = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sets up the tiles of this thread and gives them back: their state is large, and the system saves it at
// every switch.
struct Tiles {
    Tiles() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The tile intrinsics are opaque to the compiler: it must neither keep their input in registers nor move it
// past them.
inline void settle_memory() {
    __asm__ volatile("" ::: "memory");
}

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

// ---- the inner product of 32 x 32 sums
// --------------------------------------------------------------------------------------

// The four products of tiles 4, 5 (left) and 6, 7 (right) into 0 to 3. (The intrinsics want literal numbers.)
struct Bf16 {
    static constexpr int64_t columns = 32;
    static void multiply() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};

struct Int8 {
    static constexpr int64_t columns = 64;
    static void multiply() {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
};

// sums[2 x 2 tiles] += w[2 tiles] x[2 tiles] over `chunks` chunks. A missing second tile repeats the first,
// at a distance of 0.
template <class Type>
inline void multiply_tiles(const uint8_t* w, int64_t w_next, const uint8_t* x, int64_t x_next, int64_t chunks,
                           uint8_t* sums, int64_t sums_next) {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTile, 64);
    _tile_loadd(2, sums + sums_next, 64);
    _tile_loadd(3, sums + sums_next + kTile, 64);
    for (int64_t c = 0; c < chunks; ++c, w += kTile, x += kTile) {
        _tile_loadd(4, w, 64);
        _tile_loadd(6, x, 64);
        _tile_loadd(7, x + x_next, 64);
        _tile_loadd(5, w + w_next, 64);
        Type::multiply();
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTile, 64);
    _tile_stored(2, sums + sums_next, 64);
    _tile_stored(3, sums + sums_next + kTile, 64);
}

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
                        multiply_tiles<Type>(left.data + i * c * kTile, i + 1 < w_tiles ? c * kTile : 0, x,
                                             j + 1 < x_tiles ? x_row : 0, c,
                                             sums.data + i * sums_row + j * kTile, sums_row);
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

// ---- int8
// -------------------------------------------------------------------------------------------------------------------

int64_t int8_packed_bytes(int64_t m, int64_t k) {
    return tiles_of(m) * ((k + 63) / 64) * kTile;
}

void int8_pack(const int8_t* q, int64_t m, int64_t k, uint8_t* packed, int64_t begin, int64_t end) {
    const int64_t chunks = (k + 63) / 64;
    alignas(64) uint8_t rows[kTile];
    for (int64_t row = begin; row < end; row += kTileRows) {
        const int64_t n = m - row < kTileRows ? m - row : kTileRows;
        for (int64_t c = 0; c < chunks; ++c) {
            const int64_t bytes = k - 64 * c < 64 ? k - 64 * c : 64;
            __builtin_memset(rows, 0, sizeof rows);
            for (int64_t i = 0; i < n; ++i)
                __builtin_memcpy(rows + 64 * i, q + (row + i) * k + 64 * c, size_t(bytes));
            pack_right(rows, 64, packed + (row / kTileRows * chunks + c) * kTile);
        }
    }
}

void int8_multiply(const uint8_t* packed, const int8_t* w, int64_t n, int64_t k, const Epilogue& e,
                   int64_t begin, int64_t end) {
    const auto decode = [&](int64_t row, int64_t first, int64_t chunks, uint8_t* tiles) {
        const int64_t rows = n - row < kTileRows ? n - row : kTileRows;
        for (int64_t c = 0; c < chunks; ++c, tiles += kTile) {
            const int64_t col = 64 * (first + c);
            const __mmask64 columns = k - col < 64 ? (uint64_t(1) << (k - col)) - 1 : ~uint64_t(0);
            for (int64_t r = 0; r < rows; ++r) {
                _mm512_store_si512(tiles + 64 * r, _mm512_maskz_loadu_epi8(columns, w + (row + r) * k + col));
            }
            __builtin_memset(tiles + 64 * rows, 0, size_t(64 * (kTileRows - rows)));
        }
    };
    const auto finish = [&](int64_t n0, int64_t m0, const uint8_t* sums) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(sums + 64 * i);
        transpose16(r);
        alignas(64) float row[16];
        for (int i = 0; i < panel_size(e.y.rows, m0); ++i) {
            _mm512_store_ps(row, _mm512_cvtepi32_ps(r[i]));
            finish_fp32(e, m0 + i, n0, row);
        }
    };
    multiply_blocked<Int8>(packed, e.y.rows, k, begin, end, decode, finish);
}

// ---- bf16 activations, NVFP4 weights
// ----------------------------------------------------------------------------------------

// The 32 codes of two blocks as fp32 values times their scales.
inline void decode_two(const uint8_t* codes, float c0, float c1, __m512* v0, __m512* v1) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i high = _mm_srli_epi16(packed, 4);
    const __m512 table = _mm512_load_ps(kE2m1);
    const __m512i i0 = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(high, packed));
    const __m512i i1 = _mm512_cvtepu8_epi32(_mm_unpackhi_epi8(high, packed));
    *v0 = _mm512_mul_ps(_mm512_permutexvar_ps(i0, table), _mm512_set1_ps(c0));
    *v1 = _mm512_mul_ps(_mm512_permutexvar_ps(i1, table), _mm512_set1_ps(c1));
}

// Two vectors of fp32 that are exact in bf16, as 32 bf16.
inline __m512i upper_halves(__m512 v0, __m512 v1) {
    alignas(64) static constexpr uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                     23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                     45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(v0), _mm512_load_si512(odd),
                                     _mm512_castps_si512(v1));
}

// One row of NVFP4, read two blocks (one chunk) at a time; beyond the last row or block there are zeros.
struct CodeRow {
    const uint8_t* codes = nullptr;
    const uint8_t* scales = nullptr;
    int64_t blocks = 0;

    CodeRow() = default;
    CodeRow(const Nvfp4& w, int64_t row) {
        if (row >= w.rows) return;
        blocks = ceil_to(w.cols, 16) / 16;
        codes = w.codes + row * blocks * 8;
        scales = w.scales + scale_offset(row, 0, (blocks + 3) / 4);
    }

    uint8_t scale_code(int64_t block) const {
        return block < blocks ? scales[(block >> 2) * 512 + (block & 3)] : 0;
    }

    void decode(int64_t chunk, __m512* v0, __m512* v1) const {
        const float c0 = kE4m3.value[scale_code(2 * chunk)], c1 = kE4m3.value[scale_code(2 * chunk + 1)];
        if (2 * chunk + 2 <= blocks) return decode_two(codes + 16 * chunk, c0, c1, v0, v1);
        uint8_t last[16] = {};
        if (2 * chunk < blocks) __builtin_memcpy(last, codes + 16 * chunk, 8);
        decode_two(last, c0, c1, v0, v1);
    }
};

inline __m512 round_to_e4m3(__m512 x) {
    const vi magnitude = min(bits(x) & kMagnitude, splat(bits_of(448.0f)));
    const Grid g = to_grid(magnitude, 3, -6);
    const vf rounded = floats(bits(floats(g.sum) - g.magic) | (bits(x) & ~kMagnitude));
    return (bits(x) & kMagnitude) > kExponent ? x : rounded;
}

// The least power of two p with max|w| / p <= 448 over a row, block scales included; 1 for a row of zeros.
inline float power_of_row(const CodeRow& row) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t chunk = 0; 2 * chunk < row.blocks; ++chunk) {
        __m512 v0, v1;
        row.decode(chunk, &v0, &v1);
        most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(v0), _mm512_abs_ps(v1)));
    }
    const float ratio = _mm512_reduce_max_ps(most) / 448.0f;
    if (ratio == 0.0f) return 1.0f;
    const int32_t exponent = bits_of(ratio) & kExponent;
    return float_of(exponent + ((bits_of(ratio) & 0x7fffff) ? 1 << 23 : 0));
}

int64_t w4_packed_bytes(int64_t m, int64_t k) {
    return tiles_of(m) * ((k + 31) / 32) * kTile;
}

void w4_pack(const Matrix& x, int group, bool fp8, float scale, uint8_t* packed, int64_t begin, int64_t end) {
    const int64_t chunks = (x.cols + 31) / 32;
    alignas(64) float v[kChunk];
    alignas(64) uint16_t rows[kTileRows * kChunk];
    for (int64_t row = begin; row < end; row += kTileRows) {
        const int64_t n = x.rows - row < kTileRows ? x.rows - row : kTileRows;
        for (int64_t col = 0; col < x.cols; col += kChunk) {
            for (int64_t i = 0; i < kTileRows; ++i) {
                if (i >= n) {
                    __builtin_memset(rows + i * kChunk, 0, 2 * kChunk);
                    continue;
                }
                load_chunk(x, row + i, col, group, v);
                for (int j = 0; fp8 && j < kChunk; j += 16) {
                    const vf y = load(v + j);
                    store(v + j, y == 0.0f ? y : (vf)round_to_e4m3(y / scale));
                }
                store_values(v, Dtype::bf16, i * kChunk, kChunk, rows);
            }
            for (int64_t c = 0; c < 8 && col / 32 + c < chunks; ++c) {
                uint8_t* tile = packed + (row / kTileRows * chunks + col / 32 + c) * kTile;
                pack_right(reinterpret_cast<const uint8_t*>(rows) + 64 * c, 2 * kChunk, tile);
            }
        }
    }
}

void w4_multiply(const uint8_t* packed, const Nvfp4& w, bool fp8, const Epilogue& e, int64_t begin,
                 int64_t end) {
    Scratch<float> powers(ceil_to(end, kTileRows));  // of each row of this part, for fp8
    for (int64_t r = begin; r < ceil_to(end, kTileRows); ++r)
        powers.data[r] = fp8 ? power_of_row(CodeRow(w, r)) : 1.0f;
    const auto decode = [&](int64_t row, int64_t first, int64_t chunks, uint8_t* tiles) {
        for (int r = 0; r < kTileRows; ++r) {
            const CodeRow codes(w, row + r);
            const float inverse = 1.0f / powers.data[row + r];
            for (int64_t c = 0; c < chunks; ++c) {
                __m512 v0, v1;
                codes.decode(first + c, &v0, &v1);
                if (fp8) {
                    v0 = round_to_e4m3(v0 * inverse);
                    v1 = round_to_e4m3(v1 * inverse);
                }
                _mm512_store_si512(tiles + c * kTile + 64 * r, upper_halves(v0, v1));
            }
        }
    };
    Epilogue scaled = e;
    if (fp8) scaled.w_scale = powers.data;
    const auto finish = [&](int64_t n0, int64_t m0, const uint8_t* sums) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(sums + 64 * i);
        transpose16(r);
        alignas(64) float row[16];
        for (int i = 0; i < panel_size(e.y.rows, m0); ++i) {
            _mm512_store_si512(row, r[i]);
            finish_fp32(scaled, m0 + i, n0, row);
        }
    };
    multiply_blocked<Bf16>(packed, e.y.rows, w.cols, begin, end, decode, finish);
}

// ---- NVFP4 both sides, exact
// ------------------------------------------------------------------------------------------------
//
// The tile unit adds in fp32. That is exact over a range of K whenever no partial sum needs more than 24
// bits: all products are multiples of u_x u_w, with u the last bit of the smallest block scale of the range,
// and by Cauchy and Schwarz no partial sum exceeds |x| |w|, the norms over the range. So with q = |.| / u of
// a row, q_x q_w < 2^24 is enough. For each tile the largest q of its 16 rows is kept for ranges of 1, 2, 4
// and 8 chunks, and the longest range that passes is summed in one go; a single block always passes (its dot
// product is an integer below 2^19). Ranges are then added in fp64, exactly as long as the sums of a row fit
// 53 bits; where its scales range too widely for that, block by block in the order of the definition.

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

int64_t fp4_packed_bytes(int64_t m, int64_t k) {
    return Fp4Packed(m, k).bytes;
}

void fp4_pack(const Nvfp4& x, uint8_t* packed, int64_t begin, int64_t end) {
    const Fp4Packed layout(x.rows, x.cols);
    Scratch<uint8_t> left(layout.chunks * kTile);
    float* const norms = reinterpret_cast<float*>(packed + layout.norms_at);
    for (int64_t row = begin; row < end; row += kTileRows) {
        const int64_t t = row / kTileRows;
        packed[layout.ranges_at + t] = range_of_tile(x, row);
        decode_tiles(x, row, 0, layout.chunks, left.data, norms + t * norms_per_tile(layout.chunks),
                     ceil_to(layout.chunks, kRange));
        for (int64_t c = 0; c < layout.chunks; ++c)
            pack_right(left.data + c * kTile, 64, packed + (t * layout.chunks + c) * kTile);
    }
}

// Two left and two right tiles and the next chunks of each, `..._next` bytes apart.
struct TileSquare {
    const uint8_t* w;
    int64_t w_next;
    const uint8_t* x;
    int64_t x_next;
};

// Four 16x16 products over some chunks, each written to its own quarter of `out`.
inline void four_products(const TileSquare& s, int64_t chunk, int64_t chunks, uint8_t* out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const uint8_t *w = s.w + chunk * kTile, *x = s.x + chunk * kTile;
    for (int64_t c = 0; c < chunks; ++c, w += kTile, x += kTile) {
        _tile_loadd(4, w, 64);
        _tile_loadd(6, x, 64);
        _tile_loadd(7, x + s.x_next, 64);
        _tile_loadd(5, w + s.w_next, 64);
        Bf16::multiply();
    }
    _tile_stored(0, out, 64);
    _tile_stored(1, out + kTile, 64);
    _tile_stored(2, out + 2 * kTile, 64);
    _tile_stored(3, out + 3 * kTile, 64);
}

// The same for one block of a chunk: the left tiles with the other block's half set to zero.
inline void four_products_of_block(const TileSquare& s, int64_t chunk, int block, uint8_t* out) {
    alignas(64) uint8_t half[2 * kTile] = {};
    for (int i = 0; i < 2; ++i) {
        const uint8_t* w = s.w + chunk * kTile + i * s.w_next + 32 * block;
        for (int r = 0; r < kTileRows; ++r)
            __builtin_memcpy(half + i * kTile + 64 * r + 32 * block, w + 64 * r, 32);
    }
    settle_memory();
    four_products({half, kTile, s.x + chunk * kTile, s.x_next}, 0, 1, out);
}

// acc[16 x 16] += product
inline void accumulate(const uint8_t* product, double* acc) {
    for (int r = 0; r < kTileRows; ++r, acc += 16) {
        const float* const p = reinterpret_cast<const float*>(product) + 16 * r;
        _mm512_store_pd(acc, _mm512_add_pd(_mm512_load_pd(acc), _mm512_cvtps_pd(_mm256_load_ps(p))));
        _mm512_store_pd(acc + 8,
                        _mm512_add_pd(_mm512_load_pd(acc + 8), _mm512_cvtps_pd(_mm256_load_ps(p + 8))));
    }
}

struct Accumulators {
    double* quarter[4];

    void add(const uint8_t* products) const {
        settle_memory();
        for (int i = 0; i < 4; ++i) accumulate(products + i * kTile, quarter[i]);
    }
};

// Adds range `i` of a level: as a whole if `exact(level, i)` says so, else its halves one after the other.
template <class Exact>
void add_range(const TileSquare& s, int level, int64_t i, int64_t chunks, const Exact& exact,
               const Accumulators& acc) {
    alignas(64) uint8_t products[4 * kTile];
    const int64_t first = i << level, left = chunks - first;
    if (left <= 0) return;
    if (exact(level, i)) {
        four_products(s, first, left < (1 << level) ? left : 1 << level, products);
        acc.add(products);
    } else if (level > 0) {
        add_range(s, level - 1, 2 * i, chunks, exact, acc);
        add_range(s, level - 1, 2 * i + 1, chunks, exact, acc);
    } else {
        for (int block = 0; block < 2; ++block) {
            four_products_of_block(s, first, block, products);
            acc.add(products);
        }
    }
}

// sum * alpha + bias in fp64, one rounding; 16 rows of w, 16 of x.
inline void finish_tile(const Epilogue& e, int64_t n0, int64_t m0, const double* acc) {
    __m512i r[16];
    const bool narrow = e.y.dtype != Dtype::f32;
    const __m512d alpha = _mm512_set1_pd(e.alpha);
    for (int i = 0; i < 16; ++i) {
        __m512d y[2] = {_mm512_mul_pd(_mm512_load_pd(acc + 16 * i), alpha),
                        _mm512_mul_pd(_mm512_load_pd(acc + 16 * i + 8), alpha)};
        __m256i words[2];
        for (int h = 0; h < 2; ++h) {
            if (e.bias) y[h] = _mm512_add_pd(y[h], _mm512_set1_pd(e.bias[n0 + i]));
            const __m256 nearest = _mm512_cvtpd_ps(y[h]);  // to odd, as in round_to_odd
            const __m512d back = _mm512_cvtps_pd(nearest);
            const __mmask8 beyond = _mm512_cmp_pd_mask(_mm512_abs_pd(back), _mm512_abs_pd(y[h]), _CMP_GT_OQ);
            const __mmask8 inexact = _mm512_cmp_pd_mask(back, y[h], _CMP_NEQ_UQ);
            const __m256i one = _mm256_set1_epi32(1), b = _mm256_castps_si256(nearest);
            const __m256i toward_zero = _mm256_mask_sub_epi32(b, beyond, b, one);
            words[h] = narrow ? _mm256_mask_or_epi32(toward_zero, inexact, toward_zero, one) : b;
        }
        r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(words[0]), words[1], 1);
    }
    transpose16(r);
    alignas(64) float row[16];
    for (int i = 0; i < panel_size(e.y.rows, m0); ++i) {
        _mm512_store_si512(row, r[i]);
        store_row(e, m0 + i, n0, row);
    }
}

// One part of fp4_multiply: up to kRowsOfW rows of w by kExactRowsOfX of x.
struct ExactPart {
    static constexpr int64_t kRowsOfExactX = kRowsOfX / 2;  // accumulators are twice as large as fp32 sums
    static constexpr int64_t kAcc = kTileRows * kTileRows;

    const uint8_t* packed;
    const Nvfp4& w;
    const Fp4Packed layout;
    Scratch<uint8_t> left, ranges;
    Scratch<float> norms;  // of w: level l of row tile i at (i * kLevels + l) * kChunks
    Scratch<double> acc;

    ExactPart(const uint8_t* x, const Nvfp4& weight, int64_t m, int64_t n)
        : packed(x),
          w(weight),
          layout(m, weight.cols),
          left(most_w(n) * kChunks * kTile),
          ranges(most_w(n)),
          norms(most_w(n) * kLevels * kChunks),
          acc(most_w(n) * most_x(m) * kAcc) {}

    static int64_t most_w(int64_t n) { return ceil_to(tiles_of(n < kRowsOfW ? n : kRowsOfW), 2); }
    static int64_t most_x(int64_t m) { return ceil_to(tiles_of(m < kRowsOfExactX ? m : kRowsOfExactX), 2); }

    // acc += products of row tiles i, i + wn of w and xt, xt + xn of x over `chunks` chunks from c0 on.
    void multiply(int64_t i, int64_t wn, int64_t xt, int64_t xn, int64_t c0, int64_t chunks, double* a,
                  int64_t acc_row) {
        const uint8_t* const x_ranges = packed + layout.ranges_at;
        const int spare = 53 - kBlockBits - (64 - __builtin_clzll(uint64_t(2 * layout.chunks)));
        const bool wide =
            larger(x_ranges[xt], x_ranges[xt + xn]) + larger(ranges.data[i], ranges.data[i + wn]) > spare;
        const int64_t x_stride = ceil_to(layout.chunks, kRange), x_tile = xn * norms_per_tile(layout.chunks);
        const float* const x_norms =
            reinterpret_cast<const float*>(packed + layout.norms_at) + xt * norms_per_tile(layout.chunks);
        const float* const w_norms = norms.data + i * kLevels * kChunks;
        const auto exact = [&](int level, int64_t range) {
            const float* const x = x_norms + level * x_stride + (c0 >> level) + range;
            const float* const y = w_norms + level * kChunks + range;
            const int64_t w_tile = wn * kLevels * kChunks;
            return !wide && (x[0] > x[x_tile] ? x[0] : x[x_tile]) * (y[0] > y[w_tile] ? y[0] : y[w_tile]) <
                                kExactSquared;
        };
        const TileSquare square{left.data + i * chunks * kTile, wn * chunks * kTile,
                                packed + (xt * layout.chunks + c0) * kTile, xn * layout.chunks * kTile};
        add_range(square, kLevels - 1, 0, chunks, exact, {{a, a + kAcc, a + acc_row, a + acc_row + kAcc}});
    }

    void run(const Epilogue& e, int64_t n0, int64_t w_tiles, int64_t m0, int64_t x_tiles) {
        const int64_t acc_row = ceil_to(x_tiles, 2) * kAcc;
        __builtin_memset(acc.data, 0, size_t(ceil_to(w_tiles, 2) * acc_row) * sizeof *acc.data);
        for (int64_t c0 = 0; c0 < layout.chunks; c0 += kChunks) {
            const int64_t c = layout.chunks - c0 < kChunks ? layout.chunks - c0 : kChunks;
            for (int64_t i = 0; i < w_tiles; ++i) {
                decode_tiles(w, n0 + i * kTileRows, c0, c, left.data + i * c * kTile,
                             norms.data + i * kLevels * kChunks, kChunks);
            }
            settle_memory();
            for (int64_t j = 0; j < x_tiles; j += 2) {
                for (int64_t i = 0; i < w_tiles; i += 2) {
                    multiply(i, i + 1 < w_tiles ? 1 : 0, m0 / kTileRows + j, j + 1 < x_tiles ? 1 : 0, c0, c,
                             acc.data + i * acc_row + j * kAcc, acc_row);
                }
            }
        }
        for (int64_t i = 0; i < w_tiles; ++i) {
            for (int64_t j = 0; j < x_tiles; ++j) {
                finish_tile(e, n0 + i * kTileRows, m0 + j * kTileRows, acc.data + i * acc_row + j * kAcc);
            }
        }
    }
};

void fp4_multiply(const uint8_t* packed, const Nvfp4& w, const Epilogue& e, int64_t begin, int64_t end) {
    const int64_t m = e.y.rows;
    if (m == 0 || begin == end) return;
    ExactPart part(packed, w, m, end - begin);
    const Tiles tiles;
    for (int64_t n0 = begin; n0 < end; n0 += kRowsOfW) {
        const int64_t w_tiles = tiles_of(end - n0 < kRowsOfW ? end - n0 : kRowsOfW);
        for (int64_t i = 0; i < w_tiles; ++i) part.ranges.data[i] = range_of_tile(w, n0 + i * kTileRows);
        for (int64_t m0 = 0; m0 < m; m0 += ExactPart::kRowsOfExactX) {
            const int64_t rows = m - m0 < ExactPart::kRowsOfExactX ? m - m0 : ExactPart::kRowsOfExactX;
            part.run(e, n0, w_tiles, m0, tiles_of(rows));
        }
    }
}
