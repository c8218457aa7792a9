// The linear layers of a decode step, for up to eight rows. Weights are read once. The norm before a layer and the
// residual after it are computed in the same kernel.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, n] = norm(x) W^T + bias, rounded, + residual, rounded again. W is up to four matrices stacked along n.
// All tensors are contiguous, 16-byte aligned, and of one dtype, fp16 or bf16. k is a multiple of 32. The first `coded`
// matrices are int4 instead, packed as operators/linears/int4_layout.py says, of groups and scales of one kind; then k
// is a multiple of 64, and their n_i are multiples of 16. Their codes and scales are exact, and their sums fp32.
struct DecodeLinear {
  static constexpr int kMostRows = 8;
  static constexpr int kMatrices = 4;

  const void* x = nullptr;              // [rows, k]
  const void* norm = nullptr;           // [k]: weight of an RMS norm, or null
  void* normed = nullptr;               // [rows, k]: receives the normed x, or null
  const void* weights[kMatrices] = {};  // [n_i, k], or the words of codes
  const void* biases[kMatrices] = {};   // [n_i], or null; beside codes fp32
  int n[kMatrices] = {};
  int coded = 0;                       // matrices in int4, which come before the others
  const void* scales[kMatrices] = {};  // of these
  int group_size = 0;                  // inputs that share a scale: 32, or a multiple of 64 that divides k
  bool has_zeros = false;              // scales are of 32 bits, with zero points; else of 16, and every zero point is 8
  bool fp16_scales = false;            // else bf16
  const void* residual = nullptr;      // [rows, n], or null
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
