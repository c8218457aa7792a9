// The indexer of sparse attention, which chooses the places that a token attends to (DeepSeek-V3.2, GLM-5).
// ktinject/generation/indexer_spec.py has the formula.
#pragma once

#include "attention/attention.hpp"
#include "attention/projection.hpp"

namespace ktinject::attention {

struct IndexerConfig {
  Projection q, k, weights;  // q [heads * size] of the low-rank query; key [size] and weights [heads] of x
  const void *norm_weight = nullptr,
             *norm_bias = nullptr;  // [size] of the model's dtype or fp32: a layer norm of the key
  DType norm_dtype = DType::bf16;
  float epsilon = 0;
  int heads = 0, size = 0, rotary = 0;
  int top_k = 0;            // places that are chosen at most
  bool neighbours = false;  // as `turn` has it
  bool at_end = false;      // the last values are turned, not the first ones (Hunyuan 4)
  Norm q_norm;              // of x, which queries are then made of
  Growth growth;            // of queries, for their position
};

// What chooses the places that latent attention attends to.
class PlaceIndex {
 public:
  virtual ~PlaceIndex() = default;
  virtual bool fits(int hidden, int low) const = 0;
  // Whether its queries are made of x, not of the low-rank query.
  virtual bool takes_input() const { return false; }
  // Leaves the keys of these tokens in the cache, and in its choice what they attend to. x [batch, hidden], low [batch,
  // what the query is made of], if that is not x.
  virtual void forward(const float* x, const float* low, const Step& step, const LayerCache& cache) const = 0;
};

// Keys [batch, 1, capacity, size] of the rotation's dtype lie in the third tensor of a layer's cache.
class Indexer final : public PlaceIndex {
 public:
  explicit Indexer(IndexerConfig config);
  bool fits(int hidden, int low) const override;
  bool takes_input() const override { return config_.q_norm.weight != nullptr; }
  void forward(const float* x, const float* low, const Step& step, const LayerCache& cache) const override;

 private:
  void write(const float* x, const Step& step, const Cached& keys) const;
  // A head's values, turned.
  void rotate(const float* from, const Step& step, int row, float* to) const;
  // The score of each place for a row that sees more of them than are chosen; -inf where it is masked.
  void score(const float* query, const float* weights, const Step& step, int row, const Cached& keys,
             float* scores) const;

  IndexerConfig config_;
};

// x [n] = weight · (x - mean(x)) / sqrt(variance(x) + epsilon) + bias
void layer_norm(float* x, int n, float epsilon, const float* weight, const float* bias);

}  // namespace ktinject::attention
