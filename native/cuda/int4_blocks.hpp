// How a product with int4 weights is cut into blocks on Hopper. Plain C++: what is chosen is tested without a GPU.
#pragma once

namespace ktinject::cuda::int4 {

// Narrow blocks, of 128 outputs: those of int4_narrow_sm90.cu.
struct Blocks {
  int tokens = 0;  // of a block: 32, 64 or 128; 0: none
  int split = 0;   // blocks of a cluster that share a strip; 1: each strip is one block's; 0: the line is cut
  int mates = 1;   // strips of a cluster, whose blocks fetch activations for each other: 1 or 2
};

// How the stages of all strips, standing in one line, are cut into equal shares, one a block.
struct Partition {
  int outputs, tokens;  // of a block
  int token_blocks;
  int units;  // strips, once for each block of tokens
  int line, share, blocks;
  int sharers = 0;  // blocks of a cluster that share a strip, where the line is not cut
  int mates = 1;    // strips of a cluster
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

inline bool is_narrow(int tokens, int outputs) { return outputs == 128 && tokens <= 128; }

// Null if a product of a weight with k inputs can have these blocks, else what is allowed.
const char* why_not(const Blocks& blocks, int k);
// A product of a weight [n, k] with m tokens in these blocks, for which `why_not` is null.
Partition cut_into(const Blocks& blocks, int n, int k, int m, int multiprocessors);
// The same in the blocks that are the fastest, as far as that was measured.
Partition partition_sm90(int n, int k, int m, int multiprocessors);

}  // namespace ktinject::cuda::int4
