// INT8 with a scale a row: see formats/int8.py.

// int8 codes of a chunk; u is null for rounding to nearest even.
inline void encode_int8(const float* v, float scale, const float* u, int8_t* out) {
    alignas(64) int32_t codes[kChunk];
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int i = 0; i < kChunk; i += kLanes) {
        const vf y = load(v + i) / scale;
        const vi sign = bits(y) & ~kMagnitude;
        const vi raw = bits(y) & kMagnitude;  // a NaN (from a NaN or infinite scale) becomes 0
        const vf magnitude = floats(raw > kExponent ? splat(0) : min(raw, splat(bits_of(128.0f))));
        vf rounded;
        if (u) {
            const vi low = __builtin_convertvector(magnitude, vi);
            const vf floor = __builtin_convertvector(low, vf);
            rounded = load(u + i) < magnitude - floor ? floor + 1.0f : floor;
        } else {
            rounded = (magnitude + magic) - magic;
        }
        rounded = floats(min(bits(rounded), splat(bits_of(127.0f))) | sign);
        store(codes + i, __builtin_convertvector(rounded, vi));
    }
    for (int i = 0; i < kChunk; ++i) out[i] = int8_t(codes[i]);
}

// `amax` is the largest magnitude of the (rotated) row.
inline float int8_scale(const Int8Job& job, int64_t row, float amax) {
    if (job.keep_scales) return amax / job.scale[row] > 127.5f ? amax / 127.0f : job.scale[row];
    return (amax < 1e-6f ? 1e-6f : amax) / 127.0f;
}

// Rounds one chunk of rotated values.
inline void quantize_int8_chunk(const Int8Job& job, int64_t row, int64_t col, float scale, const float* v) {
    alignas(64) float u[kChunk];
    int8_t q[kChunk];
    const int64_t n = chunk_size(job.w.cols, col);
    if (job.stochastic) uniform(job.seed, uint64_t(row * job.w.cols + col), int(n), u);
    if (job.stochastic) __builtin_memset(u + n, 0, size_t(kChunk - n) * 4);
    encode_int8(v, scale, job.stochastic ? u : nullptr, q);
    __builtin_memcpy(job.q + row * job.w.cols + col, q, size_t(n));
}

void quantize_int8(const Int8Job& job, int64_t begin, int64_t end) {
    alignas(64) float v[kChunk];
    for (int64_t row = begin; row < end; ++row) {
        float scale = *job.scale;
        if (!job.scalar_scale) {
            scale = int8_scale(job, row, float_of(row_amax(job.w, row, job.group)));
            job.scale[row] = scale;
        }
        for (int64_t col = 0; col < job.w.cols; col += kChunk) {
            load_chunk(job.w, row, col, job.group, v);
            quantize_int8_chunk(job, row, col, scale, v);
        }
    }
}

// The n values of a row's codes.
inline void decode_int8(const int8_t* q, float scale, int64_t n, float* v) {
    for (int64_t i = 0; i < n; ++i) v[i] = float(q[i]) * scale;
}

void dequantize_int8(const int8_t* q, const float* scale, bool scalar, int group, const MutableMatrix& y,
                     int64_t begin, int64_t end) {
    alignas(64) float v[kChunk];
    for (int64_t row = begin; row < end; ++row) {
        const float s = scale[scalar ? 0 : row];
        for (int64_t col = 0; col < y.cols; col += kChunk) {
            decode_int8(q + row * y.cols + col, s, chunk_size(y.cols, col), v);
            rotate_chunk(v, group);
            store_chunk(y, row, col, v);
        }
    }
}
