// The CUDA devices as the native core itself sees them, which need not be what torch sees: driver, runtime and build
// decide. Built twice: native/cuda with nvcc, native/no_cuda without, where the same symbols refuse.
#pragma once

#include <string>
#include <vector>

namespace ktinject {

struct CudaDevice {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  size_t memory_bytes = 0;
  int multiprocessors = 0;
};

// Whether the CUDA parts were compiled in.
bool cuda_built();

// Throws std::runtime_error where the core was built without CUDA, or the driver answers with an error.
std::vector<CudaDevice> cuda_devices();

}  // namespace ktinject
