// What launches depend on of a device. It is asked of the device and never concluded from its generation: GPUs for
// consumers that are newer than Hopper have its programmatic dependent launch, and less than half of its shared memory.
#pragma once

#include <cstdint>

namespace ktinject::cuda {

struct Limits {
  int multiprocessors = 0;
  int block_shared_bytes = 0;           // the most that a block may ask for, static and dynamic together
  int multiprocessor_shared_bytes = 0;  // of all blocks that it runs at a time,
  int reserved_shared_bytes = 0;        // of which the system takes so much for each
  int multiprocessor_threads = 0;
  int64_t l2_bytes = 0;
  bool has_dependent_launch = false;  // the code that runs there has the instructions of programmatic dependent launch
  bool ends_long_kernels = false;  // the driver ends kernels that run for seconds, mostly where a display is attached
};

// Blocks that a multiprocessor runs at a time.
constexpr int blocks_at_once(const Limits& limits, int shared_bytes, int threads) {
  constexpr int kUnit = 128;  // in which shared memory is given out
  const int taken = (shared_bytes + kUnit - 1) / kUnit * kUnit + limits.reserved_shared_bytes;
  const int by_shared = limits.multiprocessor_shared_bytes / taken;
  const int by_threads = limits.multiprocessor_threads / threads;
  return by_shared < by_threads ? by_shared : by_threads;
}

}  // namespace ktinject::cuda
