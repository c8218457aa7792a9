// In how many blocks kernels of a decode step are launched, and with how much shared memory: what fits the limits of a
// device. Plain C++: what is chosen for a device is tested without one. int4_blocks.hpp has the same for int4 weights.
#pragma once

#include <cstdint>

#include "cuda/limits.hpp"

namespace ktinject::cuda {

// Blocks that a multiprocessor runs at a time.
constexpr int blocks_at_once(const Limits& limits, int shared_bytes, int threads) {
  constexpr int kUnit = 128;  // in which shared memory is given out
  const int taken = (shared_bytes + kUnit - 1) / kUnit * kUnit + limits.reserved_shared_bytes;
  const int by_shared = limits.multiprocessor_shared_bytes / taken;
  const int by_threads = limits.multiprocessor_threads / threads;
  return by_shared < by_threads ? by_shared : by_threads;
}

// Of decode_linear.
struct LinearShape {
  static constexpr int kThreads = 512;
  static constexpr int kTile = 8;                // outputs of a tile
  static constexpr int kMuch = 24, kLittle = 8;  // values of `held`

  int tiles = 0;  // that a block works on at a time: 1 to 6, or 8
  int held = 0;   // pieces of 16 bytes that a thread has on their way, in shared memory
  int blocks = 0;
  int64_t l2_bytes = 0;  // that all blocks together fetch into L2 behind those

  // Rounds of weights that are on their way.
  static constexpr int ahead(int tiles, int held) { return held / tiles > 1 ? held / tiles : 1; }
  // With fewer than two rounds on their way, nothing would be fetched while a round is multiplied.
  static constexpr int most_tiles(int held) { return held / 2 < 8 ? held / 2 : 8; }
  // The ring of rounds, and what the kernel has besides: sums of each warp, for eight rows, and of their squares.
  static constexpr int dynamic_bytes(int tiles, int held) { return ahead(tiles, held) * tiles * kThreads * 16; }
  static constexpr int static_bytes(int tiles) { return (kThreads / 32) * (tiles * 8 * kTile + 8) * 4; }
  static constexpr int shared_bytes(int tiles, int held) { return dynamic_bytes(tiles, held) + static_bytes(tiles); }
};
LinearShape linear_shape(int outputs, const Limits& limits);

// Of attention, for heads of `size` values.
constexpr int attention_warps(int size) { return size > 128 ? 8 : 16; }
// A partial result of each warp and each of eight query heads: values, greatest score, sum, and what keeps banks apart.
constexpr int attention_dynamic_bytes(int size) { return attention_warps(size) * 8 * (size + 4) * 4; }
// The most that it has besides: eight queries and a key of 16 bits, shares of each warp and head, a flag.
constexpr int attention_static_bytes(int size) {
  return 8 * (size / 8 + 4) * 16 + size * 2 + (attention_warps(size) + 2) * 8 * 4 + 16;
}
constexpr int attention_shared_bytes(int size) { return attention_dynamic_bytes(size) + attention_static_bytes(size); }

}  // namespace ktinject::cuda
