#include "cuda/devices.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

bool is_built() { return false; }

std::vector<Device> devices() { refuse(); }

void read_device(const void*, void*, size_t, Stream) { refuse(); }

}  // namespace ktinject::cuda
