#include "cuda/int4_linear.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

Int4Scratch int4_scratch(const Int4Matrix&, int, int) { refuse(); }

void int4_linear(const Int4Matrix&, const float*, const void*, bool, int, void*, void*, int*, int, void*) { refuse(); }

void int4_dequantise(const Int4Matrix&, int, int, bool, void*, int, void*) { refuse(); }

}  // namespace ktinject::cuda
