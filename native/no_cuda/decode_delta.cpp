#include "cuda/decode_delta.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void gated_delta(const GatedDelta&, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
