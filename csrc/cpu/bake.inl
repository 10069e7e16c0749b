// Baking a delta into a packed weight, and measuring what arrived, with everything but the weight's own bytes
// in cache: a panel of rows, a chunk of columns at a time. See lora/change.py.

constexpr int64_t kBakeRows =
    16;  // rows that share a chunk of the down factor while it is in the nearest cache

// Columns col .. col + 255 of a row, unrotated, zeros beyond the matrix.
inline void load_unrotated(const Weight& w, int64_t row, int64_t col, float* v) {
    if (w.kind == WeightKind::dense) return load_chunk(w.dense, row, col, 0, v);
    const int64_t n = chunk_size(w.dense.cols, col);
    if (w.kind == WeightKind::int8) {
        decode_int8(w.q + row * w.dense.cols + col, w.scale[w.scalar_scale ? 0 : row], n, v);
    } else {
        decode_chunk({w.codes, w.scales, w.dense.rows, w.dense.cols}, *w.scale, row, col, v);
    }
    const int64_t filled = w.kind == WeightKind::int8 ? n : ceil_to(n, kBlock);
    __builtin_memset(v + filled, 0, size_t(kChunk - filled) * 4);
    rotate_chunk(v, w.group);
}

inline bool any_nonzero(const float* v, int64_t count) {
    bool found = false;
    for (int64_t i = 0; i < count; ++i) found |= v[i] != 0.0f;
    return found;
}

inline bool is_touched(const Delta& delta, int64_t row) {
    return any_nonzero(delta.left + row * delta.rank, delta.rank);
}

// Columns col .. col + 255 of a row of the delta. Each product is rounded, then added, in the order of the
// ranks: the same bits on every instruction set.
inline void delta_chunk(const Delta& delta, int64_t row, int64_t col, float* d) {
    const int64_t n = chunk_size(delta.cols, col);
    const float* left = delta.left + row * delta.rank;
    if (delta.down == nullptr && delta.rank != 0) {  // empty factors may have no address
        __builtin_memcpy(d, left + col, size_t(n) * 4);
    } else if (n == kChunk) {
        constexpr int kTile = 8;  // sums that are in registers at a time
        for (int i = 0; i < kChunk; i += kTile * kLanes) {
            vf sums[kTile] = {};
            for (int64_t r = 0; r < delta.rank; ++r) {
                if (left[r] == 0.0f) continue;  // the rows of another part, as k's are for q's factors
                const float* down = delta.down + r * delta.cols + col + i;
                for (int j = 0; j < kTile; ++j) sums[j] += load(down + j * kLanes) * left[r];
            }
            for (int j = 0; j < kTile; ++j) store(d + i + j * kLanes, sums[j]);
        }
    } else {
        __builtin_memset(d, 0, size_t(n) * 4);
        for (int64_t r = 0; r < delta.rank; ++r) {
            for (int64_t i = 0; i < n; ++i) d[i] += delta.down[r * delta.cols + col + i] * left[r];
        }
    }
    __builtin_memset(d + n, 0, size_t(kChunk - n) * 4);
}

// The changed values of a chunk in the basis to be stored.
inline void changed_chunk(const BakeJob& job, int64_t row, int64_t col, float* v) {
    alignas(64) float d[kChunk];
    load_unrotated(job.from, row, col, v);
    delta_chunk(job.delta, row, col, d);
    for (int i = 0; i < kChunk; i += kLanes) store(v + i, load(v + i) + load(d + i));
    rotate_chunk(v, job.from.group);
}

inline void keep_nvfp4_row(const BakeJob& job, int64_t row) {
    const int64_t cols = ceil_to(job.from.dense.cols, 16), tiles = (cols / kBlock + 3) / 4;
    __builtin_memcpy(job.codes + row * cols / 2, job.from.codes + row * cols / 2, size_t(cols / 2));
    for (int64_t c = 0; c < cols / kBlock; ++c) {
        const int64_t at = scale_offset(row, c, tiles);
        job.scales[at] = job.from.scales[at];
    }
}

int32_t bake_nvfp4(const BakeJob& job, int64_t begin, int64_t end) {
    alignas(64) float v[kChunk];
    const QuantizeJob out{job.from.dense, 0,        *job.from.scale, Method::rtn, nullptr,
                          true,           job.seed, job.from.scales, job.codes,   job.scales};
    const int64_t cols = job.from.dense.cols;
    vi most{};
    for (int64_t panel = begin; panel < end; panel += kBakeRows) {
        const int64_t last = panel + kBakeRows < end ? panel + kBakeRows : end;
        bool touched[kBakeRows];
        for (int64_t row = panel; row < last; ++row) {
            touched[row - panel] = is_touched(job.delta, row);
            if (!touched[row - panel]) keep_nvfp4_row(job, row);
        }
        for (int64_t col = 0; col < cols; col += kChunk) {
            for (int64_t row = panel; row < last; ++row) {
                if (!touched[row - panel]) continue;
                changed_chunk(job, row, col, v);
                most = larger_magnitudes(most, v);
                quantize_chunk(out, row, col, v);
            }
        }
    }
    return largest_lane(most);
}

int32_t bake_int8(const BakeJob& job, int64_t begin, int64_t end) {
    const int64_t cols = job.from.dense.cols, padded = ceil_to(cols, kChunk);
    const Scratch<float> panel_values(kBakeRows * padded);
    const Int8Job out{job.from.dense, 0, true, job.seed, true, false, job.row_scale, job.q};
    int32_t result = 0;
    for (int64_t panel = begin; panel < end; panel += kBakeRows) {
        const int64_t last = panel + kBakeRows < end ? panel + kBakeRows : end;
        vi most[kBakeRows] = {};
        bool touched[kBakeRows];
        for (int64_t row = panel; row < last; ++row) touched[row - panel] = is_touched(job.delta, row);
        for (int64_t col = 0; col < cols; col += kChunk) {
            for (int64_t row = panel; row < last; ++row) {
                if (!touched[row - panel]) continue;
                float* v = panel_values.data + (row - panel) * padded + col;
                changed_chunk(job, row, col, v);
                most[row - panel] = larger_magnitudes(most[row - panel], v);
            }
        }
        for (int64_t row = panel; row < last; ++row) {
            job.row_scale[row] = job.from.scale[row];
            if (!touched[row - panel]) {
                __builtin_memcpy(job.q + row * cols, job.from.q + row * cols, size_t(cols));
                continue;
            }
            const int32_t largest = largest_lane(most[row - panel]);
            result = largest > result ? largest : result;
            job.row_scale[row] = int8_scale(out, row, float_of(largest));
            const float* v = panel_values.data + (row - panel) * padded;
            for (int64_t col = 0; col < cols; col += kChunk)
                quantize_int8_chunk(out, row, col, job.row_scale[row], v + col);
        }
    }
    return result;
}

// ---- what arrived

// Products of two chunks, added up lane by lane.
inline vf products(vf sum, const float* a, const float* b) {
    for (int i = 0; i < kChunk; i += kLanes) sum += load(a + i) * load(b + i);
    return sum;
}

inline void subtract(const float* a, const float* b, float* difference) {
    for (int i = 0; i < kChunk; i += kLanes) store(difference + i, load(a + i) - load(b + i));
}

// Adds one chunk to a row's sums: w before, a after, d the delta, s the source.
inline void add_change(const ChangeJob& job, int64_t row, int64_t col, vf* sums) {
    alignas(64) float w[kChunk], a[kChunk], d[kChunk], c[kChunk], x[kChunk];
    load_unrotated(job.before, row, col, w);
    load_unrotated(job.after, row, col, a);
    delta_chunk(job.delta, row, col, d);
    if (job.source.data != nullptr) {
        alignas(64) float s[kChunk];
        load_chunk(job.source, row, col, 0, s);
        subtract(w, s, x);
        sums[kErrorBefore] = products(sums[kErrorBefore], x, x);
        sums[kSource] = products(sums[kSource], s, s);
        for (int i = 0; i < kChunk; i += kLanes) store(s + i, load(s + i) + load(d + i));
        subtract(a, s, x);
        sums[kErrorAfter] = products(sums[kErrorAfter], x, x);
        sums[kSourceAfter] = products(sums[kSourceAfter], s, s);
    }
    subtract(a, w, c);
    subtract(c, d, x);
    sums[kCC] = products(sums[kCC], c, c);
    sums[kCD] = products(sums[kCD], c, d);
    sums[kDD] = products(sums[kDD], d, d);
    sums[kWW] = products(sums[kWW], w, w);
    sums[kWD] = products(sums[kWD], w, d);
    sums[kMissed] = products(sums[kMissed], x, x);
    rotate_chunk(d, job.before.group);
    sums[kCRotated] = products(sums[kCRotated], c, d);
}

void change_sums(const ChangeJob& job, int64_t begin, int64_t end) {
    const int64_t cols = job.before.dense.cols;
    for (int64_t panel = begin; panel < end; panel += kBakeRows) {
        const int64_t last = panel + kBakeRows < end ? panel + kBakeRows : end;
        vf sums[kBakeRows][kChangeSums] = {};
        bool wanted[kBakeRows];
        for (int64_t row = panel; row < last; ++row)
            wanted[row - panel] = job.source.data != nullptr || is_touched(job.delta, row);
        for (int64_t col = 0; col < cols; col += kChunk) {
            for (int64_t row = panel; row < last; ++row) {
                if (wanted[row - panel]) add_change(job, row, col, sums[row - panel]);
            }
        }
        for (int64_t row = panel; row < last; ++row) {
            double* out = job.sums + row * kChangeSums;
            const bool touched = is_touched(job.delta, row);
            for (int i = 0; i < kChangeSums; ++i) {
                float lanes[kLanes];
                store(lanes, sums[row - panel][i]);
                double total = 0;
                for (int j = 0; j < kLanes; ++j) total += double(lanes[j]);
                out[i] = touched || i >= kErrorBefore ? total : 0;
            }
            out[kTouched] = touched;
        }
    }
}
