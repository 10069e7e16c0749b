// ConvRot: radix-4 butterflies at strides 1, 4, 16, 64 in this order, the order of additions that
// formats/rotation.py defines.

template <class V>
inline void butterfly(V& a, V& b, V& c, V& d) {
    const V p = a + b, m = a - b, s = c + d, t = c - d;
    a = p + t;
    b = p - t;
    c = m + s;
    d = s - m;
}

template <int group>
constexpr float kRotationScale = group == 4    ? 0.5f
                                 : group == 16 ? 0.25f
                                 : group == 64 ? 0.125f
                                               : 0.0625f;

#if defined(__AVX512F__)
// Strides 1 and 4 inside one register. With `swapped` = (b, a, d, c): x + swapped = (p, p, s, s), x - swapped
// = (m, ., t, .), and spreading the second as (t, t, m, m) leaves one addition in even places and one
// subtraction in odd ones.
inline __m512 stride1(__m512 x) {
    const __m512 swapped = _mm512_permute_ps(x, 0xB1);
    const __m512 sum = _mm512_add_ps(x, swapped);
    const __m512 difference = _mm512_permute_ps(_mm512_sub_ps(x, swapped), 0x0A);
    return _mm512_mask_sub_ps(_mm512_add_ps(sum, difference), 0xAAAA, sum, difference);
}

inline __m512 stride4(__m512 x) {
    const __m512 swapped = _mm512_shuffle_f32x4(x, x, 0xB1);
    const __m512 sum = _mm512_add_ps(x, swapped);
    const __m512 raw = _mm512_sub_ps(x, swapped);
    const __m512 difference = _mm512_shuffle_f32x4(raw, raw, 0x0A);
    return _mm512_mask_sub_ps(_mm512_add_ps(sum, difference), 0xF0F0, sum, difference);
}

template <int group>
inline void rotate_group(float* v) {
    __m512 x[16];
    for (int i = 0; i < 16; ++i) {
        x[i] = stride1(_mm512_loadu_ps(v + 16 * i));
        if constexpr (group > 4) x[i] = stride4(x[i]);
    }
    if constexpr (group > 16) {
        for (int i = 0; i < 16; i += 4) butterfly(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
    if constexpr (group > 64) {
        for (int i = 0; i < 4; ++i) butterfly(x[i], x[i + 4], x[i + 8], x[i + 12]);
    }
    const __m512 scale = _mm512_set1_ps(kRotationScale<group>);
    for (int i = 0; i < 16; ++i) _mm512_storeu_ps(v + 16 * i, _mm512_mul_ps(x[i], scale));
}
#else
template <int stride>
inline void stage(float* v) {
    for (float* q = v; q < v + kChunk; q += 4 * stride) {
        if constexpr (stride >= kLanes) {
            for (int i = 0; i < stride; i += kLanes) {
                vf a = load(q + i), b = load(q + i + stride), c = load(q + i + 2 * stride),
                   d = load(q + i + 3 * stride);
                butterfly(a, b, c, d);
                store(q + i, a);
                store(q + i + stride, b);
                store(q + i + 2 * stride, c);
                store(q + i + 3 * stride, d);
            }
        } else {
            for (int i = 0; i < stride; ++i)
                butterfly(q[i], q[i + stride], q[i + 2 * stride], q[i + 3 * stride]);
        }
    }
}

template <int group>
inline void rotate_group(float* v) {
    stage<1>(v);
    if constexpr (group > 4) stage<4>(v);
    if constexpr (group > 16) stage<16>(v);
    if constexpr (group > 64) stage<64>(v);
    for (int i = 0; i < kChunk; i += kLanes) store(v + i, load(v + i) * kRotationScale<group>);
}
#endif

// Rotates a chunk of 256 values in place, in groups of 4, 16, 64 or 256; 0: not.
inline void rotate_chunk(float* v, int group) {
    switch (group) {
        case 4:
            return rotate_group<4>(v);
        case 16:
            return rotate_group<16>(v);
        case 64:
            return rotate_group<64>(v);
        case 256:
            return rotate_group<256>(v);
    }
}

inline int64_t chunk_size(int64_t cols, int64_t col) {
    return cols - col < kChunk ? cols - col : kChunk;
}

// Columns col .. col + 255 of a row in fp32, rotated, zeros beyond the matrix. (A group never crosses the
// end: it divides cols.)
inline void load_chunk(const Matrix& x, int64_t row, int64_t col, int group, float* v) {
    const int64_t n = chunk_size(x.cols, col);
    load_values(x.data, x.dtype, row * x.stride + col, n, v);
    if (n < kChunk) __builtin_memset(v + n, 0, size_t(kChunk - n) * 4);
    rotate_chunk(v, group);
}

inline void store_chunk(const MutableMatrix& y, int64_t row, int64_t col, const float* v) {
    store_values(v, y.dtype, row * y.stride + col, chunk_size(y.cols, col), y.data);
}

void rotate(const Matrix& x, int group, const MutableMatrix& y, int64_t begin, int64_t end) {
    alignas(64) float v[kChunk];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t col = 0; col < x.cols; col += kChunk) {
            load_chunk(x, row, col, group, v);
            store_chunk(y, row, col, v);
        }
    }
}

// The larger magnitudes, lane by lane, as bits.
inline vi larger_magnitudes(vi most, const float* v) {
    for (int i = 0; i < kChunk; i += kLanes) most = max(most, bits(load(v + i)) & kMagnitude);
    return most;
}

inline int32_t largest_lane(vi most) {
    int32_t lanes[kLanes], result = 0;
    store(lanes, most);
    for (int i = 0; i < kLanes; ++i) result = lanes[i] > result ? lanes[i] : result;
    return result;
}

// The bits of the largest magnitude of a row after rotation.
inline int32_t row_amax(const Matrix& x, int64_t row, int group) {
    alignas(64) float v[kChunk];
    vi most{};
    for (int64_t col = 0; col < x.cols; col += kChunk) {
        load_chunk(x, row, col, group, v);
        most = larger_magnitudes(most, v);
    }
    return largest_lane(most);
}

void amax_rows(const Matrix& x, int group, float* amax, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) amax[row] = float_of(row_amax(x, row, group));
}
