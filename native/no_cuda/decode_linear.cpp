#include "cuda/decode_linear.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

void decode_linear(const DecodeLinear&, DType, Stream) { refuse(); }

}  // namespace ktinject
