#include "cuda/resident.hpp"

#include <stdexcept>

namespace ktinject {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "this build of ktinject has no CUDA parts: nvcc was not found when it was made. Install the CUDA toolkit and "
      "build again.");
}

}  // namespace

Resident::Resident(const Experts&) { refuse(); }
void Resident::copy(const Experts&, int, void*, uintptr_t) const { refuse(); }
void Resident::forward(const ResidentRequest&, uintptr_t) const { refuse(); }

}  // namespace ktinject
