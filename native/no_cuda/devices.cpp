#include "cuda/devices.hpp"

#include <stdexcept>

namespace ktinject {

bool cuda_built() { return false; }

std::vector<CudaDevice> cuda_devices() {
  throw std::runtime_error(
      "this build of ktinject has no CUDA parts: nvcc was not found when it was made. Install the CUDA toolkit and "
      "build again.");
}

}  // namespace ktinject
