// What every symbol of native/cuda does in a build without nvcc.
#pragma once

#include <stdexcept>

namespace ktinject::cuda {

[[noreturn]] inline void refuse() {
  throw std::runtime_error(
      "this build of ktinject has no CUDA parts: nvcc was not found when it was made. Install the CUDA toolkit and "
      "build again.");
}

}  // namespace ktinject::cuda
