#include "cuda/decode_recurrent.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void mamba2(const Mamba2&, DType, Stream) { refuse(); }
void short_convolution(const ShortConvolution&, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
