// How a product with int4 weights is cut into blocks: on Hopper, and by the kernels that run elsewhere. Plain C++: what
// is chosen is tested without a GPU.
#pragma once

#include "cuda/limits.hpp"

namespace ktinject::cuda::int4 {

// Blocks that were measured for a layer: narrow ones, of 128 outputs, which int4_narrow_sm90.cu has, or those of
// int4_whole_sm90.cu, whose sums are whole.
struct Blocks {
  int tokens = 0;   // of a block; 0: none
  int split = 0;    // narrow: blocks of a cluster that share a strip; 1: each strip is one block's; 0: the line is cut
  int outputs = 0;  // whole: of a block; 0: narrow
};

// The blocks whose sums are whole. `sets` of warpgroups take turns at the stages.
struct Whole {
  int tokens, outputs, sets;
};
constexpr Whole kWhole[] = {{32, 64, 4},  {32, 128, 2}, {64, 64, 4},   {64, 128, 2}, {96, 64, 2},
                            {96, 128, 2}, {128, 64, 2}, {128, 128, 1}, {128, 192, 1}};

// How the stages of all strips, standing in one line, are cut into equal shares, one a block.
struct Partition {
  int outputs, tokens;  // of a block
  int token_blocks;
  int units;  // strips, once for each block of tokens
  int line, share, blocks;
  int sharers = 0;     // blocks of a cluster that share a strip, where the line is not cut
  bool whole = false;  // blocks of `kWhole`
};

inline int up(int a, int b) { return (a + b - 1) / b; }  // a / b, rounded up

inline Partition cut(int n, int k, int m, int tokens, int outputs, int most_blocks) {
  Partition p;
  p.outputs = outputs;
  p.tokens = tokens;
  p.token_blocks = up(m, tokens);
  p.units = up(n, outputs) * p.token_blocks;
  p.line = p.units * (k / 64);
  p.share = up(p.line, most_blocks);
  p.blocks = up(p.line, p.share);
  return p;
}

// The kernel for all that is not Hopper, int4_linear.cu.
struct ShapeSm80 {
  static constexpr int kThreads = 256;
  static constexpr int kOutputs = 256, kInputs = 64;  // of a stage of a block

  Partition partition;
  int stages;  // of a block's ring
  int room;    // blocks that a multiprocessor has at a time

  // Words, activations [tokens][kInputs], and scales with zero points of one group or of two halves.
  static constexpr int stage_bytes(int tokens, bool half_groups) {
    return kOutputs * kInputs / 2 + tokens * kInputs * 2 + (half_groups ? 2 : 1) * kOutputs * 4;
  }
  static constexpr int kStaticBytes = 128;  // a flag before the ring, which begins at a multiple of that
  static constexpr int shared_bytes(int tokens, bool half_groups, int stages) {
    return stages * stage_bytes(tokens, half_groups) + kStaticBytes;
  }
};
// half_groups: groups of 32 inputs.
ShapeSm80 shape_sm80(int n, int k, int m, bool half_groups, const Limits& limits);

inline bool is_narrow(const Partition& p) { return !p.whole && p.outputs == 128 && p.tokens <= 128; }

// Null if a product of a weight with k inputs can have these blocks, else what is allowed.
const char* why_not(const Blocks& blocks, int k);
// A product of a weight [n, k] with m tokens in these blocks, for which `why_not` is null.
Partition cut_into(const Blocks& blocks, int n, int k, int m, int multiprocessors);
// The same in the blocks that are the fastest, as far as that was measured.
Partition partition_sm90(int n, int k, int m, int multiprocessors);

}  // namespace ktinject::cuda::int4
