// What stands between two decode steps: the choice of the token, and the state that the next step begins with.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// The greatest score of each row, of equal ones the first; with `noise`, drawn from an exponential distribution, a
// sample of the softmax over the scores instead: the greatest of softmax(scores) / noise. Then what the row goes on
// with.
struct Choice {
  const float* scores = nullptr;     // [rows, vocab]
  const float* noise = nullptr;      // [rows, vocab], or null
  const bool* ends = nullptr;        // [vocab]: end tokens, or null
  int64_t* ids = nullptr;            // [rows]: receives the tokens
  int64_t* result = nullptr;         // [2, rows]: receives the tokens, and 1 while a row goes on, which is read, too
  bool* seen = nullptr;              // [rows, vocab + 1]: the token is marked; or null
  int64_t* length = nullptr;         // [1]: one is added
  uint64_t* best = nullptr;          // [rows]: zero, and zero again after each call
  unsigned* block_counts = nullptr;  // [1]: likewise
  int64_t pad = -1;                  // what a finished row goes on with; -1: its own token
  int rows = 0, vocab = 0;
};
void choose(const Choice& input, Stream stream);

// A token more: cache_position [1] and positions [rows] grow by one, and the new position is allowed in mask [rows,
// mask_stride].
void advance(int64_t* cache_position, int64_t* positions, bool* mask, int rows, int64_t mask_stride, Stream stream);

// cos and sin [rows, 2 * half] of dtype: of positions [rows] times frequencies [half], twice side by side, scaled.
void rotation(const int64_t* positions, const float* frequencies, void* cos, void* sin, int rows, int half, float scale,
              DType dtype, Stream stream);

}  // namespace ktinject::cuda
