// A decode step of Mamba-2 and of a short convolution, each between its input and its output projection.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [rows, heads, head_size] = norm(y silu(z)), of one token a row, where
//
//   x, B, C = silu(the convolution of each channel with its last inputs)
//   dt      = softplus(dt + dt_bias)
//   S       = exp(-exp(a_log) dt) S + dt B x
//   y       = S C + d x
//
// B, C and the norm's mean are of a group of heads. Dao, Gu: Transformers are SSMs (arXiv 2405.21060); with the
// roundings of mamba2_selective_state_update in transformers' modeling_nemotron_h.py. For fp16 and bf16; states are
// fp32.
struct Mamba2 {
  static constexpr int kMostState = 256;  // state_size is 32, 64, 128 or 256
  static constexpr int kValues = 32;      // of a head, that a thread block works on; head_size is a multiple

  const void* z = nullptr;      // [rows, heads, head_size]
  const void* mixed = nullptr;  // [rows, channels]: heads * head_size of x, then groups * state_size of B and of C
  const void* dt = nullptr;     // [rows, heads]
  void* inputs = nullptr;       // [rows, channels, taps]: the newest last; moved on by a token
  float* states = nullptr;      // [rows, heads, head_size, state_size]: moved on by a token
  const void* taps_weight = nullptr;  // [channels, taps]; 2 to 8 taps
  const void* taps_bias = nullptr;    // [channels] or null
  const void* a_log = nullptr;        // [heads]
  const void* dt_bias = nullptr;      // [heads]
  const void* d = nullptr;            // [heads]
  const void* norm = nullptr;         // [heads * head_size]
  bool is_wide_a_log = false, is_wide_dt_bias = false, is_wide_d = false, is_wide_norm = false;  // fp32
  float eps = 0;                                                                                 // of the norm
  float* scratch = nullptr;          // [rows, heads, head_size]
  unsigned* block_counts = nullptr;  // [rows, groups]: zero, and zero again after each call
  void* out = nullptr;
  const void* then = nullptr;  // [then_bytes]: the next layer's weights, which this one fetches into L2
  int64_t then_bytes = 0;
  int64_t stride = 0;  // of z, mixed and dt, from row to row, in values
  int rows = 0, heads = 0, groups = 0, head_size = 0, state_size = 0, taps = 0;
};
// Throws std::invalid_argument for what it does not serve.
void mamba2(const Mamba2& input, DType dtype, Stream stream);

// out [rows, n] = C convolution(B x), as transformers' modeling_lfm2.py. For fp16 and bf16.
struct ShortConvolution {
  const void* projected = nullptr;    // [rows, B | C | x of n values each]
  void* inputs = nullptr;             // [rows, n, taps]: the newest last; moved on by a token
  const void* taps_weight = nullptr;  // [n, taps]; 2 to 8 taps
  const void* taps_bias = nullptr;    // [n] or null
  void* out = nullptr;
  int64_t stride = 0;  // of projected, from row to row, in values
  int rows = 0, n = 0, taps = 0;
};
void short_convolution(const ShortConvolution& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
