#pragma once

#include <cuda_runtime_api.h>

#include "cuda/check.cuh"
#include "cuda/stream.hpp"

namespace ktinject::cuda {

// Makes a device the current one for as long as it lives: where launches and allocations go.
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

// Another thread may be capturing a graph, in streams of its own; what happens in this scope touches none of them.
class AsideOfCaptures {
 public:
  AsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AsideOfCaptures(const AsideOfCaptures&) = delete;
  AsideOfCaptures& operator=(const AsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The same for a stream's device; converts to the stream.
class OnStream {
 public:
  explicit OnStream(Stream stream) : here_(stream.device), stream_(reinterpret_cast<cudaStream_t>(stream.handle)) {}
  operator cudaStream_t() const { return stream_; }

 private:
  OnDevice here_;
  cudaStream_t stream_;
};

}  // namespace ktinject::cuda
