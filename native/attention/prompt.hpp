// Attention of a prompt's tokens on the CPU: softmax of scores, by heads in groups that share keys and values.
#pragma once

#include <cstddef>

#include "attention/linear_prompt.hpp"

namespace ktinject::attention {

// A mask [batch or 1, 1, tokens, keys]: of bool, or of the model's dtype and added to scores, where values up to
// `lowest` hide a key. Without data, a token sees all keys up to its own, and the last token has the last key.
struct PromptMask {
  const void* data = nullptr;
  ptrdiff_t batch_stride = 0, token_stride = 0;
  bool is_bool = true;
  float lowest = 0;
};

struct PromptAttention {
  Heads q, k, v;
  PromptMask mask;
  const float* sinks = nullptr;  // [heads]: scores that take part in the softmax and have no value (gpt-oss)
  float scale = 1;
  int batch = 0, tokens = 0, keys = 0, heads = 0, groups = 0, key_size = 0, value_size = 0;
  DType dtype = DType::f32;
  void* out = nullptr;  // [batch, tokens, heads, value_size] of dtype; 0 for tokens that see nothing
};

// Whether every token saw a key or has sinks.
bool attend_prompt(const PromptAttention& prompt);

}  // namespace ktinject::attention
