#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ktinject::cuda {

// Throws std::runtime_error: "what: CUDA's words".
inline void check_cuda(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that was reported is not to be found again by the next call
  throw std::runtime_error(what + ": " + cudaGetErrorString(error));
}

}  // namespace ktinject::cuda
