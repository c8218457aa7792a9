#include "cuda/decode_ops.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

void attention_input(const AttentionInput&, DType, uintptr_t) { refuse(); }
void attention(const Attention&, DType, uintptr_t) { refuse(); }
void route(const void*, void*, int64_t*, int, int, int, bool, DType, uintptr_t) { refuse(); }

}  // namespace ktinject
