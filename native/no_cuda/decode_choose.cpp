#include "cuda/decode_choose.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

void choose(const Choice&, Stream) { refuse(); }

}  // namespace ktinject
