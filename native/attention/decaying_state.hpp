// Linear attention whose heads forget at fixed rates, of one token a row: a state takes the place of keys and values.
//
// Qin et al.: Lightning Attention-2 (arXiv 2401.04658); with the projections, gates, norm and roundings of
// transformers' modeling_minimax.py.
#pragma once

#include <cstddef>
#include <span>

#include "attention/attention.hpp"

namespace ktinject::attention {

// qkv gives [heads, q | k | v] of `size` values each. With silu of those, and a state S [size, size] of a head:
//
//   S = exp(-slope) S + k v
//   out = o(norm(q S) sigmoid(gate(x)))                  the norm is of all heads at once
//
// The cache's first tensor has the states [batch, heads, size, size] of the model's dtype; the second is not read.
struct DecayingStateConfig {
  const gemm::Linear *qkv = nullptr, *gate = nullptr, *o = nullptr;
  Norm norm;                      // of heads * size values
  const float* slopes = nullptr;  // [heads]
  int heads = 0, size = 0;

  int values() const { return heads * size; }
};

class DecayingState final : public DecoderAttention {
 public:
  explicit DecayingState(DecayingStateConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  // mixed [batch, heads, 3, size] of the tokens; the states move on by them. sum [batch, values]: q S.
  void advance(const float* mixed, const Step& step, const LayerCache& cache, float* sum) const;
  // The state of a row's head, counted through all rows.
  std::span<std::byte> state_of(const LayerCache& cache, int index) const;
  // q S of the head index % heads of the row index / heads behind `first`, whose state is the cache's `index`. own:
  // 2 * size floats
  void head(int index, int first, const float* mixed, DType dtype, const LayerCache& cache, float* own,
            float* sum) const;

  DecayingStateConfig config_;
};

}  // namespace ktinject::attention
