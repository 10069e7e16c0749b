// Philox4x32-10 (Salmon et al., SC'11), key = seed, counter = element index: see formats/philox.py.

#if defined(__AVX512F__)
// Counters are worked on eight at a time, a 64-bit lane each (the multiplication reads low halves only, so
// what xor leaves in high halves does no harm), and four times eight at once: a round is a chain of
// instructions that wait for one another. A shuffle moves high halves down, since a shift would wait for the
// multiplier.
inline __m512i high_half(__m512i product) {
    return _mm512_shuffle_epi32(product, _MM_PERM_DDBB);
}

inline __m512i xor3(__m512i a, __m512i b, __m512i c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}

inline __m512i all(uint32_t word) {
    return _mm512_set1_epi64(word);
}

// u[i] = (word 0 >> 8) * 2^-24 for the counters first, first + 1, ...; writes up to the next multiple of 32.
inline void uniform(uint64_t seed, uint64_t first, int count, float* u) {
    constexpr int kStreams = 4, kSteps = 8 * kStreams;
    const __m512i m0 = all(0xD2511F53), m1 = all(0xCD9E8D57), zero = _mm512_setzero_si512();
    const __m512i eight = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    for (int i = 0; i < count; i += kSteps) {
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        __m512i c0[kStreams], c1[kStreams], c2[kStreams], c3[kStreams];
        for (int s = 0; s < kStreams; ++s) {  // the first round, whose words 2 and 3 are 0
            const __m512i counter = _mm512_add_epi64(_mm512_set1_epi64(int64_t(first) + i + 8 * s), eight);
            const __m512i product = _mm512_mul_epu32(counter, m0);
            c0[s] = xor3(high_half(counter), zero, all(k0));
            c1[s] = zero;
            c2[s] = xor3(high_half(product), zero, all(k1));
            c3[s] = product;
        }
#pragma GCC unroll 8
        for (int round = 1; round < 9; ++round) {
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
            for (int s = 0; s < kStreams; ++s) {
                const __m512i p0 = _mm512_mul_epu32(c0[s], m0), p1 = _mm512_mul_epu32(c2[s], m1);
                c0[s] = xor3(high_half(p1), c1[s], all(k0));
                c2[s] = xor3(high_half(p0), c3[s], all(k1));
                c1[s] = p1;
                c3[s] = p0;
            }
        }
        for (int s = 0; s < kStreams; ++s) {  // the last one, of which word 0 alone is used
            const __m512i product = _mm512_mul_epu32(c2[s], m1);
            const __m512i word = xor3(high_half(product), c1[s], all(k0 + 0x9E3779B9u));
            const __m256i top = _mm256_srli_epi32(_mm512_cvtepi64_epi32(word), 8);
            _mm256_storeu_ps(u + i + 8 * s, _mm256_mul_ps(_mm256_cvtepi32_ps(top), _mm256_set1_ps(0x1p-24f)));
        }
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
