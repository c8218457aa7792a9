#include "cuda/decode_choose.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void choose(const Choice&, Stream) { refuse(); }

}  // namespace ktinject::cuda
