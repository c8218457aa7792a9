#include "cuda/devices.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::cuda {

bool is_built() { return false; }

std::vector<Device> devices() { refuse(); }

const Device& device_at(int) { refuse(); }

void pretend(int, const Device*) { refuse(); }

void read_device(const void*, void*, size_t, Stream) { refuse(); }

}  // namespace ktinject::cuda
