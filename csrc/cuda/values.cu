// Rotation alone, and packed codes back to values.
#include "cuda/chunks.cuh"

namespace hswq::cuda {

cudaError_t rotate(const Matrix& x, int group, const MutableMatrix& y, cudaStream_t stream) {
    return run_chunks(MatrixSource(x), MatrixSink(y), x.rows, y.cols, group, stream);
}

cudaError_t dequantize(const Nvfp4& w, const float* tensor_scale, int group, const MutableMatrix& y,
                       cudaStream_t stream) {
    return run_chunks(CodesSource(w, tensor_scale), MatrixSink(y), y.rows, y.cols, group, stream);
}

}  // namespace hswq::cuda
