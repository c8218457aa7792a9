#include "cuda/decode_ops.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

void advance(int64_t*, int64_t*, bool*, int, int64_t, uintptr_t) { refuse(); }
void attention(const Attention&, DType, uintptr_t) { refuse(); }
void rotation(const int64_t*, const float*, void*, void*, int, int, float, DType, uintptr_t) { refuse(); }
void route(const void*, void*, int64_t*, int, int, int, bool, DType, uintptr_t) { refuse(); }

}  // namespace ktinject
