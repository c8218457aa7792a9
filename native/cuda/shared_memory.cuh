// More shared memory than the 48 KB that every launch may ask for.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <stdexcept>
#include <string>

#include "cuda/check.cuh"
#include "cuda/devices.hpp"
#include "cuda/on_device.cuh"

namespace ktinject::cuda {

// Of one kernel, which always asks for the same; static where it is launched.
class SharedMemory {
 public:
  // Before a launch with `bytes` of dynamic shared memory. The driver is told once a device, which is the current one.
  // Throws std::runtime_error, which `what` begins, where the device allows less.
  template <class... Parameters>
  void allow(const char* what, void (*kernel)(Parameters...), size_t bytes, int device) {
    const uint64_t bit = uint64_t{1} << (device % 64);
    const bool is_told = (told_.load(std::memory_order_acquire) & bit) != 0;
    if (!is_told) {
      const AsideOfCaptures aside;
      cudaFuncAttributes attributes{};
      check_cuda(cudaFuncGetAttributes(&attributes, kernel), std::string(what) + ": asking what the kernel needs");
      static_bytes_.store(attributes.sharedSizeBytes, std::memory_order_relaxed);
    }
    const size_t needed = bytes + static_bytes_.load(std::memory_order_relaxed);
    const auto allowed = static_cast<size_t>(device_at(device).limits.block_shared_bytes);
    if (needed > allowed)
      throw std::runtime_error(std::string(what) + ": a block of the kernel needs " + std::to_string(needed) +
                               " bytes of shared memory, and this device allows " + std::to_string(allowed));
    if (is_told) return;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               std::string(what) + ": asking for shared memory");
    told_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<uint64_t> told_{0};
  std::atomic<size_t> static_bytes_{0};
};

}  // namespace ktinject::cuda
