// Prompts of linear attention: the short convolution and the gated delta rule of many tokens, between the projections.
//
// The recurrence is computed token by token, in the form of gated_delta.hpp. Columns of a state are independent of each
// other, so a task keeps some of them in the first cache over many tokens, and takes all its time for arithmetic.
#pragma once

#include <cstddef>

#include "gemm/step_ops.hpp"

namespace ktinject::attention {

// out [batch, tokens, channels] = the sum over t of weight [t, channel] · x [batch, token - taps + 1 + t, channel], and
// bias, rounded; then silu of it, rounded. What lies before the first token is 0.
struct PromptConvolution {
  const void* x = nullptr;  // [batch, tokens, channels] of dtype; channels lie together
  ptrdiff_t batch_stride = 0, token_stride = 0;
  const float* weight = nullptr;  // [taps, channels]
  const float* bias = nullptr;    // [channels], or none
  bool has_silu = false;
  int batch = 0, tokens = 0, channels = 0, taps = 0;
  DType dtype = DType::f32;
  void* out = nullptr;
};

void convolve_prompt(const PromptConvolution& prompt);

// A tensor [batch, tokens, heads, values] whose values lie together.
struct Heads {
  const void* data = nullptr;
  ptrdiff_t batch_stride = 0, token_stride = 0, head_stride = 0;
};

// The rule of gated_delta.hpp for all tokens, with exp(g) for the decay. States move on in place.
struct PromptDelta {
  Heads q, k, v;
  const float* g = nullptr;      // [batch, tokens, value_heads]
  const float* beta = nullptr;   // [batch, tokens, value_heads]
  bool has_unit_length = false;  // q and k of length 1 first
  float scale = 1;               // of q
  int batch = 0, tokens = 0, key_heads = 0, value_heads = 0, key_size = 0, value_size = 0;
  DType dtype = DType::f32;
  float* states = nullptr;  // [batch, value_heads, key_size, value_size]
  void* out = nullptr;      // [batch, tokens, value_heads, value_size] of dtype
};

void delta_prompt(const PromptDelta& prompt);

}  // namespace ktinject::attention
