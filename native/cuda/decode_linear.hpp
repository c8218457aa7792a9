// Linear layers of a decode step: up to eight rows through weights that are read once, with what transformers computes
// just before and after in the same kernel.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, n] = norm(x) W^T + bias, rounded, + residual, rounded again; W are up to three matrices on top of each
// other. All contiguous, of one dtype that is not fp32, 16-byte aligned; k is a multiple of 32.
struct DecodeLinear {
  static constexpr int kMostRows = 8;
  static constexpr int kMatrices = 3;

  const void* x = nullptr;              // [rows, k]
  const void* norm = nullptr;           // [k]: weight of an RMS norm, or null
  void* normed = nullptr;               // [rows, k]: receives the normed x, or null
  const void* weights[kMatrices] = {};  // [n_i, k]
  const void* biases[kMatrices] = {};   // [n_i], or null
  int n[kMatrices] = {};
  const void* residual = nullptr;  // [rows, n], or null
  void* out = nullptr;
  bool is_wide = false;        // out is fp32, not rounded; then without residual
  const void* then = nullptr;  // what the next linear layer will read, [then_bytes]; fetched into L2 meanwhile
  int64_t then_bytes = 0;
  int rows = 0, k = 0;
  float eps = 0;
};
// Throws std::invalid_argument for what it does not serve.
void decode_linear(const DecodeLinear& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
