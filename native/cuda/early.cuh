// Kernels that begin while the one before them in the stream still runs (programmatic dependent launch). In a chain of
// short kernels, as much time would be spent between kernels as in them. Where the code has no instructions for that
// (before Hopper, or built for older devices alone), these are plain launches.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "cuda/check.cuh"
#include "cuda/devices.hpp"

namespace ktinject::cuda {

// Waits until all work of the stream before this kernel is done and can be seen. Until then, a kernel may only read
// weights, and must write nothing that others read. Every kernel of a captured step calls it in every thread: one
// kernel without it would break this promise for all kernels that follow.
__device__ inline void await_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel begin: it does when every block has called this or ended.
__device__ inline void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct Launch {
  dim3 grid, threads;
  cudaStream_t stream;
  size_t shared = 0;
};

// `kernel` must call await_previous() in every thread, before it touches what others write.
template <class... Parameters, class... Arguments>
void launch_early(const char* what, void (*kernel)(Parameters...), const Launch& launch, Arguments&&... arguments) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.threads;
  config.dynamicSmemBytes = launch.shared;
  config.stream = launch.stream;
  config.attrs = &early;
  config.numAttrs = device_at(device).limits.has_dependent_launch ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...), what);
}

}  // namespace ktinject::cuda
