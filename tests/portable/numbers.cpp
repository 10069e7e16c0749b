// Runs the CPU kernels on fixed inputs and prints a hash of every result: the same lines on every processor.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "cpu/api.h"

using namespace hswq;

#if defined(__x86_64__)
// Here too only the portable kernels are linked: they stand in for those that need flags of their own.
namespace hswq {
const Kernels kAvx2Kernels = kBaselineKernels, kAvx512Kernels = kBaselineKernels,
              kAmxKernels = kBaselineKernels;
}  // namespace hswq
#endif

namespace {

uint64_t state = 42;

// Uniform bits of a linear congruential generator: no library's distribution, so the same everywhere.
float next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(int32_t(state >> 33)) / float(1 << 30) - 1.0f;
}

std::vector<float> values(int64_t count, float outlier) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % 37 == 0 ? next() * outlier : next();
    x[1] = 0.0f, x[2] = -0.0f, x[3] = 1e-42f;
    return x;
}

template <class T>
void print(const char* name, const std::vector<T>& data) {
    uint64_t hash = 1469598103934665603u;
    const auto* bytes = reinterpret_cast<const uint8_t*>(data.data());
    for (std::size_t i = 0; i < data.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

constexpr int64_t kRows = 33, kCols = 512, kTokens = 21;
constexpr std::size_t kCodes = std::size_t(ceil_to(kRows, 16) * kCols / 2);
constexpr std::size_t kScales = std::size_t(ceil_to(kRows, 128) * ceil_to(kCols / 16, 4));

struct Packed {
    std::vector<uint8_t> codes = std::vector<uint8_t>(kCodes), scales = std::vector<uint8_t>(kScales);
};

Packed quantized(const char* name, const Matrix& x, int group, Method method, bool stochastic,
                 const uint8_t* kept) {
    Packed out;
    int64_t clipped = 0;
    const QuantizeJob job{x,          group, 0.002f, method,           nullptr,
                          stochastic, 7,     kept,   out.codes.data(), out.scales.data()};
    if (quantize(1, job, &clipped) != Status::ok) std::printf("%s failed\n", name);
    print(name, out.codes);
    print(name, out.scales);
    std::printf("clipped %lld\n", static_cast<long long>(clipped));
    return out;
}

}  // namespace

int main() {
    const auto w = values(kRows * kCols, 40.0f), x = values(kTokens * kCols, 90.0f);
    const Matrix weight{w.data(), kRows, kCols, kCols, Dtype::f32};
    const Matrix tokens{x.data(), kTokens, kCols, kCols, Dtype::f32};
    quantized("plain", weight, 0, Method::rtn, false, nullptr);
    quantized("four_six", weight, 256, Method::four_six, false, nullptr);
    quantized("sweep", weight, 64, Method::sweep, false, nullptr);
    const Packed packed = quantized("rotated", weight, 256, Method::rtn, false, nullptr);
    quantized("stochastic", weight, 256, Method::rtn, true, packed.scales.data());
    const Nvfp4 codes{packed.codes.data(), packed.scales.data(), kRows, kCols};

    std::vector<float> dense(kRows * kCols), y(kTokens * kRows), row_scale(kRows);
    std::vector<int8_t> q(kRows * kCols);
    const MutableMatrix out{y.data(), kTokens, kRows, kRows, Dtype::f32};
    bool ok =
        dequantize(1, codes, 0.002f, 256, {dense.data(), kRows, kCols, kCols, Dtype::f32}) == Status::ok;
    print("dequantize", dense);
    ok &= linear_w4a4(1, tokens, 256, 0.02f, codes, {out, 0.00004f, nullptr, nullptr, false, nullptr}) ==
          Status::ok;
    print("w4a4", y);
    ok &= quantize_int8(1, {weight, 256, false, 0, false, false, row_scale.data(), q.data()}) == Status::ok;
    print("int8", q);
    print("int8 scales", row_scale);
    ok &= linear_int8(1, tokens, 256, q.data(), kRows,
                      {out, 1.0f, nullptr, row_scale.data(), false, nullptr}) == Status::ok;
    print("w8a8", y);

    const auto left = values(kRows * 4, 1.0f), down = values(4 * kCols, 1.0f);
    const float tensor_scale = 0.002f;
    Packed baked;
    const Weight from{WeightKind::nvfp4,
                      {nullptr, kRows, kCols, kCols, Dtype::f32},
                      256,
                      packed.codes.data(),
                      packed.scales.data(),
                      nullptr,
                      &tensor_scale,
                      true};
    float largest = 0;
    ok &= bake(1,
               {from,
                {left.data(), down.data(), 4, kCols},
                11,
                baked.codes.data(),
                baked.scales.data(),
                nullptr,
                nullptr},
               &largest) == Status::ok;
    print("bake", baked.codes);
    print("bake scales", baked.scales);
    std::printf("largest %a\n", double(largest));
    return ok ? 0 : 1;
}
