// bf16 (or E4M3) activations on NVFP4 weights, by tiles.

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
