#include <cuda_runtime.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

#include "cuda/devices.hpp"
#include "cuda/on_device.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kMostDevices = 64;
// Never freed: who launches may hold a reference.
std::atomic<const Device*> known[kMostDevices];
std::mutex known_mutex;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that was reported is not to be found again by the next call
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error) +
                           ". Look at the driver with nvidia-smi.");
}

// Stands for all kernels that are compiled for the same architectures.
__global__ void sample_kernel() {}

// Whether the code that this device runs has the instructions of programmatic dependent launch. A build for older
// devices alone does not, wherever it runs: its kernels would begin early, and not wait for those before them.
bool has_dependent_launch(int index) {
  const OnDevice here(index);
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, sample_kernel) == cudaSuccess) return attributes.ptxVersion >= 90;
  cudaGetLastError();  // there is no code for this device: its launches will say so
  return false;
}

int attribute(cudaDeviceAttr asked, int index) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, asked, index), "reading a CUDA device's properties");
  return value;
}

Device read(int index) {
  const AsideOfCaptures aside;  // this may begin what CUDA does at the first call for a device
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "reading a CUDA device's properties");
  Limits limits;
  limits.multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
  limits.block_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  limits.multiprocessor_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
  limits.reserved_shared_bytes = attribute(cudaDevAttrReservedSharedMemoryPerBlock, index);
  limits.multiprocessor_threads = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, index);
  limits.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
  limits.has_dependent_launch = has_dependent_launch(index);
  limits.ends_long_kernels = attribute(cudaDevAttrKernelExecTimeout, index) != 0;
  return {properties.name, properties.major, properties.minor, properties.totalGlobalMem, limits};
}

std::atomic<const Device*>& place_of(int index) {
  if (index >= 0 && index < kMostDevices) return known[index];
  throw std::runtime_error("CUDA device " + std::to_string(index) + ": allowed are 0 to " +
                           std::to_string(kMostDevices - 1));
}

}  // namespace

bool is_built() { return true; }

std::vector<Device> devices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting CUDA devices");
  std::vector<Device> found;
  for (int index = 0; index < count; ++index) found.push_back(read(index));
  return found;
}

const Device& device_at(int index) {
  std::atomic<const Device*>& place = place_of(index);
  if (const Device* found = place.load(std::memory_order_acquire)) return *found;
  const std::lock_guard lock(known_mutex);
  if (const Device* found = place.load(std::memory_order_acquire)) return *found;
  const Device* made = new Device(read(index));
  place.store(made, std::memory_order_release);
  return *made;
}

void pretend(int index, const Device* other) {
  place_of(index).store(other == nullptr ? new Device(read(index)) : new Device(*other), std::memory_order_release);
}

void read_device(const void* from, void* to, size_t bytes, Stream from_stream) {
  const OnStream stream(from_stream);
  const AsideOfCaptures aside;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "reading from the device");
  check_cuda(cudaStreamSynchronize(stream), "reading from the device");
}

}  // namespace ktinject::cuda
