// Kernels that begin while the one before them in the stream still runs (programmatic dependent launch). In a chain of
// short kernels, as much time would be spent between kernels as in them. Before Hopper these are plain launches.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <utility>

#include "cuda/check.cuh"

namespace ktinject::cuda {

// Waits until all work of the stream before this kernel is done and can be seen. Until then, a kernel may only rely on
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

// A kernel's instructions come from memory, too: about 8 ns each for the first warp of a multiprocessor that comes to
// them, since other kernels' weights and code have pushed them out of the caches. That is most of a short kernel's
// time. So a kernel that waits anyway goes through its work once before: body(false) reads whatever is there, and must
// change nothing that others see. Then body(true) does the work. Takes the place of await_previous().
#if __CUDA_ARCH__ >= 900 && !defined(KTINJECT_NO_REHEARSAL)
constexpr bool kRehearses = true;
#else
constexpr bool kRehearses = false;
#endif
template <class Body>
__device__ __forceinline__ void rehearse(Body&& body) {
  if constexpr (kRehearses) {
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == 1) await_previous();
      body(turn == 1);
    }
  } else {
    await_previous();
    body(true);
  }
}

inline bool is_hopper(int device) {
  static std::atomic<uint64_t> known{0}, found{0};
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((known.load(std::memory_order_acquire) & bit) == 0) {
    int major = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "asking for a device's age");
    if (major >= 9) found.fetch_or(bit, std::memory_order_relaxed);
    known.fetch_or(bit, std::memory_order_release);
  }
  return (found.load(std::memory_order_relaxed) & bit) != 0;
}

// Whether a kernel's code was compiled for Hopper, and not only for GPUs before it.
template <class... Parameters>
bool has_hopper_code(void (*kernel)(Parameters...)) {
  cudaFuncAttributes found{};
  check_cuda(cudaFuncGetAttributes(&found, kernel), "asking what a kernel was compiled for");
  return found.ptxVersion >= 90;
}

struct Launch {
  dim3 grid, threads;
  cudaStream_t stream;
  size_t shared = 0;
  unsigned cluster = 0;  // blocks beside each other that are one; 0: there are no clusters. Not before Hopper.
};

// `kernel` must call await_previous() in every thread, before it touches what others write.
template <class... Parameters, class... Arguments>
void launch_early(const char* what, void (*kernel)(Parameters...), const Launch& launch, Arguments&&... arguments) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current device");
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = launch.cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.threads;
  config.dynamicSmemBytes = launch.shared;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = is_hopper(device) ? (launch.cluster > 0 ? 2 : 1) : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(std::forward<Arguments>(arguments))...), what);
}

}  // namespace ktinject::cuda
