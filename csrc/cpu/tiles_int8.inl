// INT8 activations and weights by tiles.

// Tiles, then the sum of each row, an int32, for a unit whose left-hand values have an offset.
int64_t int8_packed_bytes(int64_t m, int64_t k) {
    return tiles_of(m) * ((k + 63) / 64 * kTile + kTileRows * 4);
}

inline int32_t* int8_row_sums(uint8_t* packed, int64_t m, int64_t k) {
    return reinterpret_cast<int32_t*>(packed + tiles_of(m) * ((k + 63) / 64) * kTile);
}

void int8_pack(const int8_t* q, int64_t m, int64_t k, uint8_t* packed, int64_t begin, int64_t end) {
    const int64_t chunks = (k + 63) / 64;
    alignas(64) uint8_t rows[kTile];
    for (int64_t row = begin; row < end; row += kTileRows) {
        const int64_t n = m - row < kTileRows ? m - row : kTileRows;
        __m512i sums = _mm512_setzero_si512();
        for (int64_t c = 0; c < chunks; ++c) {
            const int64_t bytes = k - 64 * c < 64 ? k - 64 * c : 64;
            __builtin_memset(rows, 0, sizeof rows);
            for (int64_t i = 0; i < n; ++i)
                __builtin_memcpy(rows + 64 * i, q + (row + i) * k + 64 * c, size_t(bytes));
            uint8_t* const tile = packed + (row / kTileRows * chunks + c) * kTile;
            pack_right(rows, 64, tile);
            for (int i = 0; i < 16; ++i)
                sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_load_si512(tile + 64 * i));
        }
        _mm512_store_si512(int8_row_sums(packed, m, k) + row, sums);
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
                const __m512i q = _mm512_maskz_loadu_epi8(columns, w + (row + r) * k + col);
                _mm512_store_si512(tiles + 64 * r, _mm512_add_epi8(q, _mm512_set1_epi8(char(Int8::kOffset))));
            }
            __builtin_memset(tiles + 64 * rows, 0, size_t(64 * (kTileRows - rows)));
        }
    };
    const int32_t* const row_sums = int8_row_sums(const_cast<uint8_t*>(packed), e.y.rows, k);
    const auto finish = [&](int64_t n0, int64_t m0, const uint8_t* sums) {
        const __m512i extra =
            _mm512_mullo_epi32(_mm512_load_si512(row_sums + m0), _mm512_set1_epi32(Int8::kOffset));
        __m512i r[16];
        for (int i = 0; i < 16; ++i) r[i] = _mm512_sub_epi32(_mm512_load_si512(sums + 64 * i), extra);
        transpose16(r);
        alignas(64) float row[16];
        for (int i = 0; i < panel_size(e.y.rows, m0); ++i) {
            _mm512_store_ps(row, _mm512_cvtepi32_ps(r[i]));
            finish_fp32(e, m0 + i, n0, row);
        }
    };
    multiply_blocked<Int8>(packed, e.y.rows, k, begin, end, decode, finish);
}
