// An index that chooses blocks of the cache's places, which some heads attend to (MiniMax-M3).
// ktinject/generation/block_index_spec.py has the formula.
#pragma once

#include "attention/attention.hpp"
#include "attention/projection.hpp"

namespace ktinject::attention {

struct BlockIndexConfig {
  Projection q, k;      // queries [heads * size] and key [size] of x
  Norm q_norm, k_norm;  // of `size` values
  int heads = 0, size = 0;
  int block = 0;  // places of a block
  int top_k = 0;  // blocks that are chosen at most
  int local = 0;  // of these, as many as end with the token's own are always chosen
};

// Keys [batch, 1, capacity, size] of the model's dtype lie in the third tensor of a layer's cache.
class BlockIndex {
 public:
  explicit BlockIndex(BlockIndexConfig config);
  bool fits(int hidden) const { return config_.q.in == hidden; }
  int heads() const { return config_.heads; }
  // Leaves the keys of these tokens in the cache, and in its choice for each row and head the numbers of the blocks
  // that are attended to. Returns the places of a block: one where a step chooses fewer (`most_chosen`).
  int forward(const float* x, const Step& step, const LayerCache& cache) const;

 private:
  // x [size] normed and turned as those of a row.
  void prepare(float* x, const Norm& norm, const Step& step, int row, float* out) const;
  void write(const float* x, const Step& step, const Cached& keys) const;
  // The greatest score of each of so many blocks of `block` places, up to place `last`; [heads, blocks].
  void score(const float* query, const Step& step, int row, const Cached& keys, int block, int last,
             float* scores) const;

  BlockIndexConfig config_;
};

}  // namespace ktinject::attention
