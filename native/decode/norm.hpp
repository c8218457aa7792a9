// RMS norms of many rows, on the pool.
#pragma once

#include <cstddef>

#include "runtime/dtype.hpp"

namespace ktinject::decode {

// out [rows, n] = norm of x [rows, n], both of dtype, as is weight [n]; see StepOps::rms_norm.
void norm_rows(const void* x, DType dtype, size_t rows, int n, const void* weight, float epsilon, void* out);

}  // namespace ktinject::decode
