// The Python door of the CUDA kernels, _C.cuda: included by bindings.cpp where they are built. Addresses and
// sizes only; hswq_lab/_cuda_ops.py owns tensors, shapes and checks. The first two arguments are always the
// device's number and the stream's address.
#include "cuda/api.h"
#include "cuda/cublaslt.h"

namespace {

// Makes a device current and restores the one before.
class OnDevice {
  public:
    explicit OnDevice(int device) {
        if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
        check(cudaSetDevice(device));
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    ~OnDevice() { cudaSetDevice(before_); }

    static void check(cudaError_t error) {
        if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
    }

  private:
    int before_ = 0;
};

// Enqueues f(stream) on a device.
template <class F>
void enqueue(int device, Address stream, const F& f) {
    const OnDevice on(device);
    OnDevice::check(f(at<CUstream_st>(stream)));
}

std::string multiply_(int device, Address stream, int operand, const PyMatrix& x, const PyMatrix& w,
                      Address x_scales, Address w_scales, Address alpha_beta, Address bias, const PyMatrix& y,
                      Address workspace, int64_t workspace_bytes) {
    const OnDevice on(device);
    const Matrix a = matrix(x), b = matrix(w);
    const MutableMatrix out = mutable_matrix(y);
    const cuda::Product job{static_cast<cuda::Operand>(operand),
                            a.rows,
                            b.rows,
                            a.cols,
                            a.data,
                            a.stride,
                            b.data,
                            b.stride,
                            at<const void>(x_scales),
                            at<const void>(w_scales),
                            at<const float>(alpha_beta),
                            at<const void>(bias),
                            out.data,
                            out.stride,
                            out.dtype,
                            at<void>(workspace),
                            workspace_bytes};
    std::string message;
    const cuda::Answer answer = cuda::multiply(job, at<CUstream_st>(stream), message);
    if (answer == cuda::Answer::failed) throw std::runtime_error(message);
    return answer == cuda::Answer::done ? "" : message;
}

std::string probe_fp4_(int device) {
    const OnDevice on(device);
    std::string message;
    const cuda::Answer answer = cuda::probe_fp4(message);
    return answer == cuda::Answer::done ? "" : message;
}

void quantize_cuda_(int device, Address stream, const PyMatrix& x, int group, Address tensor_scale,
                    int method, Address importance, bool stochastic, uint64_t seed, Address kept,
                    Address codes, Address scales, Address clipped) {
    const cuda::Quantize job{matrix(x),
                             group,
                             at<const float>(tensor_scale),
                             static_cast<Method>(method),
                             at<const float>(importance),
                             stochastic,
                             seed,
                             at<const uint8_t>(kept),
                             at<uint8_t>(codes),
                             at<uint8_t>(scales),
                             at<unsigned long long>(clipped)};
    enqueue(device, stream, [&](cudaStream_t s) { return cuda::quantize(job, s); });
}

void quantize_int8_cuda_(int device, Address stream, const PyMatrix& x, int group, bool stochastic,
                         uint64_t seed, int kind, Address scale, Address amax, Address new_scale, Address q) {
    const cuda::QuantizeInt8 job{matrix(x),
                                 group,
                                 stochastic,
                                 seed,
                                 static_cast<cuda::Int8Scales>(kind),
                                 at<const float>(scale),
                                 at<uint32_t>(amax),
                                 at<float>(new_scale),
                                 at<int8_t>(q)};
    enqueue(device, stream, [&](cudaStream_t s) { return cuda::quantize_int8(job, s); });
}

void finish_cuda_(int device, Address stream, Address sums, int64_t stride, bool integer, Address x_scale,
                  Address w_scale, bool scalar_w_scale, Address bias, const PyMatrix& y) {
    const cuda::Finish job{at<const void>(sums),
                           stride,
                           integer,
                           at<const float>(x_scale),
                           at<const float>(w_scale),
                           scalar_w_scale,
                           at<const float>(bias),
                           mutable_matrix(y)};
    enqueue(device, stream, [&](cudaStream_t s) { return cuda::finish(job, s); });
}

void int8_product_(int device, Address stream, const PyMatrix& x, const PyMatrix& w, Address x_scale,
                   Address w_scale, bool scalar_w_scale, Address bias, const PyMatrix& y) {
    const Matrix a = matrix(x), b = matrix(w);
    const cuda::Int8Product job{a.rows,
                                b.rows,
                                a.cols,
                                a.data,
                                a.stride,
                                b.data,
                                b.stride,
                                at<const float>(x_scale),
                                at<const float>(w_scale),
                                scalar_w_scale,
                                at<const float>(bias),
                                mutable_matrix(y)};
    enqueue(device, stream, [&](cudaStream_t s) { return cuda::int8_product(job, s); });
}

cuda::W4Product w4_job(const PyMatrix& x, const PyNvfp4& w, Address first_scale, Address second_scale,
                       Address bias, const PyMatrix& y) {
    return {matrix(x),
            nvfp4(w),
            at<const float>(first_scale),
            at<const float>(second_scale),
            at<const float>(bias),
            mutable_matrix(y)};
}

void bind_cuda(py::module_& parent) {
    const py::call_guard<py::gil_scoped_release> without_gil;
    py::module_ m = parent.def_submodule("cuda");
    m.def("library_version", &cuda::library_version);
    m.def("probe_fp4", &probe_fp4_, without_gil);
    m.def("multiply", &multiply_, without_gil);
    m.def("quantize", &quantize_cuda_, without_gil);
    m.def("quantize_int8", &quantize_int8_cuda_, without_gil);
    m.def("finish", &finish_cuda_, without_gil);
    m.def("int8_product", &int8_product_, without_gil);
    m.def(
        "has_int8_product",
        [](int device) {
            const OnDevice on(device);
            return cuda::has_int8_product(device);
        },
        without_gil);
    m.def(
        "has_w4_product",
        [](int device) {
            const OnDevice on(device);
            return cuda::has_w4_product(device);
        },
        without_gil);
    m.def(
        "skinny",
        [](int device, Address stream, const PyMatrix& x, const PyNvfp4& w, Address first_scale,
           Address second_scale, Address bias, const PyMatrix& y) {
            const cuda::W4Product job = w4_job(x, w, first_scale, second_scale, bias, y);
            enqueue(device, stream, [&](cudaStream_t s) { return cuda::skinny(job, s); });
        },
        without_gil);
    m.def(
        "w4_product",
        [](int device, Address stream, const PyMatrix& x, const PyNvfp4& w, Address first_scale,
           Address second_scale, Address bias, const PyMatrix& y) {
            const cuda::W4Product job = w4_job(x, w, first_scale, second_scale, bias, y);
            enqueue(device, stream, [&](cudaStream_t s) { return cuda::w4_product(job, s); });
        },
        without_gil);
    m.def(
        "amax",
        [](int device, Address stream, const PyMatrix& x, Address result) {
            enqueue(device, stream,
                    [&](cudaStream_t s) { return cuda::amax(matrix(x), at<float>(result), s); });
        },
        without_gil);
    m.def(
        "rotate",
        [](int device, Address stream, const PyMatrix& x, int group, const PyMatrix& y) {
            enqueue(device, stream,
                    [&](cudaStream_t s) { return cuda::rotate(matrix(x), group, mutable_matrix(y), s); });
        },
        without_gil);
    m.def(
        "rounded_values",
        [](int device, Address stream, const PyMatrix& x, int group, Address tensor_scale,
           const PyMatrix& y) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::rounded_values(matrix(x), group, at<const float>(tensor_scale),
                                            mutable_matrix(y), s);
            });
        },
        without_gil);
    m.def(
        "quantize_fp8",
        [](int device, Address stream, const PyMatrix& x, int group, Address input_scale, Address y,
           int64_t cols) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::quantize_fp8(matrix(x), group, at<const float>(input_scale), at<uint8_t>(y),
                                          cols, s);
            });
        },
        without_gil);
    m.def(
        "dequantize",
        [](int device, Address stream, const PyNvfp4& w, Address tensor_scale, int group, const PyMatrix& y) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::dequantize(nvfp4(w), at<const float>(tensor_scale), group, mutable_matrix(y), s);
            });
        },
        without_gil);
    m.def(
        "fp8_weight",
        [](int device, Address stream, const PyNvfp4& w, Address row_scale, Address y) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::fp8_weight(nvfp4(w), at<float>(row_scale), at<uint8_t>(y), s);
            });
        },
        without_gil);
    m.def(
        "dequantize_int8",
        [](int device, Address stream, Address q, Address scale, bool scalar, int group, const PyMatrix& y) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::dequantize_int8(at<const int8_t>(q), at<const float>(scale), scalar, group,
                                             mutable_matrix(y), s);
            });
        },
        without_gil);
    m.def(
        "swizzle",
        [](int device, Address stream, Address linear, int64_t rows, int64_t cols, Address swizzled) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::swizzle(at<const uint8_t>(linear), rows, cols, at<uint8_t>(swizzled), s);
            });
        },
        without_gil);
    m.def(
        "unswizzle",
        [](int device, Address stream, Address swizzled, int64_t rows, int64_t cols, Address linear) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::unswizzle(at<const uint8_t>(swizzled), rows, cols, at<uint8_t>(linear), s);
            });
        },
        without_gil);
    m.def(
        "alpha_beta",
        [](int device, Address stream, float factor, Address a, Address b, int64_t count, Address numbers) {
            enqueue(device, stream, [&](cudaStream_t s) {
                return cuda::alpha_beta(factor, at<const float>(a), at<const float>(b), count,
                                        at<float>(numbers), s);
            });
        },
        without_gil);
}

}  // namespace
