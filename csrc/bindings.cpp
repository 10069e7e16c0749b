// The Python door of the kernels. Knows addresses and sizes only; hswq_lab/ops.py owns tensors, shapes and checks.
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
    m.attr("cuda_built") = bool(HSWQ_WITH_CUDA);
    m.attr("cuda_reason") = HSWQ_CUDA_REASON;
    m.attr("cuda_targets") = HSWQ_CUDA_TARGETS;
    m.attr("cuda_version") = HSWQ_CUDA_VERSION;
    m.def("isa", [] { return hswq::isa_name(hswq::current_isa()); });
    m.def("hardware_isa", [] { return hswq::isa_name(hswq::hardware_isa()); });
    m.def("limit_isa", [](const std::string& name) {
        if (hswq::limit_isa(name.c_str()) != 0) throw std::invalid_argument("no such instruction set: " + name);
    });
    if (const char* asked = std::getenv("HSWQ_LAB_ISA"); asked != nullptr) {
        if (hswq::limit_isa(asked) != 0) {
            throw std::invalid_argument(std::string("HSWQ_LAB_ISA names no instruction set: ") + asked +
                                        " (baseline, avx2, avx512, amx)");
        }
    }
}
