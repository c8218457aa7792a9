// A CUDA stream as launches take it.
#pragma once

#include <cstdint>

namespace ktinject::cuda {

// The handle alone would not do: the default stream has the same one on every device.
struct Stream {
  int device = 0;
  uintptr_t handle = 0;
};

}  // namespace ktinject::cuda
