// RMS norms of many rows, on the pool.
#pragma once

#include <cstddef>

#include "gemm/step_ops.hpp"

namespace ktinject::decode {

// out [rows, n] = norm of x [rows, n], both of dtype, as is its weight [n].
void norm_rows(const void* x, DType dtype, size_t rows, const gemm::Norm& norm, void* out);

}  // namespace ktinject::decode
