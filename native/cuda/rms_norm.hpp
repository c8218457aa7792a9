// Root mean square normalisation of rows in one kernel. PyTorch's own operations take seven.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, n] = weight [n] * round(x [rows, n] / sqrt(mean(x^2) + epsilon)). All of `dtype`, with sums in fp32;
// transformers rounds in between, too. Device pointers, contiguous; out may be x. Only enqueues.
void rms_norm(const void* x, const void* weight, void* out, DType dtype, int64_t rows, int n, float epsilon,
              Stream stream);

}  // namespace ktinject::cuda
