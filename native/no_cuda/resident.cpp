#include "cuda/resident.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

Resident::Resident(const moe::Experts&) { refuse(); }
void Resident::copy(const moe::Experts&, int, void*, Stream) const { refuse(); }
void Resident::forward(const ResidentRequest&, Stream) const { refuse(); }

}  // namespace ktinject::cuda
