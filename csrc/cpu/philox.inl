// Philox4x32-10 (Salmon et al., SC'11), key = seed, counter = element index: see formats/philox.py.

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
