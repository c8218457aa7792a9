#include "cuda/rms_norm.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void rms_norm(const void*, const void*, void*, DType, int64_t, int, float, Stream) { refuse(); }

}  // namespace ktinject::cuda
