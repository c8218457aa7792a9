// Streams, events and mapped memory that end with their owner.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/check.cuh"

namespace ktinject::cuda {

struct Destroy {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using OwnStream = std::unique_ptr<CUstream_st, Destroy>;
using OwnEvent = std::unique_ptr<CUevent_st, Destroy>;

struct FreeMapped {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <class T>
using Mapped = std::unique_ptr<T, FreeMapped>;

inline OwnStream make_stream() {
  cudaStream_t made = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "creating a stream");
  return OwnStream(made);
}

inline OwnEvent make_event(unsigned flags) {
  cudaEvent_t made = nullptr;
  check_cuda(cudaEventCreateWithFlags(&made, flags), "creating an event");
  return OwnEvent(made);
}

}  // namespace ktinject::cuda
