// FP4 and INT8 products on vector units, by one instruction that every x86-64 has in some width: pairs of
// 16-bit integers are multiplied and the two products added into 32 bits (pmaddwd; with VNNI also onto the
// sum so far).
//
// FP4 is exact: twice an E2M1 value is an integer up to 12, so a block's dot product is an integer up to
// 2304; times the two block scales (4 significant bits each) it is exact in fp64, and blocks are added in
// fp64 in order of K.

typedef int16_t vs __attribute__((vector_size(4 * kLanes)));
typedef double vd __attribute__((vector_size(4 * kLanes)));
typedef int32_t half_vi __attribute__((vector_size(2 * kLanes)));

constexpr int kDotVectors = kPanel / kLanes;  // vectors of 32-bit sums that a panel's rows fill
constexpr int kSumVectors = 2 * kDotVectors;  // vectors of fp64 sums
constexpr int16_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// acc[i] + a[2 i] b[2 i] + a[2 i + 1] b[2 i + 1]
inline vi add_pairs(vi acc, vs a, vs b) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return acc + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    for (int i = 0; i < kLanes; ++i)
        acc[i] += int32_t(a[2 * i]) * b[2 * i] + int32_t(a[2 * i + 1]) * b[2 * i + 1];
    return acc;
#endif
}

inline vs load_pairs(const int16_t* p) {
    vs v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// The same pair in every lane.
inline vs splat_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return (vs)splat(pair);
}

inline vd load_doubles(const double* p) {
    vd v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// ---- FP4
// --------------------------------------------------------------------------------------------------------------------

struct Fp4Layout {
    int64_t k, blocks, row_bytes;  // a packed row of x: k int16 (twice the values), a double for each block
                                   // (block scale / 4)
    explicit Fp4Layout(int64_t cols)
        : k(ceil_to(cols, 16)), blocks(k / kBlock), row_bytes(2 * k + 8 * blocks) {}
};

int64_t fp4_packed_bytes(int64_t m, int64_t k) {
    return m * Fp4Layout(k).row_bytes;
}

void fp4_pack(const Nvfp4& x, uint8_t* packed, int64_t begin, int64_t end) {
    const Fp4Layout l(x.cols);
    const int64_t tiles = (l.blocks + 3) / 4;
    for (int64_t row = begin; row < end; ++row) {
        int16_t* values = reinterpret_cast<int16_t*>(packed + row * l.row_bytes);
        double* scales = reinterpret_cast<double*>(values + l.k);
        const uint8_t* codes = x.codes + row * l.k / 2;
        for (int64_t i = 0; i < l.k / 2; ++i) {
            values[2 * i] = kTwiceE2m1[codes[i] >> 4];
            values[2 * i + 1] = kTwiceE2m1[codes[i] & 15];
        }
        for (int64_t b = 0; b < l.blocks; ++b)
            scales[b] = kE4m3.value[x.scales[scale_offset(row, b, tiles)]] * 0.25;
    }
}

// Decodes up to 16 rows of w: pairs of values [k / 2][16][2] and scales [blocks][16], zero beyond the last
// row.
inline void fp4_panel(const Nvfp4& w, const Fp4Layout& l, int64_t n, int16_t* values, double* scales) {
    const int64_t tiles = (l.blocks + 3) / 4;
    for (int64_t r = 0; r < kPanel; ++r) {
        const bool there = n + r < w.rows;
        const uint8_t* codes = w.codes + (n + r) * l.k / 2;
        for (int64_t i = 0; i < l.k / 2; ++i) {
            const uint8_t pair = there ? codes[i] : 0;
            values[(i * kPanel + r) * 2] = kTwiceE2m1[pair >> 4];
            values[(i * kPanel + r) * 2 + 1] = kTwiceE2m1[pair & 15];
        }
        for (int64_t b = 0; b < l.blocks; ++b) {
            scales[b * kPanel + r] = there ? kE4m3.value[w.scales[scale_offset(n + r, b, tiles)]] : 0.0f;
        }
    }
}

// `rows` rows of x times a panel.
template <int rows>
inline void fp4_rows(const uint8_t* x, const Fp4Layout& l, const int16_t* w, const double* w_scales,
                     double* out) {
    vd sums[rows][kSumVectors] = {};
    for (int64_t b = 0; b < l.blocks; ++b, w += kBlock * kPanel, w_scales += kPanel) {
        vi dots[rows][kDotVectors] = {};
        for (int k = 0; k < kBlock / 2; ++k) {
            for (int v = 0; v < kDotVectors; ++v) {
                const vs pairs = load_pairs(w + (k * kPanel + v * kLanes) * 2);
                for (int r = 0; r < rows; ++r) {
                    const int16_t* values = reinterpret_cast<const int16_t*>(x + r * l.row_bytes);
                    dots[r][v] = add_pairs(dots[r][v], splat_pair(values + b * kBlock + 2 * k), pairs);
                }
            }
        }
        for (int r = 0; r < rows; ++r) {
            const double x_scale = reinterpret_cast<const double*>(x + r * l.row_bytes + 2 * l.k)[b];
            for (int v = 0; v < kSumVectors; ++v) {
                half_vi dot;
                __builtin_memcpy(&dot, reinterpret_cast<const char*>(dots[r]) + v * sizeof dot, sizeof dot);
                sums[r][v] +=
                    __builtin_convertvector(dot, vd) * (load_doubles(w_scales + v * kLanes / 2) * x_scale);
            }
        }
    }
    __builtin_memcpy(out, sums, sizeof sums);
}

void fp4_multiply(const uint8_t* packed, const Nvfp4& w, const Epilogue& e, int64_t begin, int64_t end) {
    constexpr int kRows = kLanes == 16 ? 4 : 2;  // as many as the registers hold
    const Fp4Layout l(w.cols);
    Scratch<int16_t> values(l.k * kPanel);
    Scratch<double> scales(l.blocks * kPanel);
    double sums[kRows * kPanel];
    for (int64_t n = begin; n < end; n += kPanel) {
        fp4_panel(w, l, n, values.data, scales.data);
        int64_t m = 0;
        for (; m + kRows <= e.y.rows; m += kRows) {
            fp4_rows<kRows>(packed + m * l.row_bytes, l, values.data, scales.data, sums);
            for (int r = 0; r < kRows; ++r) finish_fp64(e, m + r, n, sums + r * kPanel);
        }
        for (; m < e.y.rows; ++m) {
            fp4_rows<1>(packed + m * l.row_bytes, l, values.data, scales.data, sums);
            finish_fp64(e, m, n, sums);
        }
    }
}

// ---- INT8
// -------------------------------------------------------------------------------------------------------------------

constexpr int64_t kPairsWidth = 2 * kLanes;  // 16-bit values in a vector: rows are padded to a multiple of it

inline void widen(const int8_t* q, int64_t k, int16_t* out) {
    for (int64_t i = 0; i < k; ++i) out[i] = q[i];
    for (int64_t i = k; i < ceil_to(k, kPairsWidth); ++i) out[i] = 0;
}

int64_t int8_packed_bytes(int64_t m, int64_t k) {
    return m * ceil_to(k, kPairsWidth) * 2;
}

void int8_pack(const int8_t* q, int64_t, int64_t k, uint8_t* packed, int64_t begin, int64_t end) {
    int16_t* const out = reinterpret_cast<int16_t*>(packed);
    for (int64_t row = begin; row < end; ++row) widen(q + row * k, k, out + row * ceil_to(k, kPairsWidth));
}

// 2 rows of x times 4 of w; the second of x may be the first again.
inline void int8_square(const int16_t* x0, const int16_t* x1, const int16_t* w, int64_t stride, float* out0,
                        float* out1) {
    vi sums[2][4] = {};
    for (int64_t k = 0; k < stride; k += kPairsWidth) {
        const vs a = load_pairs(x0 + k), b = load_pairs(x1 + k);
        for (int r = 0; r < 4; ++r) {
            const vs pairs = load_pairs(w + r * stride + k);
            sums[0][r] = add_pairs(sums[0][r], a, pairs);
            sums[1][r] = add_pairs(sums[1][r], b, pairs);
        }
    }
    for (int r = 0; r < 4; ++r) {
        int32_t total[2] = {};
        for (int i = 0; i < kLanes; ++i) {
            total[0] += sums[0][r][i];
            total[1] += sums[1][r][i];
        }
        out0[r] = float(total[0]);
        out1[r] = float(total[1]);
    }
}

void int8_multiply(const uint8_t* packed, const int8_t* w, int64_t n, int64_t k, const Epilogue& e,
                   int64_t begin, int64_t end) {
    const int64_t stride = ceil_to(k, kPairsWidth);
    const int16_t* const x = reinterpret_cast<const int16_t*>(packed);
    Scratch<int16_t> panel(kPanel * stride);
    float sums[2][kPanel];
    for (int64_t first = begin; first < end; first += kPanel) {
        __builtin_memset(panel.data, 0, size_t(kPanel * stride) * sizeof *panel.data);
        for (int64_t r = 0; r < panel_size(n, first); ++r)
            widen(w + (first + r) * k, k, panel.data + r * stride);
        for (int64_t m = 0; m < e.y.rows; m += 2) {
            const int64_t second = m + 1 < e.y.rows ? m + 1 : m;
            for (int r = 0; r < kPanel; r += 4) {
                int8_square(x + m * stride, x + second * stride, panel.data + r * stride, stride, sums[0] + r,
                            sums[1] + r);
            }
            finish_fp32(e, m, first, sums[0]);
            if (second != m) finish_fp32(e, second, first, sums[1]);
        }
    }
}
