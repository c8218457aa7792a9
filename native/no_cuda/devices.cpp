#include "cuda/devices.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

bool cuda_built() { return false; }

std::vector<CudaDevice> cuda_devices() { refuse(); }

}  // namespace ktinject
