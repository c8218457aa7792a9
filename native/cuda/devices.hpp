// The CUDA devices as the native core sees them. torch may see others: its build, runtime and driver are its own. Built
// twice: native/cuda with nvcc, native/no_cuda without, where the same symbols throw.
#pragma once

#include <string>
#include <vector>

#include "cuda/limits.hpp"
#include "cuda/stream.hpp"

namespace ktinject::cuda {

struct Device {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  size_t memory_bytes = 0;
  Limits limits;
};

// Whether the CUDA parts were compiled in.
bool is_built();

// Throws std::runtime_error where the core was built without CUDA, or the driver answers with an error.
std::vector<Device> devices();

// One of them; the driver is asked once a process. The reference stays valid. Throws as devices().
const Device& device_at(int index);

// For tests: from now on device_at() gives another device, whose launches then run on this one; null: its own again.
// Throws as devices().
void pretend(int index, const Device* other);

// Copies from a device to the host through a stream, and waits for it; captures of other threads go on.
void read_device(const void* from, void* to, size_t bytes, Stream stream);

}  // namespace ktinject::cuda
