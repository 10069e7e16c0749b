// NVFP4: choosing block scales, rounding to E2M1, packing, and back. The rules stand in formats/nvfp4.py and
// formats/block_scales.py; every operation here is theirs, in their order.

struct E4m3Table {
    float value[256];
    constexpr E4m3Table() : value() {
        for (int code = 0; code < 256; ++code) {
            const int exponent = (code >> 3) & 15, mantissa = code & 7;
            float v = exponent ? float(8 + mantissa) : float(mantissa);
            for (int e = exponent ? exponent : 1; e < 10; ++e) v *= 0.5f;
            for (int e = 10; e < exponent; ++e) v *= 2.0f;
            if ((code & 127) == 127) v = __builtin_nanf("");
            value[code] = code & 128 ? -v : v;
        }
    }
};

constexpr E4m3Table kE4m3{};
alignas(64) constexpr float kE2m1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                         -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
constexpr int kMaxScaleCode = 126, kNanScaleCode = 127, kSweepRadius = 7;

// Where the scale of row r, block c stands in 128x4 order.
inline int64_t scale_offset(int64_t r, int64_t c, int64_t tiles) {
    return ((r >> 7) * tiles + (c >> 2)) * 512 + (r & 31) * 16 + ((r & 127) >> 5) * 4 + (c & 3);
}

// ---- rounding
// ---------------------------------------------------------------------------------------------------------------

// A float format with m fraction bits and least exponent e is rounded to, ties to even, by adding the power
// of two whose last bit weighs as much as the format's at that magnitude; the low bits of the sum then count
// steps from zero.
struct Grid {
    vi sum;  // bits of |x| + magic
    vf magic;
    vi octave;  // exponent bits of |x|, at least the least exponent
};

inline Grid to_grid(vi magnitude, int fraction_bits, int least_exponent) {
    const vi octave = max(magnitude & kExponent, splat((127 + least_exponent) << 23));
    // Unsigned: the exponent of a NaN overflows here, and nobody looks at what becomes of it.
    const vf magic = floats(vi(vu(octave) + (uint32_t(23 - fraction_bits) << 23)));
    return {bits(floats(magnitude) + magic), magic, octave};
}

// E4M3 codes of r >= 0, at most 448 (NaN: 127).
inline vi e4m3_codes(vf r) {
    const vi magnitude = bits(r);
    const Grid g = to_grid(magnitude, 3, -6);
    const vi code = (g.sum & 31) + ((g.octave - ((127 - 6) << 23)) >> 20);
    return magnitude > kExponent ? splat(kNanScaleCode) : code;
}

inline vi saturated_magnitude(vf y) {
    return min(bits(y) & kMagnitude, splat(bits_of(6.0f)));
}

// E2M1 codes of y, nearest, sign kept.
inline vi e2m1_codes(vf y) {
    const Grid g = to_grid(saturated_magnitude(y), 1, 0);
    const vi magnitude = (g.sum & 7) + ((g.octave - (127 << 23)) >> 22);
    return magnitude | ((bits(y) >> 28) & 8);
}

// The same as values.
inline vf e2m1_values(vf y) {
    const Grid g = to_grid(saturated_magnitude(y), 1, 0);
    return floats(bits(floats(g.sum) - g.magic) | (bits(y) & ~kMagnitude));
}

// One of the two codes around y, the upper one where u is less than the fraction of the gap that y lies above
// the lower one.
inline vi e2m1_codes_stochastic(vf y, vf u) {
    const vi magnitude = saturated_magnitude(y);
    const vi below_one = magnitude < bits_of(1.0f);
    const vi half = magnitude >= bits_of(0.5f) ? splat(1) : splat(0);
    const vi code = below_one ? half : (magnitude >> 22) - (126 << 1);
    const vf lower = below_one ? __builtin_convertvector(half, vf) * 0.5f : floats((code + (126 << 1)) << 22);
    const vf per_gap = code < 4 ? splat(2.0f) : code < 6 ? splat(1.0f) : splat(0.5f);
    const vf fraction = (floats(magnitude) - lower) * per_gap;
    return (code + (u < fraction ? splat(1) : splat(0))) | ((bits(y) >> 28) & 8);
}

// ---- block scales
// -----------------------------------------------------------------------------------------------------------

// Step 2 of the definition for 16 blocks: plain codes; returns how many blocks the tensor scale clips.
inline int plain_scale_codes(const int32_t* amax, float s, float factor, int32_t* codes) {
    int clipped = 0;
    for (int i = 0; i < kBlocks; i += kLanes) {
        const vf b = floats(load(amax + i)) / 6.0f;
        vf r = b / s;
        if (factor != 1.0f) r = factor * r;
        r = b == 0.0f ? b : r;
        const vi over = r > 448.0f;
        store(codes + i, e4m3_codes(over ? splat(448.0f) : r));
        int32_t lanes[kLanes];
        store(lanes, over);
        for (int j = 0; j < kLanes; ++j) clipped -= lanes[j];
    }
    return clipped;
}

// The squared error of a block in units of s squared, for the scale c: see formats/block_scales.py.
inline vf squared_errors(vf x, vf scaled, float s, float c, const float* h) {
    const float t = s * c;
    const vf value = t > 0.0f ? e2m1_values(x / t) : vf{};
    const vf d = value * c - scaled;
    const vf e = d * d;
    return h ? load(h) * e : e;
}

#if defined(__AVX512F__)
// The candidate of least error; the first of equals, `plain` where no error is finite.
inline int32_t best_candidate(const float* x, float s, const float* h, int32_t plain,
                              const int32_t* candidates, int count) {
    const vf scaled = load(x) / s;
    __m512 errors[16];
    for (int i = 0; i < 16; ++i) {
        errors[i] = i < count ? squared_errors(load(x), scaled, s, kE4m3.value[candidates[i]], h)
                              : _mm512_set1_ps(__builtin_inff());
    }
    const __m512 infinity = _mm512_set1_ps(__builtin_inff());
    const __m512 sums = reduce16<Plus>(errors);
    const __mmask16 finite = _mm512_cmp_ps_mask(sums, infinity, _CMP_LT_OQ);
    const float least = _mm512_mask_reduce_min_ps(finite, sums);
    const __mmask16 at = _mm512_mask_cmp_ps_mask(finite, sums, _mm512_set1_ps(least), _CMP_EQ_OQ);
    return at ? candidates[__builtin_ctz(at)] : plain;
}
#else
inline float sum_by_halves(const float* e) {
    float s[8];
    for (int i = 0; i < 8; ++i) s[i] = e[i] + e[i + 8];
    for (int i = 0; i < 4; ++i) s[i] = s[i] + s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

inline int32_t best_candidate(const float* x, float s, const float* h, int32_t plain,
                              const int32_t* candidates, int count) {
    float least = __builtin_inff(), e[kBlock];
    int32_t best = plain;
    for (int i = 0; i < count; ++i) {
        for (int j = 0; j < kBlock; j += kLanes) {
            const vf v = load(x + j);
            store(e + j, squared_errors(v, v / s, s, kE4m3.value[candidates[i]], h ? h + j : nullptr));
        }
        const float error = sum_by_halves(e);
        if (error < least) {
            least = error;
            best = candidates[i];
        }
    }
    return best;
}
#endif

inline void sweep_codes(const float* v, float s, const float* h, int32_t* codes) {
    for (int i = 0; i < kBlocks; ++i) {
        if (codes[i] == kNanScaleCode) continue;
        int32_t candidates[2 * kSweepRadius + 1];
        for (int j = 0; j <= 2 * kSweepRadius; ++j) {
            const int32_t code = codes[i] - kSweepRadius + j;
            candidates[j] = code < 0 ? 0 : code > kMaxScaleCode ? kMaxScaleCode : code;
        }
        const float* importance = h ? h + kBlock * i : nullptr;
        codes[i] = best_candidate(v + kBlock * i, s, importance, codes[i], candidates, 2 * kSweepRadius + 1);
    }
}

inline void four_six_codes(const float* v, const int32_t* amax, float s, const float* h, int32_t* codes) {
    int32_t at_four[kBlocks];
    plain_scale_codes(amax, s, 1.5f, at_four);
    for (int i = 0; i < kBlocks; ++i) {
        if (codes[i] == kNanScaleCode) continue;
        const int32_t candidates[2] = {codes[i], at_four[i]};
        const float* importance = h ? h + kBlock * i : nullptr;
        codes[i] = best_candidate(v + kBlock * i, s, importance, codes[i], candidates, 2);
    }
}

// ---- codes
// ------------------------------------------------------------------------------------------------------------------

// Packs 16 codes into 8 bytes, the even column in the high nibble.
inline void pack(const int32_t* codes, uint8_t* out) {
#if defined(__AVX512F__)
    const __m512i c = _mm512_loadu_si512(codes);  // a pair is one 64-bit lane, the even column its low half
    const __m512i bytes = _mm512_or_si512(_mm512_slli_epi64(c, 4), _mm512_srli_epi64(c, 32));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_cvtepi64_epi8(bytes));
#else
    for (int i = 0; i < 8; ++i) out[i] = uint8_t(codes[2 * i] << 4 | codes[2 * i + 1]);
#endif
}

// Encodes 16 blocks with their scale codes; u is null for rounding to nearest.
inline void encode_chunk(const float* v, float s, const int32_t* scale_codes, const float* u, uint8_t* out) {
    for (int i = 0; i < kBlocks; ++i, v += kBlock, out += 8) {
        const float t = s * kE4m3.value[scale_codes[i]];
        if (!(t > 0.0f)) {
            __builtin_memset(out, 0, 8);
            continue;
        }
        alignas(64) int32_t codes[kBlock];
        for (int j = 0; j < kBlock; j += kLanes) {
            const vf y = load(v + j) / t;
            store(codes + j, u ? e2m1_codes_stochastic(y, load(u + kBlock * i + j)) : e2m1_codes(y));
        }
        pack(codes, out);
    }
}

// Rounds one chunk of rotated values; returns how many blocks the tensor scale clips.
inline int quantize_chunk(const QuantizeJob& job, int64_t row, int64_t col, const float* v) {
    alignas(64) float u[kChunk], h[kChunk];
    alignas(64) int32_t amax[kBlocks], codes[kBlocks];
    uint8_t packed[kChunk / 2];
    const int64_t cols = job.x.cols, padded = ceil_to(cols, 16), tiles = (padded / kBlock + 3) / 4;
    const int64_t n = chunk_size(cols, col), blocks = (n + kBlock - 1) / kBlock, first = col / kBlock;
    block_amax(v, amax);
    const int clipped = plain_scale_codes(amax, job.tensor_scale, 1.0f, codes);
    if (job.importance) {
        __builtin_memset(h, 0, sizeof h);
        __builtin_memcpy(h, job.importance + col, size_t(n) * 4);
    }
    const float* importance = job.importance ? h : nullptr;
    if (job.method == Method::sweep) sweep_codes(v, job.tensor_scale, importance, codes);
    if (job.method == Method::four_six) four_six_codes(v, amax, job.tensor_scale, importance, codes);
    for (int64_t i = 0; i < blocks; ++i) {
        const int64_t at = scale_offset(row, first + i, tiles);
        if (job.kept_scales && job.kept_scales[at] > codes[i]) codes[i] = job.kept_scales[at];
        job.scales[at] = uint8_t(codes[i]);
    }
    if (job.stochastic) uniform(job.seed, uint64_t(row * cols + col), int(n), u);
    if (job.stochastic) __builtin_memset(u + n, 0, size_t(kChunk - n) * 4);
    encode_chunk(v, job.tensor_scale, codes, job.stochastic ? u : nullptr, packed);
    __builtin_memcpy(job.codes + row * padded / 2 + col / 2, packed, size_t(blocks) * 8);
    return clipped;
}

int64_t quantize(const QuantizeJob& job, int64_t begin, int64_t end) {
    alignas(64) float v[kChunk];
    int64_t clipped = 0;
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t col = 0; col < job.x.cols; col += kChunk) {
            load_chunk(job.x, row, col, job.group, v);
            clipped += quantize_chunk(job, row, col, v);
        }
    }
    return clipped;
}

// The 16 values of one block's codes, times `factor`.
inline void decode_block(const uint8_t* codes, float factor, float* out) {
#if defined(__AVX512F__)
    const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m128i high = _mm_srli_epi16(packed, 4);  // permutexvar reads the low four bits of an index only
    const __m512i index = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(high, packed));
    _mm512_storeu_ps(
        out, _mm512_mul_ps(_mm512_permutexvar_ps(index, _mm512_load_ps(kE2m1)), _mm512_set1_ps(factor)));
#else
    for (int i = 0; i < 8; ++i) {
        out[2 * i] = kE2m1[codes[i] >> 4] * factor;
        out[2 * i + 1] = kE2m1[codes[i] & 15] * factor;
    }
#endif
}

// The stored values of columns col .. col + 255 of a row, up to the end of its last block.
inline void decode_chunk(const Nvfp4& w, float s, int64_t row, int64_t col, float* v) {
    const int64_t bytes = ceil_to(w.cols, 16) / 2, tiles = (ceil_to(w.cols, 16) / kBlock + 3) / 4;
    const int64_t blocks = (chunk_size(w.cols, col) + kBlock - 1) / kBlock;
    for (int64_t i = 0; i < blocks; ++i) {
        const float c = kE4m3.value[w.scales[scale_offset(row, col / kBlock + i, tiles)]];
        decode_block(w.codes + row * bytes + col / 2 + 8 * i, s * c, v + kBlock * i);
    }
}

void dequantize(const Nvfp4& w, float s, int group, const MutableMatrix& y, int64_t begin, int64_t end) {
    alignas(64) float v[kChunk];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t col = 0; col < w.cols; col += kChunk) {
            decode_chunk(w, s, row, col, v);
            rotate_chunk(v, group);
            store_chunk(y, row, col, v);
        }
    }
}
