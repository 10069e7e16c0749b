// The Python door of the kernels. Knows addresses and sizes only; hswq_lab/_cpu_ops.py owns tensors, shapes
// and checks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/api.h"
#include "cpu/isa.h"

namespace py = pybind11;
using namespace hswq;

namespace {

using Address = std::uintptr_t;

// (address, rows, columns, elements from one row to the next, dtype)
using PyMatrix = std::tuple<Address, int64_t, int64_t, int64_t, int>;
// (address of codes, address of scales, rows, columns)
using PyNvfp4 = std::tuple<Address, Address, int64_t, int64_t>;

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

Matrix matrix(const PyMatrix& m) {
    const auto [address, rows, cols, stride, dtype] = m;
    return {at<const void>(address), rows, cols, stride, static_cast<Dtype>(dtype)};
}

MutableMatrix mutable_matrix(const PyMatrix& m) {
    const auto [address, rows, cols, stride, dtype] = m;
    return {at<void>(address), rows, cols, stride, static_cast<Dtype>(dtype)};
}

Nvfp4 nvfp4(const PyNvfp4& w) {
    const auto [codes, scales, rows, cols] = w;
    return {at<const uint8_t>(codes), at<const uint8_t>(scales), rows, cols};
}

// (kind, dense matrix or just its sizes, rotation group, codes or q, scales of NVFP4, scale, one scale in
// all)
using PyWeight = std::tuple<int, PyMatrix, int, Address, Address, Address, bool>;
// (address of left, address of down or 0, rank)
using PyDelta = std::tuple<Address, Address, int64_t>;

Weight weight(const PyWeight& w) {
    const auto [kind, dense, group, codes, scales, scale, scalar_scale] = w;
    return {static_cast<WeightKind>(kind),
            matrix(dense),
            group,
            at<const uint8_t>(codes),
            at<const uint8_t>(scales),
            at<const int8_t>(codes),
            at<const float>(scale),
            scalar_scale};
}

Delta delta(const PyDelta& d, int64_t cols) {
    const auto [left, down, rank] = d;
    return {at<const float>(left), at<const float>(down), rank, cols};
}

void check(Status status) {
    if (status == Status::no_memory) throw std::bad_alloc();
    if (status != Status::ok) throw std::invalid_argument(status_message(status));
}

float scalar(Address address) {
    return *at<const float>(address);
}

void amax_(int threads, const PyMatrix& x, Address result) {
    check(amax(threads, matrix(x), at<float>(result)));
}

void rotate_(int threads, const PyMatrix& x, int group, const PyMatrix& y) {
    check(rotate(threads, matrix(x), group, mutable_matrix(y)));
}

void quantize_(int threads, const PyMatrix& x, int group, Address tensor_scale, int method,
               Address importance, bool stochastic, uint64_t seed, Address kept_scales, Address codes,
               Address scales, Address clipped) {
    const QuantizeJob job{matrix(x),
                          group,
                          scalar(tensor_scale),
                          static_cast<Method>(method),
                          at<const float>(importance),
                          stochastic,
                          seed,
                          at<const uint8_t>(kept_scales),
                          at<uint8_t>(codes),
                          at<uint8_t>(scales)};
    check(quantize(threads, job, at<int64_t>(clipped)));
}

void dequantize_(int threads, const PyNvfp4& w, Address tensor_scale, int group, const PyMatrix& y) {
    check(dequantize(threads, nvfp4(w), scalar(tensor_scale), group, mutable_matrix(y)));
}

void quantize_int8_(int threads, const PyMatrix& w, int group, bool stochastic, uint64_t seed,
                    bool keep_scales, bool scalar_scale, Address scale, Address q) {
    check(quantize_int8(threads, {matrix(w), group, stochastic, seed, keep_scales, scalar_scale,
                                  at<float>(scale), at<int8_t>(q)}));
}

void dequantize_int8_(int threads, Address q, Address scale, bool scalar_scale, int group,
                      const PyMatrix& y) {
    check(dequantize_int8(threads, at<const int8_t>(q), at<const float>(scale), scalar_scale, group,
                          mutable_matrix(y)));
}

void bake_(int threads, const PyWeight& from, const PyDelta& change, uint64_t seed, Address codes,
           Address scales, Address amax) {
    const Weight w = weight(from);
    check(bake(threads,
               {w, delta(change, w.dense.cols), seed, at<uint8_t>(codes), at<uint8_t>(scales),
                at<int8_t>(codes), at<float>(scales)},
               at<float>(amax)));
}

void change_sums_(int threads, const PyWeight& before, const PyWeight& after, const PyDelta& change,
                  const PyMatrix& source, Address totals) {
    const Weight w = weight(before);
    check(change_sums(threads, {w, weight(after), delta(change, w.dense.cols), matrix(source), nullptr},
                      at<double>(totals)));
}

void swizzle_(Address linear, int64_t rows, int64_t cols, Address swizzled) {
    check(swizzle(at<const uint8_t>(linear), rows, cols, at<uint8_t>(swizzled)));
}

void unswizzle_(Address swizzled, int64_t rows, int64_t cols, Address linear) {
    check(unswizzle(at<const uint8_t>(swizzled), rows, cols, at<uint8_t>(linear)));
}

void fp4_gemm_(int threads, const PyNvfp4& x, const PyNvfp4& w, Address alpha, Address bias,
               const PyMatrix& y) {
    check(fp4_gemm(threads, nvfp4(x), nvfp4(w),
                   {mutable_matrix(y), scalar(alpha), nullptr, nullptr, false, at<const float>(bias)}));
}

void linear_w4a4_(int threads, const PyMatrix& x, int group, Address input_scale, const PyNvfp4& w,
                  Address w_scale, Address bias, const PyMatrix& y) {
    const float alpha = scalar(input_scale) * scalar(w_scale);
    check(linear_w4a4(threads, matrix(x), group, scalar(input_scale), nvfp4(w),
                      {mutable_matrix(y), alpha, nullptr, nullptr, false, at<const float>(bias)}));
}

void linear_w4a16_(int threads, const PyMatrix& x, int group, const PyNvfp4& w, Address w_scale, Address bias,
                   const PyMatrix& y) {
    check(linear_w4(threads, matrix(x), group, false, 0.0f, nvfp4(w),
                    {mutable_matrix(y), scalar(w_scale), nullptr, nullptr, false, at<const float>(bias)}));
}

void linear_w4a8_(int threads, const PyMatrix& x, int group, Address input_scale, const PyNvfp4& w,
                  Address w_scale, Address bias, const PyMatrix& y) {
    const float alpha = 6.0f * scalar(input_scale) * scalar(w_scale);
    check(linear_w4(threads, matrix(x), group, true, scalar(input_scale), nvfp4(w),
                    {mutable_matrix(y), alpha, nullptr, nullptr, false, at<const float>(bias)}));
}

void linear_int8_(int threads, const PyMatrix& x, int group, Address w, Address scale, bool scalar_scale,
                  Address bias, const PyMatrix& y) {
    const MutableMatrix out = mutable_matrix(y);
    check(linear_int8(threads, matrix(x), group, at<const int8_t>(w), out.cols,
                      {out, 1.0f, nullptr, at<const float>(scale), scalar_scale, at<const float>(bias)}));
}

std::vector<std::string> built_isas() {
#if defined(__x86_64__)
    return {"baseline", "avx2", "avx512", "amx"};
#else
    return {"baseline"};
#endif
}

void limit(const std::string& name) {
    if (limit_isa(name.c_str()) == 0) return;
    throw std::invalid_argument("no instruction set is called " + name + ": baseline, avx2, avx512, amx");
}

}  // namespace

#if HSWQ_WITH_CUDA
#include "cuda/bindings.inl"
#endif

PYBIND11_MODULE(_C, m) {
    const py::call_guard<py::gil_scoped_release> without_gil;
    m.attr("cuda_built") = bool(HSWQ_WITH_CUDA);
    m.attr("cuda_reason") = HSWQ_CUDA_REASON;
    m.attr("cuda_targets") = HSWQ_CUDA_TARGETS;
    m.attr("cuda_version") = HSWQ_CUDA_VERSION;
    m.def("built_isas", &built_isas);
    m.def("isa", [] { return isa_name(current_isa()); });
    m.def("hardware_isa", [] { return isa_name(hardware_isa()); });
    m.def("limit_isa", &limit);
    m.def("has_w4", &has_w4);
#if HSWQ_WITH_CUDA
    bind_cuda(m);
#endif
    m.def("amax", &amax_, without_gil);
    m.def("rotate", &rotate_, without_gil);
    m.def("quantize", &quantize_, without_gil);
    m.def("dequantize", &dequantize_, without_gil);
    m.def("quantize_int8", &quantize_int8_, without_gil);
    m.def("dequantize_int8", &dequantize_int8_, without_gil);
    m.def("bake", &bake_, without_gil);
    m.def("change_sums", &change_sums_, without_gil);
    m.def("swizzle", &swizzle_, without_gil);
    m.def("unswizzle", &unswizzle_, without_gil);
    m.def("fp4_gemm", &fp4_gemm_, without_gil);
    m.def("linear_w4a4", &linear_w4a4_, without_gil);
    m.def("linear_w4a16", &linear_w4a16_, without_gil);
    m.def("linear_w4a8", &linear_w4a8_, without_gil);
    m.def("linear_int8", &linear_int8_, without_gil);
}
