// From sums to stored results, for 16 columns of Y at a time.

constexpr int kPanel = 16;  // rows of w, and of x, that are worked on together

inline int64_t panel_size(int64_t total, int64_t first) {
    return total - first < kPanel ? total - first : kPanel;
}

inline void store_row(const Epilogue& e, int64_t m, int64_t n, const float* values) {
    store_values(values, e.y.dtype, m * e.y.stride + n, panel_size(e.y.cols, n), e.y.data);
}

// fp32 that rounds to 16 bits as the fp64 value itself would: rounded to odd (Boldo and Melquiond, 2005).
inline float round_to_odd(double x) {
    const float nearest = float(x);
    const double back = nearest;
    int32_t b = bits_of(nearest);
    b -= __builtin_fabs(back) > __builtin_fabs(x) ? 1 : 0;
    b |= back != x ? 1 : 0;
    return float_of(b);
}

// sums[i] * alpha + bias in fp64, one rounding.
inline void finish_fp64(const Epilogue& e, int64_t m, int64_t n, const double* sums) {
    alignas(64) float out[kPanel];
    const double alpha = e.alpha;
    for (int i = 0; i < kPanel; ++i) {
        double y = sums[i] * alpha;
        if (e.bias) y = y + double(e.bias[n + i]);
        out[i] = e.y.dtype == Dtype::f32 ? float(y) : round_to_odd(y);
    }
    store_row(e, m, n, out);
}

// sums[i] * (x scale * w scale) + bias in fp32, one rounding each.
inline void finish_fp32(const Epilogue& e, int64_t m, int64_t n, const float* sums) {
    alignas(64) float out[kPanel];
    const float x_scale = e.x_scale ? e.x_scale[m] : e.alpha;
    for (int i = 0; i < kPanel; ++i) {
        const float scale = e.w_scale ? x_scale * e.w_scale[e.scalar_w_scale ? 0 : n + i] : x_scale;
        const float y = sums[i] * scale;
        out[i] = e.bias ? y + e.bias[n + i] : y;
    }
    store_row(e, m, n, out);
}
