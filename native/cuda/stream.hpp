// A CUDA stream as launches take it.
#pragma once

#include <cstdint>

namespace ktinject::cuda {

// With its device: the handle of the default stream is the same on every device.
struct Stream {
  int device = 0;
  uintptr_t handle = 0;
};

}  // namespace ktinject::cuda
