#include <cuda_runtime_api.h>

#include <stdexcept>

#include "cuda/devices.hpp"
#include "cuda/on_device.cuh"

namespace ktinject::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that was reported is not to be found again by the next call
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) +
                           ". Look at the driver with nvidia-smi.");
}

}  // namespace

bool is_built() { return true; }

std::vector<Device> devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting CUDA devices");
  std::vector<Device> found;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device), "reading a CUDA device's properties");
    found.push_back({properties.name, properties.major, properties.minor, properties.totalGlobalMem,
                     properties.multiProcessorCount});
  }
  return found;
}

void read_device(const void* from, void* to, size_t bytes, Stream from_stream) {
  const OnStream stream(from_stream);
  const AsideOfCaptures aside;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "reading from the device");
  check_cuda(cudaStreamSynchronize(stream), "reading from the device");
}

}  // namespace ktinject::cuda
