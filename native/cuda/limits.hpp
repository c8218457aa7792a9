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

}  // namespace ktinject::cuda
