// The linear layers of a decode step, for up to eight rows. Weights are read once. The norm before a layer and the
// residual after it are computed in the same kernel.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, n] = norm(x) W^T + bias, rounded, + residual, rounded again. W is up to four matrices stacked along n.
// All tensors are contiguous, 16-byte aligned, and of one dtype, fp16 or bf16. k is a multiple of 32.
struct DecodeLinear {
  static constexpr int kMostRows = 8;
  static constexpr int kMatrices = 4;

  const void* x = nullptr;              // [rows, k]
  const void* norm = nullptr;           // [k]: weight of an RMS norm, or null
  void* normed = nullptr;               // [rows, k]: receives the normed x, or null
  const void* weights[kMatrices] = {};  // [n_i, k]
  const void* biases[kMatrices] = {};   // [n_i], or null
  int n[kMatrices] = {};
  const void* residual = nullptr;  // [rows, n], or null
  void* out = nullptr;
  bool is_wide = false;        // out is fp32 and not rounded; there is no residual then
  const void* then = nullptr;  // [then_bytes]: the next layer's weights, which this one fetches into L2
  int64_t then_bytes = 0;
  int rows = 0, k = 0;
  float eps = 0, norm_offset = 0;  // added to the mean square, and to the norm's weight
  bool rounds_first = true;        // the norm rounds before it multiplies its weight; it rounds the product, too
};
// Throws std::invalid_argument for what it does not serve.
void decode_linear(const DecodeLinear& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
