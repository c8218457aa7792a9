#include "cuda/resident.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

Resident::Resident(const Experts&) { refuse(); }
void Resident::copy(const Experts&, int, void*, Stream) const { refuse(); }
void Resident::forward(const ResidentRequest&, Stream) const { refuse(); }

}  // namespace ktinject::cuda
