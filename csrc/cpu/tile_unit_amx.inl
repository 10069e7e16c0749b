// The AMX tile unit.

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Sets up the tiles of this thread and gives them back: their state is large, and the system saves it at
// every switch.
struct Tiles {
    Tiles() {
        const TileConfig config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// The tile intrinsics are opaque to the compiler: it must neither keep their input in registers nor move it
// past them.
inline void settle_memory() {
    __asm__ volatile("" ::: "memory");
}

// The four products of tiles 4, 5 (left) and 6, 7 (right) into 0 to 3. (The intrinsics want literal numbers.)
struct Bf16 {
    static constexpr int64_t columns = 32;
    static void multiply() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
};

struct Int8 {
    static constexpr int64_t columns = 64;
    static constexpr int kOffset = 0;  // of left-hand values, which are signed as they are
    static void multiply() {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
};

// Four 16x16 products over some chunks, added to what is in `sums`, or in its place if `fresh`; the two tiles
// of the first left one lie side by side, those of the second at `sums_next`.
template <class Type>
inline void multiply_tiles(const TileSquare& s, int64_t chunks, uint8_t* sums, int64_t sums_next,
                           bool fresh) {
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + kTile, 64);
        _tile_loadd(2, sums + sums_next, 64);
        _tile_loadd(3, sums + sums_next + kTile, 64);
    }
    const uint8_t *w = s.w, *x = s.x;
    for (int64_t c = 0; c < chunks; ++c, w += kTile, x += kTile) {
        _tile_loadd(4, w, 64);
        _tile_loadd(6, x, 64);
        _tile_loadd(7, x + s.x_next, 64);
        _tile_loadd(5, w + s.w_next, 64);
        Type::multiply();
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTile, 64);
    _tile_stored(2, sums + sums_next, 64);
    _tile_stored(3, sums + sums_next + kTile, 64);
}
