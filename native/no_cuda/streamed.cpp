#include "cuda/streamed.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

Streamed::Streamed(const moe::Experts& experts, int first) : experts_(experts), first_(first) { refuse(); }
Streamed::~Streamed() = default;
size_t Streamed::packed_bytes(int) const { return 0; }
void Streamed::copy(const std::vector<int>&, void*, Stream) const {}
void Streamed::unpack(const void*, int, void*, void*, Stream) const {}
void Streamed::unpack_resident(const Resident&, const void*, const std::vector<int>&, void*, void*, Stream) const {}
void Streamed::activate(const void*, DType, size_t, void*, Stream) const {}
void Streamed::sum(const Answers&, void*, DType, Stream) const {}
void add_from_host(const void*, const float*, void*, size_t, DType, Stream) { refuse(); }

}  // namespace ktinject::cuda
