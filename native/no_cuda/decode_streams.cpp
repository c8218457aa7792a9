#include "cuda/decode_streams.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void hyper_connection(const HyperConnection&, DType, Stream) { refuse(); }
void mix_streams(const MixStreams&, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
