// Vectors of as many fp32 lanes as the instruction set has, and how floats come in and go out. Compilers of
// GCC's family turn these vector types into SSE, AVX, AVX-512 or NEON, so everything that needs no shuffle is
// written once.
//
// Every kernels_*.cpp includes this into its own anonymous namespace: nothing here may become a symbol that
// the linker could merge with code for another instruction set. For the same reason no C++ library template
// is used in the .inl files.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));

constexpr int kBlock = 16;   // values that share a scale
constexpr int kChunk = 256;  // values that are worked on at a time: the largest rotation group
constexpr int kBlocks = kChunk / kBlock;

inline vf load(const float* p) {
    vf v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

inline vi load(const int32_t* p) {
    vi v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, vf v) {
    __builtin_memcpy(p, &v, sizeof v);
}

inline void store(int32_t* p, vi v) {
    __builtin_memcpy(p, &v, sizeof v);
}

inline vf splat(float x) {
    return x - vf{};  // x - 0 is x for every x, -0.0 included
}

inline vi splat(int32_t x) {
    return x + vi{};
}

inline vi bits(vf v) {
    return (vi)v;
}

inline vf floats(vi v) {
    return (vf)v;
}

inline vi max(vi a, vi b) {
    return a > b ? a : b;
}

inline vi min(vi a, vi b) {
    return a < b ? a : b;
}

inline int32_t bits_of(float x) {
    int32_t b;
    __builtin_memcpy(&b, &x, 4);
    return b;
}

inline float float_of(int32_t b) {
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
}

constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kExponent = 0x7f800000;

// ---- 16-bit floats
// ----------------------------------------------------------------------------------------------------------

inline float from_bf16(uint16_t h) {
    return float_of(int32_t(uint32_t(h) << 16));
}

inline uint16_t to_bf16(float x) {  // to nearest even
    const uint32_t b = uint32_t(bits_of(x));
    const uint32_t rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return uint16_t((b & kMagnitude) > uint32_t(kExponent) ? 0x7fc0 : rounded);
}

inline float from_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = uint32_t(h & 0x7fff) << 13;
    const uint32_t exponent = rest & 0x0f800000;
    if (exponent == 0x0f800000) return float_of(int32_t(sign | (rest + 0x70000000)));  // inf, NaN
    if (exponent == 0) {  // subnormal: 2^-14 + rest, minus 2^-14
        const float value = float_of(int32_t(rest + 0x38800000)) - float_of(0x38800000);
        return float_of(int32_t(sign) | bits_of(value));
    }
    return float_of(int32_t(sign | (rest + 0x38000000)));
}

inline uint16_t to_f16(float x) {  // to nearest even
    const uint32_t b = uint32_t(bits_of(x)), sign = (b >> 16) & 0x8000, a = b & kMagnitude;
    if (a >= 0x47800000) return uint16_t(sign | (a > uint32_t(kExponent) ? 0x7e00 : 0x7c00));
    if (a < 0x38800000) {  // subnormal: adding 0.5 makes the hardware round to multiples of 2^-24
        return uint16_t(sign | (uint32_t(bits_of(float_of(int32_t(a)) + 0.5f)) - 0x3f000000));
    }
    return uint16_t(sign | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));
}

// `count` values of a row as fp32.
inline void load_values(const void* data, Dtype dtype, int64_t offset, int64_t count, float* out) {
    if (dtype == Dtype::f32) {
        __builtin_memcpy(out, static_cast<const float*>(data) + offset, size_t(count) * 4);
        return;
    }
    const uint16_t* in = static_cast<const uint16_t*>(data) + offset;
    if (dtype == Dtype::bf16) {
        for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(in[i]);
        return;
    }
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
        _mm512_storeu_ps(out + i,
                         _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
    }
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
    }
#endif
    for (; i < count; ++i) out[i] = from_f16(in[i]);
}

// `count` fp32 values into a row, each rounded once.
inline void store_values(const float* in, Dtype dtype, int64_t offset, int64_t count, void* data) {
    if (dtype == Dtype::f32) {
        __builtin_memcpy(static_cast<float*>(data) + offset, in, size_t(count) * 4);
        return;
    }
    uint16_t* out = static_cast<uint16_t*>(data) + offset;
    if (dtype == Dtype::bf16) {
        for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(in[i]);
        return;
    }
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(in + i), 0));
    }
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
    }
#endif
    for (; i < count; ++i) out[i] = to_f16(in[i]);
}

// ---- sums and maxima inside blocks
// ------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
struct Plus {
    static __m512 of(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
};

struct IntMax {
    static __m512 of(__m512 a, __m512 b) {
        return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
    }
};

// Reduces sixteen vectors at once, each by halves (k with k + 8, then k + 4, k + 2, k + 1); lane i is the
// result of v[i].
template <class Op>
inline __m512 reduce16(const __m512* v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {
        const __m512 x = v[2 * i], y = v[2 * i + 1];
        a[i] = Op::of(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 x = a[2 * i], y = a[2 * i + 1];
        b[i] = Op::of(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512 x = b[2 * i], y = b[2 * i + 1];
        c[i] = Op::of(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
    }
    const __m512 d = Op::of(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(order, d);
}
#endif

// The bits of the largest magnitude of each of the 16 blocks: integers order like the magnitudes, and NaN is
// above them all.
inline void block_amax(const float* v, int32_t* amax) {
#if defined(__AVX512F__)
    __m512 a[kBlocks];
    for (int i = 0; i < kBlocks; ++i) a[i] = _mm512_abs_ps(_mm512_loadu_ps(v + kBlock * i));
    _mm512_storeu_ps(amax, reduce16<IntMax>(a));
#else
    for (int i = 0; i < kBlocks; ++i) {
        vi m = bits(load(v + kBlock * i)) & kMagnitude;
        for (int j = kLanes; j < kBlock; j += kLanes) m = max(m, bits(load(v + kBlock * i + j)) & kMagnitude);
        int32_t lanes[kLanes], most = 0;
        store(lanes, m);
        for (int j = 0; j < kLanes; ++j) most = lanes[j] > most ? lanes[j] : most;
        amax[i] = most;
    }
#endif
}

// Working memory of one call; freed when it goes out of scope.
template <class T>
struct Scratch {
    T* data;
    explicit Scratch(int64_t count) : data(static_cast<T*>(scratch_alloc(size_t(count) * sizeof(T)))) {}
    ~Scratch() { scratch_free(data); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
};
