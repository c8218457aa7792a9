// A decode step of linear attention by the gated delta rule, between its input and its output projection.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// What a projection gives for each head of keys, of the model's dtype. A head of keys has value_heads / key_heads heads
// of values, whose parts lie side by side.
struct DeltaInput {
  const void* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;  // from row to row, from one head of keys to the next; in values
};

// out [rows, value_heads, value_size] = norm(o) silu(z), of one token a row, where
//
//   q, k, v = silu(the convolution of each channel with its last inputs); q and k of length 1
//   S       = exp(-exp(a_log) softplus(a + dt_bias)) S
//   S       = S + k (sigmoid(b) (v - k S))
//   o       = q S / sqrt(key_size)
//
// Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv 2412.06464); with the convolution, gates and roundings of
// transformers' modeling_qwen3_next.py and modeling_qwen3_5_moe.py. For fp16 and bf16; sums and states are fp32.
struct GatedDelta {
  static constexpr int kMostSize = 256;                    // of key_size and value_size, which are multiples of 32
  static constexpr int kColumns = 32;                      // of a head's state, that a thread block works on
  static constexpr int kMostParts = kMostSize / kColumns;  // of a head's columns

  DeltaInput q, k;                    // [rows, key_heads, key_size]
  DeltaInput v, z;                    // [rows, key_heads, value_heads / key_heads, value_size]
  DeltaInput b, a;                    // [rows, key_heads, value_heads / key_heads]
  void* inputs = nullptr;             // [rows, channels of all q, k and v, taps]: the newest last; moved on by a token
  float* states = nullptr;            // [rows, value_heads, key_size, value_size]: moved on by a token
  const void* taps_weight = nullptr;  // [channels, taps]; 2 to 8 taps
  const void* a_log = nullptr;        // [value_heads]
  const void* dt_bias = nullptr;      // [value_heads]
  const void* norm = nullptr;         // [value_size]
  bool is_wide_a_log = false, is_wide_dt_bias = false, is_wide_norm = false;  // fp32, not of the model's dtype
  float eps = 0;                                                              // of the norm
  float* scratch = nullptr;          // [rows, value_heads, value_size + kMostParts]
  unsigned* block_counts = nullptr;  // [rows, key_heads]: zero, and zero again after each call
  void* out = nullptr;
  const void* then = nullptr;  // [then_bytes]: the next layer's weights, which this one fetches into L2
  int64_t then_bytes = 0;
  int rows = 0, key_heads = 0, value_heads = 0, key_size = 0, value_size = 0, taps = 0;
};
// Throws std::invalid_argument for what it does not serve.
void gated_delta(const GatedDelta& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
