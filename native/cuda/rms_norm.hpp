// Root mean square normalisation of rows, in one kernel; in PyTorch's own operations it takes seven.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, n] = weight [n] * round(x [rows, n] / sqrt(mean(x^2) + epsilon)), everything of `dtype`, sums fp32: the
// rounding in between is what transformers does. Device pointers, contiguous; out may be x. Only enqueues.
void rms_norm(const void* x, const void* weight, void* out, DType dtype, int64_t rows, int n, float epsilon,
              Stream stream);

}  // namespace ktinject::cuda
