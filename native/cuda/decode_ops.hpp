// What surrounds the experts in a decode step, as few kernels. One token a row, so every tensor is small and the time
// of a kernel is mostly its launch and what it waits for: transformers takes some fifty a layer.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [batch, q_heads, size] = softmax(scale * q keys^T) values over the cache up to `cache_position` that the mask
// allows. Before that, queries and the new key are normed (where there is a weight) and rotated, and the new key and
// value go into the cache, at `cache_position`. Rows of `size` are contiguous and 16-byte aligned everywhere; not for
// fp32.
struct Attention {
  const void* q = nullptr;  // [batch, q_heads, size]
  const void* k = nullptr;  // [batch, kv_heads, size]
  const void* v = nullptr;
  const void* q_weight = nullptr;  // [size] or null
  const void* k_weight = nullptr;
  const void* cos = nullptr;  // [batch, size]
  const void* sin = nullptr;
  const int64_t* cache_position = nullptr;  // [1]
  const bool* mask = nullptr;               // [batch, more than `cache_position`]
  void* keys = nullptr;                     // [batch, kv_heads, capacity, size]
  void* values = nullptr;
  void* out = nullptr;
  float* scratch = nullptr;          // attention_scratch() values; unused with one split
  unsigned* block_counts = nullptr;  // [batch, q_heads]: zero, and zero again after each call
  int batch = 0, q_heads = 0, kv_heads = 0, size = 0;
  int splits = 1;                             // of the cache, each for blocks of its own
  int64_t q_stride = 0, kv_stride = 0;        // from row to row of the batch, in elements
  int64_t rotation_stride = 0;                // of cos and sin, 0 where one serves all rows
  int64_t batch_stride = 0, head_stride = 0;  // of the cache
  int64_t mask_stride = 0;
  float eps = 0, scale = 1;
};
void attention(const Attention& input, DType dtype, Stream stream);
// Values of scratch for a split of a row's heads, the greatest that any shape needs.
constexpr int64_t attention_scratch(int q_heads, int size) { return int64_t{8} * q_heads * (size + 2); }

// What latent attention does before it attends: the last `rope` values of each query head are rotated where they lie;
// the first `rank` of kv are normed and go into `keys` at `cache_position`, the rest is rotated and goes into `values`.
// Not for fp32.
struct Latent {
  void* q = nullptr;           // [rows, heads, nope + rope]
  const void* kv = nullptr;    // [rows, rank + rope]
  const void* norm = nullptr;  // [rank]
  const void* cos = nullptr;   // [rows, at least rope / 2]
  const void* sin = nullptr;
  const int64_t* cache_position = nullptr;  // [1]
  void* keys = nullptr;                     // [rows, capacity, rank]
  void* values = nullptr;                   // [rows, capacity, rope]
  int rows = 0, heads = 0, nope = 0, rope = 0, rank = 0;
  bool turns_neighbours = false;        // values 2i and 2i + 1, which come to i and i + rope / 2; else these
  int64_t q_stride = 0, kv_stride = 0;  // from row to row, in elements
  int64_t rotation_stride = 0;          // of cos and sin, 0 where one serves all rows
  int64_t keys_stride = 0, values_stride = 0;
  float eps = 0;
};
void latent(const Latent& input, DType dtype, Stream stream);

// Softmax over logits [rows, experts], the top_k greatest, their weights divided by their sum if `normed`.
// weights [rows, top_k] of dtype, ids [rows, top_k].
void route(const void* logits, void* weights, int64_t* ids, int rows, int experts, int top_k, bool normed, DType dtype,
           Stream stream);

// Sigmoids of logits [rows, experts]: the top_k greatest after `bias` is added, among the `kept` groups of experts
// whose two greatest have the greatest sums. Weights are the sigmoids, divided by their sum if `normed`, times `scale`.
// Experts in the order in which torch.topk(sorted=False) gives them: by their place, the last chosen at the end.
struct GroupedRoute {
  const float* logits = nullptr;
  const void* bias = nullptr;  // [experts]
  float* weights = nullptr;    // [rows, top_k]
  int64_t* ids = nullptr;
  int rows = 0, experts = 0, top_k = 0;
  int groups = 1, kept = 1;
  bool normed = false;
  float scale = 1;
};
void route_grouped(const GroupedRoute& input, DType bias, Stream stream);

}  // namespace ktinject::cuda
