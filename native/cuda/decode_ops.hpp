// What surrounds the experts in a decode step, as few kernels: what precedes attention, attention over a
// cache, and the choice of experts. All tensors are contiguous unless strides are given; one token a row.
#pragma once

#include <cstdint>

#include "moe/stages.hpp"

namespace ktinject {

// Queries and keys are normed (where there is a weight) and rotated; keys and values go into the cache.
struct AttentionInput {
  const void* q = nullptr;  // [batch, q_heads, size]
  const void* k = nullptr;  // [batch, kv_heads, size]
  const void* v = nullptr;
  const void* q_weight = nullptr;  // [size] or null
  const void* k_weight = nullptr;
  const void* cos = nullptr;  // [batch, size]
  const void* sin = nullptr;
  const int64_t* place = nullptr;  // [1]: where in the cache
  void* q_out = nullptr;           // [batch, q_heads, size]
  void* keys = nullptr;            // [batch, kv_heads, capacity, size], rows of `size` contiguous
  void* values = nullptr;
  int batch = 0, q_heads = 0, kv_heads = 0, size = 0;
  int64_t batch_stride = 0, head_stride = 0;  // of the cache, in elements
  float eps = 0;
};
void attention_input(const AttentionInput& input, DType dtype, uintptr_t stream);

// out [batch, q_heads, size] = softmax(scale * q keys^T) values, over the places up to `place` that the mask allows.
struct Attention {
  const void* q = nullptr;
  const void* keys = nullptr;
  const void* values = nullptr;
  const bool* mask = nullptr;  // [batch, mask_stride]
  const int64_t* place = nullptr;
  void* out = nullptr;
  float* scratch = nullptr;  // [batch, q_heads, splits, size + 2]; unused with one split
  int batch = 0, q_heads = 0, kv_heads = 0, size = 0, splits = 1;
  int64_t batch_stride = 0, head_stride = 0, mask_stride = 0;
  float scale = 1;
};
void attention(const Attention& input, DType dtype, uintptr_t stream);

// Softmax over logits [rows, experts], the top_k greatest, their weights divided by their sum if `normed`.
// weights [rows, top_k] of dtype, ids [rows, top_k].
void route(const void* logits, void* weights, int64_t* ids, int rows, int experts, int top_k, bool normed, DType dtype,
           uintptr_t stream);

}  // namespace ktinject
