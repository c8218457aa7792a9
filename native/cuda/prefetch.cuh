// Fetching into L2 what is read later. That changes nothing, so a kernel may do it before the kernels in front of it
// are done, also with what they write.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace ktinject::cuda {

constexpr int64_t kLine = 128;  // bytes

// The line that this address is in.
__device__ inline void prefetch_line(const void* address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// Each thread block of a grid fetches a share of what the next layer reads: `index` of `blocks`. One thread calls it.
// Only on Hopper, where one instruction fetches many lines.
__device__ inline void prefetch_share(const void* from, int64_t bytes, int index, int blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr int64_t kMost = 16384;  // of an instruction
  // In lines, so that 32 bits are enough to divide.
  const auto lines = static_cast<uint32_t>((bytes + kLine - 1) / kLine), all = static_cast<uint32_t>(blocks);
  const int64_t share = int64_t{(lines + all - 1) / all} * kLine, first = share * index;
  const int64_t end = first + share < bytes ? first + share : bytes;
#pragma unroll 1
  for (int64_t at = first; at < end; at += kMost)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const std::byte*>(from) + at),
                 "r"(static_cast<uint32_t>(end - at < kMost ? end - at : kMost)));
#endif
}

}  // namespace ktinject::cuda
