// cuBLASLt with declarations of our own: the few functions and numbers of its stable C interface that are
// used.
//
// Row-major Y[M,N] = X[M,K] W[N,K]^T is column-major D = A^T B with A = W, B = X, D = Y. For FP4 this pair of
// transpositions is the only one; the block scales are the swizzled ones of the files, and both scale MODES
// have to be set: pointers without modes are read as scalars.
#include "cuda/cublaslt.h"

#include <dlfcn.h>
#include <library_types.h>

#include <array>
#include <map>
#include <mutex>

namespace hswq::cuda {
namespace {

using Handle = void*;
using Status = int;
constexpr Status kSuccess = 0, kNotSupported = 15;
constexpr int kCompute32F = 68, kTranspose = 1, kNone = 0, kDevicePointers = 1, kEpilogueBias = 4,
              kVec16UE4M3 = 1;
constexpr int kFp4 = 33;  // CUDA_R_4F_E2M1, which toolkits before 12.8 do not name
// cublasLtMatmulDescAttributes_t
constexpr int kPointerMode = 2, kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8, kScaleA = 17,
              kScaleB = 18, kBiasType = 26, kScaleModeA = 31, kScaleModeB = 32;
// cublasLtMatmulPreferenceAttributes_t
constexpr int kMaxWorkspace = 1, kReductions = 3, kAlignmentA = 5;
constexpr uint32_t kReduceInFp32 = 2;  // where K is split; in the result's dtype it would round twice
constexpr int64_t kFp4Version = 120900;

struct Algorithm {
    uint64_t data[8];
};

struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
};

struct Library {
    Status (*create)(Handle*) = nullptr;
    size_t (*version)() = nullptr;
    Status (*desc_create)(Handle*, int, int) = nullptr;
    Status (*desc_set)(Handle, int, const void*, size_t) = nullptr;
    Status (*desc_destroy)(Handle) = nullptr;
    Status (*layout_create)(Handle*, int, uint64_t, uint64_t, int64_t) = nullptr;
    Status (*layout_destroy)(Handle) = nullptr;
    Status (*preference_create)(Handle*) = nullptr;
    Status (*preference_set)(Handle, int, const void*, size_t) = nullptr;
    Status (*preference_destroy)(Handle) = nullptr;
    Status (*heuristic)(Handle, Handle, Handle, Handle, Handle, Handle, Handle, int, Heuristic*,
                        int*) = nullptr;
    Status (*matmul)(Handle, Handle, const void*, const void*, Handle, const void*, Handle, const void*,
                     const void*, Handle, void*, Handle, const Algorithm*, void*, size_t,
                     cudaStream_t) = nullptr;
    bool complete = true;

    template <class F>
    void find(void* library, F& function, const char* name) {
        function = reinterpret_cast<F>(dlsym(library, name));
        complete = complete && function != nullptr;
    }
};

void* open_library() {
    // The one that torch has loaded already, if any: two copies would each want memory on the card.
    for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
        for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
            if (void* library = dlopen(name, mode)) return library;
        }
    }
    return nullptr;
}

const Library* library() {
    static const Library* found = []() -> const Library* {
        void* handle = open_library();
        if (handle == nullptr) return nullptr;
        static Library lib;
        lib.find(handle, lib.create, "cublasLtCreate");
        lib.find(handle, lib.version, "cublasLtGetVersion");
        lib.find(handle, lib.desc_create, "cublasLtMatmulDescCreate");
        lib.find(handle, lib.desc_set, "cublasLtMatmulDescSetAttribute");
        lib.find(handle, lib.desc_destroy, "cublasLtMatmulDescDestroy");
        lib.find(handle, lib.layout_create, "cublasLtMatrixLayoutCreate");
        lib.find(handle, lib.layout_destroy, "cublasLtMatrixLayoutDestroy");
        lib.find(handle, lib.preference_create, "cublasLtMatmulPreferenceCreate");
        lib.find(handle, lib.preference_set, "cublasLtMatmulPreferenceSetAttribute");
        lib.find(handle, lib.preference_destroy, "cublasLtMatmulPreferenceDestroy");
        lib.find(handle, lib.heuristic, "cublasLtMatmulAlgoGetHeuristic");
        lib.find(handle, lib.matmul, "cublasLtMatmul");
        return lib.complete ? &lib : nullptr;
    }();
    return found;
}

// Descriptors of one product; destroyed with it.
class Plan {
  public:
    explicit Plan(const Library& lib) : lib_(lib) {}
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;
    ~Plan() {
        if (desc) lib_.desc_destroy(desc);
        if (preference) lib_.preference_destroy(preference);
        for (Handle layout : {a, b, d})
            if (layout) lib_.layout_destroy(layout);
    }

    template <class T>
    void set(int attribute, const T& value) {
        note(lib_.desc_set(desc, attribute, &value, sizeof value));
    }

    template <class T>
    void prefer(int attribute, const T& value) {
        note(lib_.preference_set(preference, attribute, &value, sizeof value));
    }

    void note(Status status) {
        if (this->status == kSuccess) this->status = status;
    }

    Handle desc = nullptr, a = nullptr, b = nullptr, d = nullptr, preference = nullptr;
    Status status = kSuccess;  // the first that was no success

  private:
    const Library& lib_;
};

int type_of(Operand operand) {
    return operand == Operand::fp4    ? kFp4
           : operand == Operand::bf16 ? int(CUDA_R_16BF)
           : operand == Operand::f16  ? int(CUDA_R_16F)
                                      : int(CUDA_R_32F);
}

int type_of(Dtype dtype) {
    return type_of(static_cast<Operand>(dtype));
}

uint32_t alignment(const void* p) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    uint32_t bytes = 256;
    while (address % bytes != 0) bytes /= 2;
    return bytes;
}

void describe(const Library& lib, const Product& job, Plan& plan) {
    plan.note(lib.desc_create(&plan.desc, kCompute32F, CUDA_R_32F));
    if (plan.status != kSuccess) return;
    plan.set(kTransA, kTranspose);
    plan.set(kTransB, kNone);
    plan.set(kPointerMode, kDevicePointers);
    if (job.operand == Operand::fp4) {
        plan.set(kScaleModeA, kVec16UE4M3);
        plan.set(kScaleModeB, kVec16UE4M3);
        plan.set(kScaleA, job.w_scales);
        plan.set(kScaleB, job.x_scales);
    }
    if (job.bias) {
        plan.set(kEpilogue, kEpilogueBias);
        plan.set(kBiasPointer, job.bias);
        plan.set(kBiasType, type_of(job.dtype));
    }
    const int type = type_of(job.operand);
    plan.note(lib.layout_create(&plan.a, type, uint64_t(job.k), uint64_t(job.n), job.w_stride));
    plan.note(lib.layout_create(&plan.b, type, uint64_t(job.k), uint64_t(job.m), job.x_stride));
    plan.note(lib.layout_create(&plan.d, type_of(job.dtype), uint64_t(job.n), uint64_t(job.m), job.y_stride));
    plan.note(lib.preference_create(&plan.preference));
    if (plan.status != kSuccess) return;
    plan.prefer(kMaxWorkspace, uint64_t(job.workspace_bytes));
    plan.prefer(kReductions, kReduceInFp32);
    int attribute = kAlignmentA;  // of A, B, C and D, one after the other
    for (const void* p : {job.w, job.x, static_cast<const void*>(job.y), static_cast<const void*>(job.y)})
        plan.prefer(attribute++, alignment(p));
}

// What the choice of an algorithm depends on.
using Key = std::array<int64_t, 15>;

Key key_of(const Product& job, int device) {
    return {device,
            int(job.operand),
            job.m,
            job.n,
            job.k,
            job.x_stride,
            job.w_stride,
            job.y_stride,
            int(job.dtype),
            job.bias != nullptr,
            job.workspace_bytes,
            alignment(job.x),
            alignment(job.w),
            alignment(job.y),
            job.bias ? alignment(job.bias) : 0};
}

struct Chosen {
    Status status;
    Algorithm algorithm;
};

std::mutex guard;

Handle handle_of(const Library& lib, int device, Status& status) {
    static std::map<int, Handle> handles;
    Handle& handle = handles[device];
    if (handle == nullptr) status = lib.create(&handle);
    return handle;
}

// The library's own choice, asked for once for each kind of product: asking costs more than a small product.
Chosen choose(const Library& lib, Handle handle, const Product& job, const Plan& plan, int device) {
    static std::map<Key, Chosen> known;
    const Key key = key_of(job, device);
    const auto at = known.find(key);
    if (at != known.end()) return at->second;
    Heuristic heuristic{};
    int count = 0;
    Status status = lib.heuristic(handle, plan.desc, plan.a, plan.b, plan.d, plan.d, plan.preference, 1,
                                  &heuristic, &count);
    if (status == kSuccess && count == 0) status = kNotSupported;
    return known[key] = Chosen{status, heuristic.algorithm};
}

Answer answer(Status status, const char* what, std::string& message) {
    if (status == kSuccess) return Answer::done;
    if (status == kNotSupported) {
        message = "cuBLASLt has no such product on this card (CUBLAS_STATUS_NOT_SUPPORTED)";
        return Answer::not_supported;
    }
    message = std::string(what) + " of cuBLASLt answered with status " + std::to_string(status);
    return Answer::failed;
}

const Library* usable(const Product& job, std::string& message) {
    const Library* lib = library();
    if (lib == nullptr) {
        message = "no libcublasLt.so was found";
    } else if (job.operand == Operand::fp4 && int64_t(lib->version()) < kFp4Version) {
        message = "this cuBLASLt is older than 12.9 and knows no FP4";
        return nullptr;
    }
    return lib;
}

// Descriptors and algorithm; the plan stays valid for a product right after.
Answer prepare(const Library& lib, const Product& job, Plan& plan, Handle& handle, Algorithm& algorithm,
               std::string& message) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        message = "no current CUDA device";
        return Answer::failed;
    }
    Status status = kSuccess;
    const std::lock_guard<std::mutex> lock(guard);
    handle = handle_of(lib, device, status);
    if (status != kSuccess) return answer(status, "cublasLtCreate", message);
    describe(lib, job, plan);
    if (plan.status != kSuccess) return answer(plan.status, "a descriptor", message);
    const Chosen chosen = choose(lib, handle, job, plan, device);
    algorithm = chosen.algorithm;
    return answer(chosen.status, "the heuristic", message);
}

}  // namespace

Answer multiply(const Product& job, cudaStream_t stream, std::string& message) {
    const Library* lib = usable(job, message);
    if (lib == nullptr) return Answer::not_supported;
    Plan plan(*lib);
    Handle handle = nullptr;
    Algorithm algorithm;
    const Answer ready = prepare(*lib, job, plan, handle, algorithm, message);
    if (ready != Answer::done) return ready;
    const Status status = lib->matmul(handle, plan.desc, job.alpha_beta, job.w, plan.a, job.x, plan.b,
                                      job.alpha_beta + 1, job.y, plan.d, job.y, plan.d, &algorithm,
                                      job.workspace, size_t(job.workspace_bytes), stream);
    return answer(status, "a product", message);
}

Answer probe_fp4(std::string& message) {
    // Nothing is read through these addresses: only their alignment matters.
    void* nowhere = reinterpret_cast<void*>(uintptr_t(1) << 20);
    const Product job{Operand::fp4, 256, 256,         256,     nowhere, 256,
                      nowhere,      256, nowhere,     nowhere, nullptr, nullptr,
                      nowhere,      256, Dtype::bf16, nowhere, 32 << 20};
    const Library* lib = usable(job, message);
    if (lib == nullptr) return Answer::not_supported;
    Plan plan(*lib);
    Handle handle = nullptr;
    Algorithm algorithm;
    return prepare(*lib, job, plan, handle, algorithm, message);
}

int64_t library_version() {
    const Library* lib = library();
    return lib ? int64_t(lib->version()) : 0;
}

}  // namespace hswq::cuda
