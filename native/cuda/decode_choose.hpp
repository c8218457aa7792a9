// What happens between two decode steps: the choice of the token, and the state that the next step begins with.
#pragma once

#include <cstdint>

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// Chooses a token for each row, and updates the row's state. Without noise, that is the greatest score; of equal ones,
// the first. With noise from an exponential distribution it is the greatest of softmax(scores) / noise, which is a
// sample of the softmax.
struct Choice {
  const float* scores = nullptr;     // [rows, vocab]
  const float* noise = nullptr;      // [rows, vocab], or null
  const bool* ends = nullptr;        // [vocab]: end tokens, or null
  int64_t* ids = nullptr;            // [rows]: receives the tokens
  int64_t* result = nullptr;         // [2, rows]: receives the tokens; below, 1 while a row goes on (read and written)
  bool* seen = nullptr;              // [rows, vocab + 1]: the token is marked; or null
  int64_t* length = nullptr;         // [1]: one is added
  uint64_t* best = nullptr;          // [rows]: zero, and zero again after each call
  unsigned* block_counts = nullptr;  // [1]: likewise
  int64_t pad = -1;                  // the token of finished rows; -1: the chosen one
  int rows = 0, vocab = 0;
};
void choose(const Choice& input, Stream stream);

// Advances by one token: cache_position [1] and positions [rows] grow by one, and mask [rows, mask_stride] allows the
// new position.
void advance(int64_t* cache_position, int64_t* positions, bool* mask, int rows, int64_t mask_stride, Stream stream);

// cos and sin [rows, 2 * half] of dtype, times `scale`, of positions [rows] times frequencies [half]; both halves are
// the same.
void rotation(const int64_t* positions, const float* frequencies, void* cos, void* sin, int rows, int half, float scale,
              DType dtype, Stream stream);

}  // namespace ktinject::cuda
