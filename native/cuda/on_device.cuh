#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.cuh"
#include "cuda/stream.hpp"

namespace ktinject::cuda {

// Makes a device the current one, where launches and allocations go, for as long as this object lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "asking for the current device");
    if (before_ != device) check_cuda(cudaSetDevice(device), "choosing a device");
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// For calls that a capture forbids, such as waiting for a device. Another thread may be capturing a graph in streams of
// its own; what happens while this object lives touches none of them.
class AsideOfCaptures {
 public:
  AsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AsideOfCaptures(const AsideOfCaptures&) = delete;
  AsideOfCaptures& operator=(const AsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Does the same for the device of a stream, and converts to the stream.
class OnStream {
 public:
  explicit OnStream(Stream stream) : here_(stream.device), stream_(reinterpret_cast<cudaStream_t>(stream.handle)) {}
  operator cudaStream_t() const { return stream_; }

 private:
  OnDevice here_;
  cudaStream_t stream_;
};

// Makes later work in `stream` wait for all work that is in `before` now. what: for the error.
inline void follow(cudaStream_t stream, cudaStream_t before, const char* what) {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  const cudaError_t recorded = cudaEventRecord(event, before);
  const cudaError_t waits = recorded == cudaSuccess ? cudaStreamWaitEvent(stream, event, 0) : recorded;
  cudaEventDestroy(event);
  check_cuda(waits, what);
}

}  // namespace ktinject::cuda
