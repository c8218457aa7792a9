#include "cuda/int4_linear.hpp"

#include <stdexcept>

namespace ktinject {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "this build of ktinject has no CUDA parts: nvcc was not found when it was made. Install the CUDA toolkit and "
      "build again.");
}

}  // namespace

Int4Scratch int4_scratch(const Int4Matrix&, int, int) { refuse(); }

void int4_linear(const Int4Matrix&, const float*, const void*, bool, int, void*, void*, int*, int, void*) { refuse(); }

void int4_dequantise(const Int4Matrix&, int, int, bool, void*, int, void*) { refuse(); }

}  // namespace ktinject
