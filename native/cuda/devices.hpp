// The CUDA devices as the native core sees them. torch may see others: its build, runtime and driver are its own. Built
// twice: native/cuda with nvcc, native/no_cuda without, where the same symbols throw.
#pragma once

#include <string>
#include <vector>

#include "cuda/stream.hpp"

namespace ktinject::cuda {

struct Device {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  size_t memory_bytes = 0;
  int multiprocessors = 0;
};

// Whether the CUDA parts were compiled in.
bool is_built();

// Throws std::runtime_error where the core was built without CUDA, or the driver answers with an error.
std::vector<Device> devices();

// Copies from a device to the host through a stream, and waits for it; captures of other threads go on.
void read_device(const void* from, void* to, size_t bytes, Stream stream);

}  // namespace ktinject::cuda
