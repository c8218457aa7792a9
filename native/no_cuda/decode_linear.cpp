#include "cuda/decode_linear.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void decode_linear(const DecodeLinear&, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
