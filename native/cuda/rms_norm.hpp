// Root mean square normalisation of rows in one kernel. PyTorch's own operations take seven.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, n] = (weight [n] + offset) * x [rows, n] / sqrt(mean(x^2) + epsilon). All of `dtype`, with sums in fp32;
// the weight of fp32 if it is wide. transformers' Llama rounds before the weight, too. Device pointers, contiguous; out
// may be x. Only enqueues.
struct RmsNorm {
  const void* x = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
  int64_t rows = 0;
  int n = 0;
  float epsilon = 0, offset = 0;
  bool rounds_first = true, is_wide_weight = false;
};
void rms_norm(const RmsNorm& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
