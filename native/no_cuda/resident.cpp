#include "cuda/resident.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

Resident::Resident(const Experts&) { refuse(); }
void Resident::copy(const Experts&, int, void*, uintptr_t) const { refuse(); }
void Resident::forward(const ResidentRequest&, uintptr_t) const { refuse(); }

}  // namespace ktinject
