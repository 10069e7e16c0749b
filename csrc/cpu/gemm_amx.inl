// Matrix products on AMX tiles: 16 rows of 64 bytes, of which the unit multiplies two and adds to a third of 16x16 sums.
//
// Operands lie in tiles of 1 KB, tile (row tile, chunk) at (row tile * chunks + chunk); a chunk is 64 bytes of a row: 32 columns in
// bf16, 64 in int8. w is the left operand as it is; x the right one, with rows and groups of 4 bytes of columns exchanged, which
// a 16x16 transposition does once. So sums come out as [row of w][row of x], and are transposed back at the end.

constexpr int kTile = 1024;
constexpr int kTileRows = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sets up the tiles of this thread and gives them back: their state is large, and the system saves it at every switch.
struct Tiles {
    Tiles() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The tile intrinsics are opaque to the compiler: it must neither keep their input in registers nor move it past them.
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

// ---- the inner product of 32 x 32 sums --------------------------------------------------------------------------------------

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

// sums[2 x 2 tiles] += w[2 tiles] x[2 tiles] over `chunks` chunks. A missing second tile repeats the first, at a distance of 0.
template <class Type>
inline void multiply_tiles(const uint8_t* w, int64_t w_next, const uint8_t* x, int64_t x_next, int64_t chunks, uint8_t* sums,
                           int64_t sums_next) {
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

// Y = w x^T for rows begin .. end of w, with `decode(row tile, chunk, chunks, tiles)` making left-hand tiles and
// `finish(first row of w, first row of x, sums)` storing 16x16 sums.
template <class Type, class Decode, class Finish>
inline void multiply_blocked(const uint8_t* packed, int64_t m, int64_t k, int64_t begin, int64_t end, const Decode& decode,
                             const Finish& finish) {
    const int64_t chunks = (k + Type::columns - 1) / Type::columns, x_row = chunks * kTile;
    const int64_t most_w = tiles_of(end - begin < kRowsOfW ? end - begin : kRowsOfW);
    const int64_t most_x = ceil_to(tiles_of(m < kRowsOfX ? m : kRowsOfX), 2);
    Scratch<uint8_t> left(most_w * kChunks * kTile), sums(ceil_to(most_w, 2) * most_x * kTile);
    const Tiles tiles;
    for (int64_t n0 = begin; n0 < end; n0 += kRowsOfW) {
        const int64_t w_tiles = tiles_of(end - n0 < kRowsOfW ? end - n0 : kRowsOfW);
        for (int64_t m0 = 0; m0 < m; m0 += kRowsOfX) {
            const int64_t x_tiles = tiles_of(m - m0 < kRowsOfX ? m - m0 : kRowsOfX), sums_row = ceil_to(x_tiles, 2) * kTile;
            __builtin_memset(sums.data, 0, size_t(ceil_to(w_tiles, 2) * sums_row));
            for (int64_t c0 = 0; c0 < chunks; c0 += kChunks) {
                const int64_t c = chunks - c0 < kChunks ? chunks - c0 : kChunks;
                for (int64_t i = 0; i < w_tiles; ++i) decode(n0 + i * kTileRows, c0, c, left.data + i * c * kTile);
                settle_memory();
                for (int64_t j = 0; j < x_tiles; j += 2) {
                    const uint8_t* x = packed + (m0 / kTileRows + j) * x_row + c0 * kTile;
                    for (int64_t i = 0; i < w_tiles; i += 2) {
                        multiply_tiles<Type>(left.data + i * c * kTile, i + 1 < w_tiles ? c * kTile : 0, x,
                                             j + 1 < x_tiles ? x_row : 0, c, sums.data + i * sums_row + j * kTile, sums_row);
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

// ---- int8 -------------------------------------------------------------------------------------------------------------------

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
            for (int64_t i = 0; i < n; ++i) __builtin_memcpy(rows + 64 * i, q + (row + i) * k + 64 * c, size_t(bytes));
            pack_right(rows, 64, packed + (row / kTileRows * chunks + c) * kTile);
        }
    }
}

void int8_multiply(const uint8_t* packed, const int8_t* w, int64_t n, int64_t k, const Epilogue& e, int64_t begin, int64_t end) {
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

// ---- bf16 activations, NVFP4 weights ----------------------------------------------------------------------------------------

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
    alignas(64) static constexpr uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(v0), _mm512_load_si512(odd), _mm512_castps_si512(v1));
}

// Rows of NVFP4, two blocks at a time; beyond the last row or block there are zeros.
struct CodeRows {
    const Nvfp4& w;
    int64_t blocks, tiles, bytes;
    explicit CodeRows(const Nvfp4& m) : w(m), blocks(ceil_to(m.cols, 16) / 16), tiles((blocks + 3) / 4), bytes(blocks * 8) {}

    uint8_t scale_code(int64_t row, int64_t block) const {
        return block < blocks && row < w.rows ? w.scales[scale_offset(row, block, tiles)] : 0;
    }

    void decode(int64_t row, int64_t chunk, __m512* v0, __m512* v1) const {
        const float c0 = kE4m3.value[scale_code(row, 2 * chunk)], c1 = kE4m3.value[scale_code(row, 2 * chunk + 1)];
        const uint8_t* codes = w.codes + row * bytes + 16 * chunk;
        if (2 * chunk + 2 <= blocks) return decode_two(codes, c0, c1, v0, v1);
        uint8_t last[16] = {};
        __builtin_memcpy(last, codes, 8);
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
inline float power_of_row(const CodeRows& rows, int64_t row) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t chunk = 0; 2 * chunk < rows.blocks; ++chunk) {
        __m512 v0, v1;
        rows.decode(row, chunk, &v0, &v1);
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

void w4_multiply(const uint8_t* packed, const Nvfp4& w, bool fp8, const Epilogue& e, int64_t begin, int64_t end) {
    const CodeRows rows(w);
    Scratch<float> powers(ceil_to(end, kTileRows));  // of each row of this part, for fp8
    for (int64_t r = begin; r < ceil_to(end, kTileRows); ++r) powers.data[r] = fp8 && r < end ? power_of_row(rows, r) : 1.0f;
    const auto decode = [&](int64_t row, int64_t first, int64_t chunks, uint8_t* tiles) {
        for (int r = 0; r < kTileRows; ++r) {
            for (int64_t c = 0; c < chunks; ++c) {
                __m512 v0 = _mm512_setzero_ps(), v1 = v0;
                if (row + r < w.rows) rows.decode(row + r, first + c, &v0, &v1);
                if (fp8 && row + r < w.rows) {
                    const float inverse = 1.0f / powers.data[row + r];
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

// ---- NVFP4 both sides, exact ------------------------------------------------------------------------------------------------
//
// A block's dot product is an integer below 2^19 in units of (last bit of both scales) / 4, so fp32 holds it exactly, and the
// tile unit computes it without rounding. Two neighbouring blocks, one chunk, still fit 24 bits if their scales' exponents
// differ by at most 4 (both sides together): then one product of tiles gives their exact sum; else each block gets its own.
// The sums go to fp64 accumulators. As long as all sums of a row fit 53 bits, fp64 adds them exactly in any order; where
// the scales of a row range too widely for that, every block is added by itself, in the order of the definition.

constexpr int kBlockBits = 19, kPairSpread = 4, kGroup = 4;

struct Fp4Packed {
    int64_t chunks, row_tiles, spreads_at, ranges_at, bytes;
    Fp4Packed(int64_t m, int64_t k) : chunks((k + 31) / 32), row_tiles(tiles_of(m)) {
        spreads_at = row_tiles * chunks * kTile;           // a byte for each tile
        ranges_at = spreads_at + row_tiles * chunks;       // a byte for each row tile
        bytes = ranges_at + row_tiles;
    }
};

inline int scale_exponent(uint8_t code) {
    const int exponent = (code & 127) >> 3;
    return exponent > 0 ? exponent : 1;
}

// How far the exponents of a chunk's two scales differ; a block with scale 0 adds nothing.
inline uint8_t chunk_spread(uint8_t a, uint8_t b) {
    if ((a & 127) == 0 || (b & 127) == 0) return 0;
    const int d = scale_exponent(a) - scale_exponent(b);
    return uint8_t(d < 0 ? -d : d);
}

inline uint8_t larger(uint8_t a, uint8_t b) {
    return a > b ? a : b;
}

// The widest range of scale exponents in one of 16 rows.
inline uint8_t range_of_tile(const CodeRows& rows, int64_t row) {
    uint8_t widest = 0;
    for (int64_t r = row; r < row + kTileRows && r < rows.w.rows; ++r) {
        int low = 15, high = 1;
        for (int64_t b = 0; b < rows.blocks; ++b) {
            const uint8_t code = rows.scale_code(r, b);
            if ((code & 127) == 0) continue;
            const int exponent = scale_exponent(code);
            low = exponent < low ? exponent : low;
            high = exponent > high ? exponent : high;
        }
        if (high > low) widest = larger(widest, uint8_t(high - low));
    }
    return widest;
}

// One left-hand tile; returns its spread.
inline uint8_t decode_tile(const CodeRows& rows, int64_t row, int64_t chunk, uint8_t* tile) {
    uint8_t spread = 0;
    for (int64_t r = 0; r < kTileRows; ++r) {
        __m512 v0 = _mm512_setzero_ps(), v1 = v0;
        if (row + r < rows.w.rows) {
            rows.decode(row + r, chunk, &v0, &v1);
            spread = larger(spread, chunk_spread(rows.scale_code(row + r, 2 * chunk), rows.scale_code(row + r, 2 * chunk + 1)));
        }
        _mm512_store_si512(tile + 64 * r, upper_halves(v0, v1));
    }
    return spread;
}

int64_t fp4_packed_bytes(int64_t m, int64_t k) {
    return Fp4Packed(m, k).bytes;
}

void fp4_pack(const Nvfp4& x, uint8_t* packed, int64_t begin, int64_t end) {
    const Fp4Packed layout(x.rows, x.cols);
    const CodeRows rows(x);
    alignas(64) uint8_t left[kTile];
    for (int64_t row = begin; row < end; row += kTileRows) {
        const int64_t t = row / kTileRows;
        packed[layout.ranges_at + t] = range_of_tile(rows, row);
        for (int64_t c = 0; c < layout.chunks; ++c) {
            packed[layout.spreads_at + t * layout.chunks + c] = decode_tile(rows, row, c, left);
            pack_right(left, 64, packed + (t * layout.chunks + c) * kTile);
        }
    }
}

// Four 16x16 products of two left and two right tiles, each written to its own quarter of `out`.
inline void four_products(const uint8_t* w, int64_t w_next, const uint8_t* x, int64_t x_next, uint8_t* out) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, w, 64);
    _tile_loadd(6, x, 64);
    _tile_loadd(7, x + x_next, 64);
    _tile_loadd(5, w + w_next, 64);
    Bf16::multiply();
    _tile_stored(0, out, 64);
    _tile_stored(1, out + kTile, 64);
    _tile_stored(2, out + 2 * kTile, 64);
    _tile_stored(3, out + 3 * kTile, 64);
}

// The same for one block of the chunk: the left tiles with the other block's half set to zero.
inline void four_products_of_block(int block, const uint8_t* w, int64_t w_next, const uint8_t* x, int64_t x_next, uint8_t* out) {
    alignas(64) uint8_t half[2 * kTile] = {};
    for (int i = 0; i < 2; ++i) {
        for (int r = 0; r < kTileRows; ++r) {
            __builtin_memcpy(half + i * kTile + 64 * r + 32 * block, w + i * w_next + 64 * r + 32 * block, 32);
        }
    }
    settle_memory();
    four_products(half, kTile, x, x_next, out);
}

// acc[16 x 16] += products[0], products[1], ... in this order; they lie 4 tiles apart.
inline void accumulate(const uint8_t* products, int count, double* acc) {
    for (int r = 0; r < kTileRows; ++r, acc += 16, products += 64) {
        __m512d low = _mm512_load_pd(acc), high = _mm512_load_pd(acc + 8);
        for (int i = 0; i < count; ++i) {
            const float* p = reinterpret_cast<const float*>(products + i * 4 * kTile);
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm256_load_ps(p)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm256_load_ps(p + 8)));
        }
        _mm512_store_pd(acc, low);
        _mm512_store_pd(acc + 8, high);
    }
}

// Adds the chunks of 2 x 2 tiles to four accumulators. `apart` says for a chunk whether its blocks must be added one by one.
template <class Apart>
inline void multiply_exact(const uint8_t* w, int64_t w_next, const uint8_t* x, int64_t x_next, int64_t chunks, const Apart& apart,
                           double* const* acc) {
    alignas(64) uint8_t products[2 * kGroup * 4 * kTile];
    for (int64_t first = 0; first < chunks; first += kGroup) {
        int count = 0;
        for (int64_t c = first; c < first + kGroup && c < chunks; ++c) {
            if (apart(c)) {
                four_products_of_block(0, w + c * kTile, w_next, x + c * kTile, x_next, products + 4 * kTile * count++);
                four_products_of_block(1, w + c * kTile, w_next, x + c * kTile, x_next, products + 4 * kTile * count++);
            } else {
                four_products(w + c * kTile, w_next, x + c * kTile, x_next, products + 4 * kTile * count++);
            }
        }
        settle_memory();
        for (int i = 0; i < 4; ++i) accumulate(products + i * kTile, count, acc[i]);
    }
}

// sum * alpha + bias in fp64, one rounding; 16 rows of w, 16 of x.
inline void finish_tile(const Epilogue& e, int64_t n0, int64_t m0, const double* acc) {
    __m512i r[16];
    const bool narrow = e.y.dtype != Dtype::f32;
    const __m512d alpha = _mm512_set1_pd(e.alpha);
    for (int i = 0; i < 16; ++i) {
        __m512d low = _mm512_mul_pd(_mm512_load_pd(acc + 16 * i), alpha), high = _mm512_mul_pd(_mm512_load_pd(acc + 16 * i + 8), alpha);
        if (e.bias) {
            const __m512d bias = _mm512_set1_pd(e.bias[n0 + i]);
            low = _mm512_add_pd(low, bias);
            high = _mm512_add_pd(high, bias);
        }
        const __m256 parts[2] = {_mm512_cvtpd_ps(low), _mm512_cvtpd_ps(high)};
        __m256i words[2];
        for (int h = 0; h < 2; ++h) {
            const __m512d exact = h ? high : low, back = _mm512_cvtps_pd(parts[h]);
            const __mmask8 beyond = _mm512_cmp_pd_mask(_mm512_abs_pd(back), _mm512_abs_pd(exact), _CMP_GT_OQ);
            const __mmask8 inexact = _mm512_cmp_pd_mask(back, exact, _CMP_NEQ_UQ);
            const __m256i one = _mm256_set1_epi32(1), b = _mm256_castps_si256(parts[h]);
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

void fp4_multiply(const uint8_t* packed, const Nvfp4& w, const Epilogue& e, int64_t begin, int64_t end) {
    constexpr int64_t kExactRowsOfX = kRowsOfX / 2;  // accumulators are twice as large as fp32 sums
    constexpr int64_t kAcc = kTileRows * kTileRows;
    const int64_t m = e.y.rows;
    const Fp4Packed layout(m, w.cols);
    const CodeRows rows(w);
    const uint8_t* const x_spreads = packed + layout.spreads_at;
    const uint8_t* const x_ranges = packed + layout.ranges_at;
    const int spare = 53 - kBlockBits - (64 - __builtin_clzll(uint64_t(rows.blocks)));
    const int64_t most_w = ceil_to(tiles_of(end - begin < kRowsOfW ? end - begin : kRowsOfW), 2);
    const int64_t most_x = ceil_to(tiles_of(m < kExactRowsOfX ? m : kExactRowsOfX), 2);
    Scratch<uint8_t> left(most_w * kChunks * kTile), spreads(most_w * kChunks), ranges(most_w);
    Scratch<double> acc(most_w * most_x * kAcc);
    const Tiles tiles;
    for (int64_t n0 = begin; n0 < end; n0 += kRowsOfW) {
        const int64_t w_tiles = tiles_of(end - n0 < kRowsOfW ? end - n0 : kRowsOfW);
        for (int64_t i = 0; i < w_tiles; ++i) ranges.data[i] = range_of_tile(rows, n0 + i * kTileRows);
        for (int64_t m0 = 0; m0 < m; m0 += kExactRowsOfX) {
            const int64_t x_tiles = tiles_of(m - m0 < kExactRowsOfX ? m - m0 : kExactRowsOfX), acc_row = ceil_to(x_tiles, 2) * kAcc;
            __builtin_memset(acc.data, 0, size_t(ceil_to(w_tiles, 2) * acc_row) * 8);
            for (int64_t c0 = 0; c0 < layout.chunks; c0 += kChunks) {
                const int64_t c = layout.chunks - c0 < kChunks ? layout.chunks - c0 : kChunks;
                for (int64_t i = 0; i < w_tiles * c; ++i) {
                    spreads.data[i] = decode_tile(rows, n0 + i / c * kTileRows, c0 + i % c, left.data + i * kTile);
                }
                settle_memory();
                for (int64_t j = 0; j < x_tiles; j += 2) {
                    const int64_t xt = m0 / kTileRows + j, xn = j + 1 < x_tiles ? 1 : 0;
                    for (int64_t i = 0; i < w_tiles; i += 2) {
                        const int64_t wn = i + 1 < w_tiles ? 1 : 0;
                        const bool wide = larger(x_ranges[xt], x_ranges[xt + xn]) + larger(ranges.data[i], ranges.data[i + wn]) > spare;
                        const uint8_t* const xs = x_spreads + xt * layout.chunks + c0;
                        const uint8_t* const ws = spreads.data + i * c;
                        const auto apart = [&](int64_t k) {
                            return wide || larger(xs[k], xs[k + xn * layout.chunks]) + larger(ws[k], ws[k + wn * c]) > kPairSpread;
                        };
                        double* const a = acc.data + i * acc_row + j * kAcc;
                        double* const parts[4] = {a, a + kAcc, a + acc_row, a + acc_row + kAcc};
                        multiply_exact(left.data + i * c * kTile, wn * c * kTile, packed + (xt * layout.chunks + c0) * kTile,
                                       xn * layout.chunks * kTile, c, apart, parts);
                    }
                }
            }
            for (int64_t i = 0; i < w_tiles; ++i) {
                for (int64_t j = 0; j < x_tiles; ++j) {
                    finish_tile(e, n0 + i * kTileRows, m0 + j * kTileRows, acc.data + i * acc_row + j * kAcc);
                }
            }
        }
    }
}
