// Philox4x32-10 (Salmon et al., SC'11), key = seed, counter = element index: see formats/philox.py.

// A word in the low half of each 64-bit lane. High halves may hold anything: a multiplication reads low
// halves only, so what the xors leave above does no harm.
typedef uint64_t vw __attribute__((vector_size(4 * kLanes)));

constexpr int kWords = kLanes / 2;

inline vw words(uint64_t word) {
    return word + vw{};
}

inline vw multiply(vw a, uint32_t b) {
#if defined(__AVX512F__)
    return (vw)_mm512_mul_epu32((__m512i)a, (__m512i)words(b));
#elif defined(__AVX2__)
    return (vw)_mm256_mul_epu32((__m256i)a, (__m256i)words(b));
#elif defined(__x86_64__)
    return (vw)_mm_mul_epu32((__m128i)a, (__m128i)words(b));
#else
    return (a & 0xFFFFFFFF) * words(b);
#endif
}

inline vw high_half(vw product) {
#if defined(__AVX512F__)
    return (vw)_mm512_shuffle_epi32((__m512i)product,
                                    _MM_PERM_DDBB);  // a shift would wait for the multiplier
#else
    return product >> 32;
#endif
}

// u[i] = (word 0 >> 8) * 2^-24 for the counters first, first + 1, ...; writes up to the next multiple of 32.
inline void uniform(uint64_t seed, uint64_t first, int count, float* u) {
    constexpr uint32_t kFirst = 0xD2511F53, kSecond = 0xCD9E8D57;
    // A round is a chain of instructions that wait for one another, so several chains run at once.
    constexpr int kChains = 4, kStep = kWords * kChains;
    vw each{};
    for (int i = 0; i < kWords; ++i) each[i] = uint64_t(i);
    for (int i = 0; i < count; i += kStep) {
        uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
        vw c0[kChains], c1[kChains], c2[kChains], c3[kChains];
        for (int s = 0; s < kChains; ++s) {  // the first round, whose words 2 and 3 are 0
            const vw counter = words(first + uint64_t(i + s * kWords)) + each;
            c3[s] = multiply(counter, kFirst);
            c0[s] = high_half(counter) ^ words(k0);
            c1[s] = vw{};
            c2[s] = high_half(c3[s]) ^ words(k1);
        }
#pragma GCC unroll 8
        for (int round = 1; round < 9; ++round) {
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
            for (int s = 0; s < kChains; ++s) {
                const vw p0 = multiply(c0[s], kFirst), p1 = multiply(c2[s], kSecond);
                c0[s] = high_half(p1) ^ c1[s] ^ words(k0);
                c2[s] = high_half(p0) ^ c3[s] ^ words(k1);
                c1[s] = p1;
                c3[s] = p0;
            }
        }
        alignas(64) uint64_t word[kStep];
        for (int s = 0; s < kChains; ++s) {  // the last one, of which word 0 alone is used
            const vw last = high_half(multiply(c2[s], kSecond)) ^ c1[s] ^ words(k0 + 0x9E3779B9u);
            __builtin_memcpy(word + s * kWords, &last, sizeof last);
        }
        for (int j = 0; j < kStep; ++j) u[i + j] = float(int32_t(uint32_t(word[j]) >> 8)) * 0x1p-24f;
    }
}
