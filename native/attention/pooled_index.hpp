// An index that chooses pools of places: so many tokens, one after the other from a text's first one on, share a key
// (GLM-5.3-Flash). ktinject/generation/pooled_index_spec.py has the formula.
#pragma once

#include <utility>
#include <vector>

#include "attention/indexer.hpp"

namespace ktinject::attention {

struct PooledIndexConfig {
  Projection q, k, gate, weights;  // q [heads * size] of the low-rank query; key and gate [size], weights [heads] of x
  const void *norm_weight = nullptr, *norm_bias = nullptr;  // [size] of the model's dtype: a layer norm of the key
  DType norm_dtype = DType::bf16;
  float epsilon = 0;
  const float* bias = nullptr;  // [pool, size], added to the gates of a pool's tokens
  int heads = 0, size = 0;
  int pool = 0;   // tokens that share a key
  int top_k = 0;  // places that are chosen at most, beside those of a pool that is not complete
  float score_scale = 1, weight_scale = 1;
};

// In the third tensor of a layer's cache lies of each token [2 * size + 1] of the model's dtype: its key, its gate, and
// 1, or 0 for padding. The keys of pools are made of these in each step.
class PooledIndex final : public PlaceIndex {
 public:
  explicit PooledIndex(PooledIndexConfig config);
  bool fits(int hidden, int low) const override;
  void forward(const float* x, const float* low, const Step& step, const LayerCache& cache) const override;

 private:
  // A row's text, as the cache has it: where it begins, its tokens, and which of its pools are complete.
  struct Text {
    int first = 0, tokens = 0;
    std::vector<bool> there;     // of the places up to the step's own
    std::vector<bool> complete;  // of the pools that end there
  };

  int width() const { return 2 * config_.size + 1; }
  void write(const float* x, const Step& step, const Cached& index) const;
  Text text_of(const Step& step, int row, const Cached& index) const;
  // What a token attends to where that is all of its text, as a mask has it, too.
  bool sees_all(const Text& text, const uint8_t* mask, int most) const;
  // The scores of a row's complete pools; of others, the lowest.
  void score(const float* query, const float* weights, const Text& text, const std::byte* held, DType dtype,
             float* scores) const;
  // key [size] of the pool that begins with this token
  void make_key(const std::byte* begin, DType dtype, float* key) const;
  // The places of so many pools in the order's front, and of the one that is not complete; or of all.
  std::vector<int> places_of(const Text& text, const std::vector<std::pair<float, int>>& order, int chosen,
                             bool is_all) const;

  PooledIndexConfig config_;
};

}  // namespace ktinject::attention
