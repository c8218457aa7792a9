#include "cuda/decode_ops.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

void advance(int64_t*, int64_t*, bool*, int, int64_t, Stream) { refuse(); }
void attention(const Attention&, DType, Stream) { refuse(); }
void rotation(const int64_t*, const float*, void*, void*, int, int, float, DType, Stream) { refuse(); }
void route(const void*, void*, int64_t*, int, int, int, bool, DType, Stream) { refuse(); }
void route_grouped(const GroupedRoute&, DType, Stream) { refuse(); }
void latent(const Latent&, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
