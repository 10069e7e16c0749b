// NVFP4 on both sides, exact, by tiles: ranges of K summed in fp32 where that loses nothing, in fp64 over
// them.

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

// Four 16x16 products over one block of a chunk: the left tiles with the other block's half set to zero.
inline void four_products_of_block(const TileSquare& s, int block, uint8_t* out) {
    alignas(64) uint8_t half[2 * kTile] = {};
    for (int i = 0; i < 2; ++i) {
        const uint8_t* w = s.w + i * s.w_next + 32 * block;
        for (int r = 0; r < kTileRows; ++r)
            __builtin_memcpy(half + i * kTile + 64 * r + 32 * block, w + 64 * r, 32);
    }
    settle_memory();
    multiply_tiles<Bf16>({half, kTile, s.x, s.x_next}, 1, out, 2 * kTile, true);
}

constexpr int kProducts = 4 * kTile;  // the four products of a square

// acc[16 x 16] += the sum of `count` products, kProducts bytes apart.
template <int count>
inline void accumulate(const uint8_t* products, double* acc) {
    for (int half = 0; half < 2 * kTileRows; ++half, products += 32, acc += 8) {
        __m512d sum = _mm512_setzero_pd();
        for (int i = 0; i < count; ++i) {
            const float* const p = reinterpret_cast<const float*>(products + i * kProducts);
            const __m512d wide = _mm512_cvtps_pd(_mm256_load_ps(p));
            sum = i == 0 ? wide : _mm512_add_pd(sum, wide);
        }
        _mm512_store_pd(acc, _mm512_add_pd(_mm512_load_pd(acc), sum));
    }
}

struct Accumulators {
    double* quarter[4];

    template <int count>
    void add(const uint8_t* products) const {
        settle_memory();
        for (int i = 0; i < 4; ++i) accumulate<count>(products + i * kTile, quarter[i]);
    }
};

// Adds range `i` of a level: as a whole if `exact(level, i)` says so, else its halves one after the other
// (both in one pass over the accumulators where both are exact, so that the order makes no difference).
template <class Exact>
void add_range(const TileSquare& s, int level, int64_t i, int64_t chunks, const Exact& exact,
               const Accumulators& acc) {
    alignas(64) uint8_t products[2 * kProducts];
    const int64_t first = i << level, half = level > 0 ? 1 << (level - 1) : 0, left = chunks - first;
    if (left <= 0) return;
    const auto multiply = [&](int64_t skipped, int64_t most, uint8_t* out) {
        const int64_t at = (first + skipped) * kTile;
        multiply_tiles<Bf16>({s.w + at, s.w_next, s.x + at, s.x_next},
                             left - skipped < most ? left - skipped : most, out, 2 * kTile, true);
    };
    if (exact(level, i)) {
        multiply(0, 1 << level, products);
        acc.template add<1>(products);
    } else if (level > 0 && left > half && exact(level - 1, 2 * i) && exact(level - 1, 2 * i + 1)) {
        multiply(0, half, products);
        multiply(half, half, products + kProducts);
        acc.template add<2>(products);
    } else if (level > 0) {
        add_range(s, level - 1, 2 * i, chunks, exact, acc);
        add_range(s, level - 1, 2 * i + 1, chunks, exact, acc);
    } else {
        for (int block = 0; block < 2; ++block) {
            const int64_t at = first * kTile;
            four_products_of_block({s.w + at, s.w_next, s.x + at, s.x_next}, block, products);
            acc.template add<1>(products);
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

// Accumulators are twice as large as fp32 sums. w is halved for them and not x: then w is decoded once.
constexpr int64_t kRowsOfExactW = kRowsOfW / 2;

// One part of fp4_multiply: up to kRowsOfExactW rows of w by kRowsOfX of x.
struct ExactPart {
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

    static int64_t most_w(int64_t n) { return ceil_to(tiles_of(n < kRowsOfExactW ? n : kRowsOfExactW), 2); }
    static int64_t most_x(int64_t m) { return ceil_to(tiles_of(m < kRowsOfX ? m : kRowsOfX), 2); }

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
    for (int64_t n0 = begin; n0 < end; n0 += kRowsOfExactW) {
        const int64_t w_tiles = tiles_of(end - n0 < kRowsOfExactW ? end - n0 : kRowsOfExactW);
        for (int64_t i = 0; i < w_tiles; ++i) part.ranges.data[i] = range_of_tile(w, n0 + i * kTileRows);
        for (int64_t m0 = 0; m0 < m; m0 += kRowsOfX)
            part.run(e, n0, w_tiles, m0, tiles_of(m - m0 < kRowsOfX ? m - m0 : kRowsOfX));
    }
}
