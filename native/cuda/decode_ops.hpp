// The rest of a decode step beside the experts and linear layers, in few kernels. Each row has one token, so all
// tensors are small, and a kernel's time is mostly its launch and its waiting. transformers launches some fifty kernels
// a layer.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// out [batch, q_heads, size] = softmax(scale * q keys^T) values, over the positions of the cache up to cache_position
// that the mask allows. Before that, queries and the new key are normed (if there is a weight) and rotated, and the new
// key and value are written to the cache at cache_position; with a window, at cache_position % window, and the mask is
// in the order of these places. Sinks count in the softmax without a value. With gates, the output is multiplied with
// their sigmoid. Rows of `size` are contiguous and 16-byte aligned. For fp16 and bf16.
//
// Consecutive rows are tokens of one text: row i is written at cache_position + i, in a cache that all share
// (batch_stride is 0), and sees what is there up to itself. They have no window.
struct Attention {
  const void* q = nullptr;  // [batch, q_heads, size]; with gates, a head's gate behind its query
  const void* k = nullptr;  // [batch, kv_heads, size]
  const void* v = nullptr;
  const void* q_weight = nullptr;  // [size] or null
  const void* k_weight = nullptr;
  const void* sinks = nullptr;  // [q_heads] or null
  const void* cos = nullptr;    // [batch, angles]
  const void* sin = nullptr;
  const int64_t* cache_position = nullptr;  // [1]
  const bool* mask = nullptr;               // [batch, as many as there are places in use]
  void* keys = nullptr;                     // [batch, kv_heads, capacity, size]
  void* values = nullptr;
  void* out = nullptr;
  float* scratch = nullptr;          // attention_scratch() values; unused with one split
  unsigned* block_counts = nullptr;  // [batch, q_heads]: zero, and zero again after each call
  int batch = 0, q_heads = 0, kv_heads = 0, size = 0;
  int rotary = 0;  // the first values of a head, that are rotated
  int angles = 0;  // values of cos and sin: `rotary`, or the half of it if halves are alike
  int window = 0;  // positions that a token sees, its own included; 0: all
  bool has_gates = false, is_consecutive = false;
  int splits = 1;                             // of the cache, each for blocks of its own
  int64_t q_stride = 0, kv_stride = 0;        // from row to row of the batch, in elements
  int64_t q_head_stride = 0;                  // from head to head
  int64_t rotation_stride = 0;                // of cos and sin, 0 where one serves all rows
  int64_t batch_stride = 0, head_stride = 0;  // of the cache
  int64_t mask_stride = 0;
  float eps = 0, norm_offset = 0;  // the latter is added to the weights of norms
  bool rounds_first = true;        // norms round before their weight is multiplied, and not only after it
  float scale = 1;
};
void attention(const Attention& input, DType dtype, Stream stream);
// Floats of scratch for one split of one row, enough for any shape.
constexpr int64_t attention_scratch(int q_heads, int size) { return int64_t{8} * q_heads * (size + 4); }

// What latent attention does before it attends. The last `rope` values of each query head are rotated in place. The
// first `rank` values of kv are normed and written to `keys` at cache_position; the rest is rotated and written to
// `values`; of consecutive rows, as `Attention` has them, at cache_position + row. For fp16 and bf16.
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
  bool turns_neighbours = false;        // pairs are 2i, 2i + 1, written to i, i + rope / 2; else i, i + rope / 2
  int64_t q_stride = 0, kv_stride = 0;  // from row to row, in elements
  int64_t rotation_stride = 0;          // of cos and sin, 0 where one serves all rows
  int64_t keys_stride = 0, values_stride = 0;
  float eps = 0;
  bool is_consecutive = false;
};
void latent(const Latent& input, DType dtype, Stream stream);

// The top_k greatest of a softmax over logits [rows, experts]. `normed` divides their weights by their sum.
// weights [rows, top_k] of dtype, ids [rows, top_k].
void route(const void* logits, void* weights, int64_t* ids, int rows, int experts, int top_k, bool normed, DType dtype,
           Stream stream);

// The router of DeepSeek-V3. Scores are sigmoids of logits [rows, experts]; an expert's choice is its score + bias. A
// group counts by the sum of its two greatest choices, and `kept` groups remain. Of their experts, the top_k with the
// greatest choices are taken. Weights are their scores, divided by their sum if `normed`, times `scale`. The order is
// that of torch.topk(sorted=False): by id, but experts whose choice equals the smallest one taken come last.
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
