#include "cuda/streamed.hpp"

#include <stdexcept>

namespace ktinject {

Streamed::Streamed(const Experts& experts) : experts_(experts) {
  throw std::runtime_error(
      "this build of ktinject has no CUDA parts: nvcc was not found when it was made. Install the CUDA toolkit and "
      "build again.");
}
Streamed::~Streamed() = default;
size_t Streamed::packed_bytes(int) const { return 0; }
void Streamed::copy(int, int, void*, uintptr_t) const {}
void Streamed::unpack(const void*, int, void*, void*, uintptr_t) const {}

}  // namespace ktinject
