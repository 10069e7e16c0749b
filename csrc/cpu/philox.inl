// Philox4x32-10 (Salmon et al., SC'11), key = seed, counter = element index: see formats/philox.py.

#if defined(__AVX512F__)
// Eight counters, a 64-bit lane each: the multiplication reads low halves only, so what xor leaves in high
// halves does no harm. (A shuffle moves high halves down: unlike a shift it does not wait for the
// multiplier.)
inline __m512i high_half(__m512i product) {
    return _mm512_shuffle_epi32(product, _MM_PERM_DDBB);
}

inline __m512i xor3(__m512i a, __m512i b, uint32_t key) {
    return _mm512_ternarylogic_epi64(a, b, _mm512_set1_epi64(key), 0x96);
}

inline __m256 uniform8(uint64_t seed, __m512i counter) {
    const __m512i m0 = _mm512_set1_epi64(0xD2511F53), m1 = _mm512_set1_epi64(0xCD9E8D57);
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    // The first round, whose words 2 and 3 are 0.
    const __m512i first = _mm512_mul_epu32(counter, m0);
    __m512i c0 = xor3(_mm512_setzero_si512(), high_half(counter), k0), c1 = _mm512_setzero_si512();
    __m512i c2 = xor3(high_half(first), _mm512_setzero_si512(), k1), c3 = first;
    for (int round = 1; round < 9; ++round) {
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
        const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
        c0 = xor3(high_half(p1), c1, k0);
        c2 = xor3(high_half(p0), c3, k1);
        c1 = p1;
        c3 = p0;
    }
    // The last one, of which word 0 alone is used.
    c0 = xor3(high_half(_mm512_mul_epu32(c2, m1)), c1, k0 + 0x9E3779B9u);
    const __m256i word = _mm256_srli_epi32(_mm512_cvtepi64_epi32(c0), 8);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(word), _mm256_set1_ps(0x1p-24f));
}

// u[i] = (word 0 >> 8) * 2^-24 for the counters first, first + 1, ...; writes up to the next multiple of 8.
inline void uniform(uint64_t seed, uint64_t first, int count, float* u) {
    const __m512i steps = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    for (int i = 0; i < count; i += 8) {
        _mm256_storeu_ps(u + i,
                         uniform8(seed, _mm512_add_epi64(_mm512_set1_epi64(int64_t(first) + i), steps)));
    }
}
#else
// u[i] = (word 0 >> 8) * 2^-24 for the counters first, first + 1, ...
inline void uniform(uint64_t seed, uint64_t first, int count, float* u) {
    alignas(64) uint32_t c0[kChunk], c1[kChunk], c2[kChunk], c3[kChunk];
    for (int i = 0; i < count; ++i) {
        c0[i] = uint32_t(first + uint64_t(i));
        c1[i] = uint32_t((first + uint64_t(i)) >> 32);
        c2[i] = c3[i] = 0;
    }
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        for (int i = 0; i < count; ++i) {
            const uint64_t p0 = uint64_t(c0[i]) * 0xD2511F53u, p1 = uint64_t(c2[i]) * 0xCD9E8D57u;
            c0[i] = uint32_t(p1 >> 32) ^ c1[i] ^ k0;
            c2[i] = uint32_t(p0 >> 32) ^ c3[i] ^ k1;
            c1[i] = uint32_t(p1);
            c3[i] = uint32_t(p0);
        }
    }
    for (int i = 0; i < count; ++i) u[i] = float(int32_t(c0[i] >> 8)) * 0x1p-24f;
}
#endif
