// FP4 and INT8 products without dot-product instructions: integers of 16 or 32 bits that any compiler can vectorise.
//
// FP4 is exact: twice an E2M1 value is an integer up to 12, so a block's dot product is an integer up to 2304; times the two
// block scales (4 significant bits each) it is exact in fp64, and blocks are added in fp64 in order of K.

constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Fp4Layout {
    int64_t k, blocks, row_bytes;  // packed x: k int8 values, then a float for each block (block scale / 4)
    explicit Fp4Layout(int64_t cols) : k(ceil_to(cols, 16)), blocks(k / kBlock), row_bytes(ceil_to(k + 4 * blocks, 64)) {}
};

int64_t fp4_packed_bytes(int64_t m, int64_t k) {
    return m * Fp4Layout(k).row_bytes;
}

void fp4_pack(const Nvfp4& x, uint8_t* packed, int64_t begin, int64_t end) {
    const Fp4Layout l(x.cols);
    const int64_t tiles = (l.blocks + 3) / 4;
    for (int64_t row = begin; row < end; ++row) {
        int8_t* values = reinterpret_cast<int8_t*>(packed + row * l.row_bytes);
        float* scales = reinterpret_cast<float*>(values + l.k);
        const uint8_t* codes = x.codes + row * l.k / 2;
        for (int64_t i = 0; i < l.k / 2; ++i) {
            values[2 * i] = kTwiceE2m1[codes[i] >> 4];
            values[2 * i + 1] = kTwiceE2m1[codes[i] & 15];
        }
        for (int64_t b = 0; b < l.blocks; ++b) scales[b] = kE4m3.value[x.scales[scale_offset(row, b, tiles)]] * 0.25f;
    }
}

// Decodes up to 16 rows of w: values [k][16] and scales [blocks][16], zero beyond the last row.
inline void fp4_panel(const Nvfp4& w, const Fp4Layout& l, int64_t n, int16_t* values, float* scales) {
    const int64_t rows = panel_size(w.rows, n), tiles = (l.blocks + 3) / 4;
    __builtin_memset(values, 0, size_t(l.k) * kPanel * sizeof *values);
    __builtin_memset(scales, 0, size_t(l.blocks) * kPanel * sizeof *scales);
    for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* codes = w.codes + (n + r) * l.k / 2;
        for (int64_t i = 0; i < l.k / 2; ++i) {
            values[(2 * i) * kPanel + r] = kTwiceE2m1[codes[i] >> 4];
            values[(2 * i + 1) * kPanel + r] = kTwiceE2m1[codes[i] & 15];
        }
        for (int64_t b = 0; b < l.blocks; ++b) scales[b * kPanel + r] = kE4m3.value[w.scales[scale_offset(n + r, b, tiles)]];
    }
}

inline void add_block(const int8_t* x, float x_scale, const int16_t* w, const float* w_scales, double* sums) {
    int16_t dots[kPanel] = {};
    for (int k = 0; k < kBlock; ++k) {
        const int16_t a = x[k];
        for (int i = 0; i < kPanel; ++i) dots[i] = int16_t(dots[i] + a * w[k * kPanel + i]);
    }
    for (int i = 0; i < kPanel; ++i) sums[i] += double(dots[i]) * double(x_scale * w_scales[i]);
}

void fp4_multiply(const uint8_t* packed, const Nvfp4& w, const Epilogue& e, int64_t begin, int64_t end) {
    const Fp4Layout l(w.cols);
    Scratch<int16_t> values(l.k * kPanel);
    Scratch<float> scales(l.blocks * kPanel);
    for (int64_t n = begin; n < end; n += kPanel) {
        fp4_panel(w, l, n, values.data, scales.data);
        for (int64_t m = 0; m < e.y.rows; ++m) {
            const int8_t* x = reinterpret_cast<const int8_t*>(packed + m * l.row_bytes);
            const float* x_scales = reinterpret_cast<const float*>(x + l.k);
            double sums[kPanel] = {};
            for (int64_t b = 0; b < l.blocks; ++b) {
                add_block(x + b * kBlock, x_scales[b], values.data + b * kBlock * kPanel, scales.data + b * kPanel, sums);
            }
            finish_fp64(e, m, n, sums);
        }
    }
}

int64_t int8_packed_bytes(int64_t m, int64_t k) {
    return m * k;
}

void int8_pack(const int8_t* q, int64_t, int64_t k, uint8_t* packed, int64_t begin, int64_t end) {
    __builtin_memcpy(packed + begin * k, q + begin * k, size_t((end - begin) * k));
}

void int8_multiply(const uint8_t* packed, const int8_t* w, int64_t n, int64_t k, const Epilogue& e, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kPanel) {
        const int64_t rows = panel_size(n, first);
        for (int64_t m = 0; m < e.y.rows; ++m) {
            const int8_t* x = reinterpret_cast<const int8_t*>(packed + m * k);
            float sums[kPanel] = {};
            for (int64_t r = 0; r < rows; ++r) {
                const int8_t* row = w + (first + r) * k;
                int32_t sum = 0;
                for (int64_t i = 0; i < k; ++i) sum += int16_t(x[i]) * int16_t(row[i]);
                sums[r] = float(sum);
            }
            finish_fp32(e, m, first, sums);
        }
    }
}
