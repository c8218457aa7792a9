// A decode step of attention with compressed keys (DeepSeek-V4): one key for each window of `rate` tokens.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// Of one token a row, at `cache_position` in its text:
//
//   kv, gate      go to their slot of the present window, position % rate
//   weights       = softmax over the window's slots of gate + bias, for each of d values
//   key           = turned(norm(sum of weights kv)), goes to position / rate
//   added         = 0 of windows that are complete at `positions`, -inf of the others
//
// Where windows overlap, kv and gate have 2 d values: the second half counts in the present window, beside the first
// half of the window before, which a window that is complete leaves in `overlap`, with its bias. Pairs of the last
// `turned` values turn by the position of the window's first token. For fp16, bf16 and fp32, with the roundings of
// transformers' modeling_deepseek_v4.py.
struct Compress {
  static constexpr int kMostValues = 1024;  // d; even

  const void* kv = nullptr;    // [rows, width]; width is d, or 2 d where windows overlap
  const void* gate = nullptr;  // [rows, width]
  int64_t kv_stride = 0, gate_stride = 0;
  void* held_kv = nullptr;                  // [rows, rate, width]
  void* held_gate = nullptr;                // [rows, rate, width]
  const float* bias = nullptr;              // [rate, width]
  void* overlap_kv = nullptr;               // [rows, rate, d]; null: windows do not overlap
  float* overlap_gate = nullptr;            // [rows, rate, d]
  const float* norm = nullptr;              // [d]
  const float* angles = nullptr;            // [turned / 2]: by which a position turns
  float eps = 0, scale = 1;                 // of the norm; of cos and sin
  const int64_t* cache_position = nullptr;  // [1]
  const int64_t* positions = nullptr;       // [rows], positions_stride apart
  int64_t positions_stride = 0;
  void* keys = nullptr;  // [rows, windows, d], rows keys_stride apart
  int64_t keys_stride = 0;
  void* added = nullptr;  // [rows, windows]
  bool always = true;     // make the key of a window that is not complete, too
  int rows = 0, rate = 0, d = 0, windows = 0, turned = 0;
};
// Throws std::invalid_argument for what it does not serve.
void compress(const Compress& input, DType dtype, Stream stream);

// Heads of `size` values whose last 2 * angles ones turn in pairs by cos and sin, or back. Before that, with eps >= 0,
// they are divided by their root mean square.
struct TurnHeads {
  const void* x = nullptr;    // [rows, heads, size], rows x_stride apart
  const void* cos = nullptr;  // [rows, angles], rows angle_stride apart
  const void* sin = nullptr;
  void* out = nullptr;  // [rows, heads, size]
  int64_t x_stride = 0, angle_stride = 0;
  float eps = -1;
  bool is_back = false;
  int rows = 0, heads = 0, size = 0, angles = 0;
};
void turn_heads(const TurnHeads& input, DType dtype, Stream stream);

// The weights of attention: softmax over scores * scale, rounded, + what is added to them, rounded, and a head's sink,
// which has no weight in `out`.
struct SinkSoftmax {
  const void* scores = nullptr;  // [rows, heads, n]
  const void* first = nullptr;   // [rows, of_first], first_stride apart: added to the first scores
  const void* rest = nullptr;    // [rows, n - of_first]: to the others
  const float* sinks = nullptr;  // [heads]
  void* out = nullptr;           // [rows, heads, n]
  int64_t first_stride = 0;
  float scale = 1;
  int rows = 0, heads = 0, n = 0, of_first = 0;
};
void sink_softmax(const SinkSoftmax& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
