#include "cpu/api.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace hswq {

void* scratch_alloc(std::size_t bytes) {
    void* p = std::aligned_alloc(64, std::size_t(ceil_to(int64_t(bytes ? bytes : 1), 64)));
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

void scratch_free(void* p) noexcept {
    std::free(p);
}

namespace {

const Kernels& kernels() {
#if defined(__x86_64__)
    static const Kernels* const table[kIsaCount] = {&kBaselineKernels, &kAvx2Kernels, &kAvx512Kernels,
                                                    &kAmxKernels};
    return *table[static_cast<int>(current_isa())];
#else
    return kBaselineKernels;
#endif
}

bool group_fits(int group, int64_t cols) {
    return group == 0 || ((group == 4 || group == 16 || group == 64 || group == 256) && cols % group == 0);
}

struct Buffer {
    explicit Buffer(int64_t bytes) : data(static_cast<uint8_t*>(scratch_alloc(std::size_t(bytes)))) {}
    ~Buffer() { scratch_free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    uint8_t* data;
};

int64_t codes_bytes(int64_t rows, int64_t cols) {
    return ceil_to(rows, 16) * ceil_to(cols, 16) / 2;
}

int64_t scales_bytes(int64_t rows, int64_t cols) {
    return ceil_to(rows, 128) * ceil_to(ceil_to(cols, 16) / 16, 4);
}

// Zeros in what no kernel writes: scales beyond the matrix, and rows of codes.
void clear_padding(int64_t rows, int64_t cols, uint8_t* codes, uint8_t* scales) {
    const int64_t bytes = ceil_to(cols, 16) / 2;
    // Not memset: an empty matrix has no address, and memset may not be given none.
    std::fill_n(scales, scales_bytes(rows, cols), uint8_t{0});
    std::fill_n(codes + rows * bytes, (ceil_to(rows, 16) - rows) * bytes, uint8_t{0});
}

template <class F>
Status guarded(F&& body) {
    try {
        body();
        return Status::ok;
    } catch (const std::bad_alloc&) {
        return Status::no_memory;
    }
}

// The numbers a row of w, with zeros up to a whole panel, so that kernels read them in vectors; null stays
// null.
struct Padded {
    Padded(const float* values, int64_t count) {
        if (values == nullptr) return;
        storage.assign(std::size_t(ceil_to(count, 16)), 0.0f);
        std::copy(values, values + count, storage.begin());
        data = storage.data();
    }
    std::vector<float> storage;
    const float* data = nullptr;
};

// Rows of x a thread takes at a time where rows are worked on in panels of 16.
constexpr int64_t kPanelRows = 16;

float largest(const std::vector<float>& values) {
    // NaN wins, as in torch's amax.
    float most = 0;
    for (const float v : values) most = v > most || v != v ? v : most;
    return most;
}

}  // namespace

const char* status_message(Status status) {
    switch (status) {
        case Status::ok:
            return "done";
        case Status::bad_group:
            return "the rotation group is not 4, 16, 64 or 256, or does not divide the columns";
        case Status::bad_shape:
            return "a size is negative or sizes do not belong together";
        case Status::no_memory:
            return "no memory for the kernel's working space";
        case Status::not_here:
            return "this instruction set has no such kernel";
    }
    return "unknown status";
}

Status amax(int threads, const Matrix& x, float* result) {
    return guarded([&] {
        const Kernels& k = kernels();
        std::vector<float> rows(static_cast<std::size_t>(x.rows));
        parallel_for(threads, x.rows, 1, x.rows * x.cols,
                     [&](int64_t begin, int64_t end) { k.amax_rows(x, 0, rows.data(), begin, end); });
        *result = largest(rows);
    });
}

Status rotate(int threads, const Matrix& x, int group, const MutableMatrix& y) {
    if (!group_fits(group, x.cols)) return Status::bad_group;
    return guarded([&] {
        const Kernels& k = kernels();
        parallel_for(threads, x.rows, 1, x.rows * x.cols * 2,
                     [&](int64_t begin, int64_t end) { k.rotate(x, group, y, begin, end); });
    });
}

Status quantize(int threads, const QuantizeJob& job, int64_t* clipped) {
    if (!group_fits(job.group, job.x.cols)) return Status::bad_group;
    const int64_t rows = job.x.rows;
    return guarded([&] {
        const Kernels& k = kernels();
        clear_padding(rows, job.x.cols, job.codes, job.scales);
        std::atomic<int64_t> total{0};
        const int64_t cost = job.method == Method::rtn ? 4 : 64;
        parallel_for(threads, rows, 1, rows * job.x.cols * cost,
                     [&](int64_t begin, int64_t end) { total += k.quantize(job, begin, end); });
        if (clipped != nullptr) *clipped = total;
    });
}

Status dequantize(int threads, const Nvfp4& w, float tensor_scale, int group, const MutableMatrix& y) {
    if (!group_fits(group, w.cols)) return Status::bad_group;
    return guarded([&] {
        const Kernels& k = kernels();
        parallel_for(threads, w.rows, 1, w.rows * w.cols, [&](int64_t begin, int64_t end) {
            k.dequantize(w, tensor_scale, group, y, begin, end);
        });
    });
}

Status quantize_int8(int threads, Int8Job job) {
    if (!group_fits(job.group, job.w.cols)) return Status::bad_group;
    return guarded([&] {
        const Kernels& k = kernels();
        const int64_t rows = job.w.rows, work = rows * job.w.cols * 4;
        if (job.scalar_scale) {
            std::vector<float> amax(static_cast<std::size_t>(rows));
            parallel_for(threads, rows, 1, work, [&](int64_t begin, int64_t end) {
                k.amax_rows(job.w, job.group, amax.data(), begin, end);
            });
            const float most = largest(amax);
            if (most / *job.scale > 127.5f) *job.scale = most / 127.0f;
        }
        parallel_for(threads, rows, 1, work,
                     [&](int64_t begin, int64_t end) { k.quantize_int8(job, begin, end); });
    });
}

Status dequantize_int8(int threads, const int8_t* q, const float* scale, bool scalar, int group,
                       const MutableMatrix& y) {
    if (!group_fits(group, y.cols)) return Status::bad_group;
    return guarded([&] {
        const Kernels& k = kernels();
        parallel_for(threads, y.rows, 1, y.rows * y.cols * 2, [&](int64_t begin, int64_t end) {
            k.dequantize_int8(q, scale, scalar, group, y, begin, end);
        });
    });
}

Status bake(int threads, const BakeJob& job, float* amax) {
    const int64_t rows = job.from.dense.rows, cols = job.from.dense.cols;
    if (!group_fits(job.from.group, cols)) return Status::bad_group;
    const bool int8 = job.from.kind == WeightKind::int8;
    return guarded([&] {
        const Kernels& k = kernels();
        if (!int8) clear_padding(rows, cols, job.codes, job.scales);
        std::atomic<int32_t> most{0};
        parallel_for(threads, rows, kPanelRows, rows * cols * (8 + job.delta.rank / 4),
                     [&](int64_t begin, int64_t end) {
                         const int32_t found = (int8 ? k.bake_int8 : k.bake_nvfp4)(job, begin, end);
                         int32_t known = most;
                         while (known < found && !most.compare_exchange_weak(known, found)) {
                         }
                     });
        const int32_t found = most;
        std::memcpy(amax, &found, sizeof found);
    });
}

Status change_sums(int threads, ChangeJob job, double* totals) {
    const int64_t rows = job.before.dense.rows, cols = job.before.dense.cols;
    if (!group_fits(job.before.group, cols) || !group_fits(job.after.group, cols)) return Status::bad_group;
    return guarded([&] {
        const Kernels& k = kernels();
        std::vector<double> sums(static_cast<std::size_t>(rows * kChangeSums));
        job.sums = sums.data();
        parallel_for(threads, rows, kPanelRows, rows * cols * (8 + job.delta.rank / 4),
                     [&](int64_t begin, int64_t end) { k.change_sums(job, begin, end); });
        std::fill(totals, totals + kChangeSums, 0.0);
        // In the order of the rows, whatever thread did them: the same sums on any number of threads.
        for (std::size_t i = 0; i < sums.size(); ++i) totals[i % kChangeSums] += sums[i];
    });
}

Status swizzle(const uint8_t* linear, int64_t rows, int64_t cols, uint8_t* swizzled) {
    std::fill_n(swizzled, ceil_to(rows, 128) * ceil_to(cols, 4), uint8_t{0});
    const int64_t tiles = (cols + 3) / 4;
    for (int64_t r = 0; r < rows; ++r) {
        uint8_t* at = swizzled + (r / 128) * tiles * 512 + (r % 32) * 16 + (r % 128) / 32 * 4;
        for (int64_t c = 0; c < cols; ++c) at[c / 4 * 512 + c % 4] = linear[r * cols + c];
    }
    return Status::ok;
}

Status unswizzle(const uint8_t* swizzled, int64_t rows, int64_t cols, uint8_t* linear) {
    const int64_t tiles = (cols + 3) / 4;
    for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* at = swizzled + (r / 128) * tiles * 512 + (r % 32) * 16 + (r % 128) / 32 * 4;
        for (int64_t c = 0; c < cols; ++c) linear[r * cols + c] = at[c / 4 * 512 + c % 4];
    }
    return Status::ok;
}

Status fp4_gemm(int threads, const Nvfp4& x, const Nvfp4& w, const Epilogue& e) {
    if (ceil_to(x.cols, 16) != ceil_to(w.cols, 16)) return Status::bad_shape;
    return guarded([&] {
        const Fp4Gemm& gemm = kernels().fp4;
        const Padded bias(e.bias, w.rows);
        Epilogue padded = e;
        padded.bias = bias.data;
        Buffer packed(gemm.packed_bytes(x.rows, x.cols));
        parallel_for(threads, x.rows, kPanelRows, x.rows * x.cols,
                     [&](int64_t begin, int64_t end) { gemm.pack(x, packed.data, begin, end); });
        parallel_for(threads, w.rows, kPanelRows, x.rows * w.rows * w.cols / 16,
                     [&](int64_t begin, int64_t end) { gemm.multiply(packed.data, w, padded, begin, end); });
    });
}

Status linear_w4a4(int threads, const Matrix& x, int group, float input_scale, const Nvfp4& w,
                   const Epilogue& e) {
    Status status = Status::ok;
    const Status memory = guarded([&] {
        Buffer codes(codes_bytes(x.rows, x.cols)), scales(scales_bytes(x.rows, x.cols));
        const QuantizeJob job{x,     group, input_scale, Method::rtn, nullptr,
                              false, 0,     nullptr,     codes.data,  scales.data};
        status = quantize(threads, job, nullptr);
        if (status == Status::ok) status = fp4_gemm(threads, {codes.data, scales.data, x.rows, x.cols}, w, e);
    });
    return memory == Status::ok ? status : memory;
}

Status linear_int8(int threads, const Matrix& x, int group, const int8_t* w, int64_t n, const Epilogue& e) {
    if (!group_fits(group, x.cols)) return Status::bad_group;
    return guarded([&] {
        const Kernels& k = kernels();
        Buffer q(x.rows * x.cols), packed(k.int8.packed_bytes(x.rows, x.cols)), scales(4 * x.rows);
        float* const x_scale = reinterpret_cast<float*>(scales.data);
        int8_t* const xq = reinterpret_cast<int8_t*>(q.data);
        const Int8Job job{x, group, false, 0, false, false, x_scale, xq};
        const Padded bias(e.bias, n), w_scale(e.w_scale, e.scalar_w_scale ? 1 : n);
        Epilogue padded = e;
        padded.bias = bias.data;
        padded.w_scale = w_scale.data;
        padded.x_scale = x_scale;
        parallel_for(threads, x.rows, kPanelRows, x.rows * x.cols * 4, [&](int64_t begin, int64_t end) {
            k.quantize_int8(job, begin, end);
            k.int8.pack(xq, x.rows, x.cols, packed.data, begin, end);
        });
        parallel_for(threads, n, kPanelRows, x.rows * n * x.cols / 16, [&](int64_t begin, int64_t end) {
            k.int8.multiply(packed.data, w, n, x.cols, padded, begin, end);
        });
    });
}

Status linear_w4(int threads, const Matrix& x, int group, bool fp8, float input_scale, const Nvfp4& w,
                 const Epilogue& e) {
    const W4Gemm& gemm = kernels().w4;
    if (gemm.multiply == nullptr) return Status::not_here;
    if (!group_fits(group, x.cols)) return Status::bad_group;
    return guarded([&] {
        const Padded bias(e.bias, w.rows);
        Epilogue padded = e;
        padded.bias = bias.data;
        Buffer packed(gemm.packed_bytes(x.rows, x.cols));
        parallel_for(threads, x.rows, kPanelRows, x.rows * x.cols * 4, [&](int64_t begin, int64_t end) {
            gemm.pack(x, group, fp8, 6.0f * input_scale, packed.data, begin, end);
        });
        parallel_for(
            threads, w.rows, kPanelRows, x.rows * w.rows * w.cols / 16,
            [&](int64_t begin, int64_t end) { gemm.multiply(packed.data, w, fp8, padded, begin, end); });
    });
}

bool has_w4() {
    return kernels().w4.multiply != nullptr;
}

}  // namespace hswq
