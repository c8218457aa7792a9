#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/devices.hpp"

namespace ktinject {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that was reported is not to be found again by the next call
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) +
                           ". Look at the driver with nvidia-smi.");
}

}  // namespace

bool cuda_built() { return true; }

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting CUDA devices");
  std::vector<CudaDevice> devices;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "reading a CUDA device's properties");
    devices.push_back({properties.name, properties.major, properties.minor, properties.totalGlobalMem,
                       properties.multiProcessorCount});
  }
  return devices;
}

}  // namespace ktinject
