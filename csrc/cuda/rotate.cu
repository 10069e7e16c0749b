// Rotation alone.
#include "cuda/chunks.cuh"

namespace hswq::cuda {

cudaError_t rotate(const Matrix& x, int group, const MutableMatrix& y, cudaStream_t stream) {
    return run_chunks(MatrixSource(x), MatrixSink(y), x.rows, y.cols, group, stream);
}

}  // namespace hswq::cuda
