#include "cuda/decode_compress.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void compress(const Compress&, DType, Stream) { refuse(); }
void turn_heads(const TurnHeads&, DType, Stream) { refuse(); }
void sink_softmax(const SinkSoftmax&, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
