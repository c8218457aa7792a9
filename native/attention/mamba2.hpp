// Mamba-2 of one token a row: a state of fixed size takes the place of keys and values.
//
// Dao, Gu: Transformers are SSMs (arXiv 2405.21060); with the projections, convolution, norm and roundings of
// transformers' modeling_granitemoehybrid.py.
#pragma once

#include "attention/attention.hpp"
#include "attention/recurrent.hpp"

namespace ktinject::attention {

// in gives z [values], the convolution's inputs [x: values | B: groups, state_size | C: groups, state_size] and dt
// [heads]; values are heads of head_size. With those behind the convolution, and a state S [head_size, state_size]:
//
//   dt = softplus(dt + dt_bias)
//   S  = exp(-exp(a_log) dt) S + x (dt B)
//   y  = S C + d x
//   out = norm(y silu(z)), of each group
//
// The cache has the last inputs of the convolution [batch, channels, taps] of the model's dtype, and the states [batch,
// heads, head_size, state_size] in fp32.
struct Mamba2Config {
  const gemm::Linear *in = nullptr, *out = nullptr;
  const void* taps_weight = nullptr;  // [channels, taps] of dtype
  const void* taps_bias = nullptr;    // [channels] of dtype, or null
  int taps = 0;
  const float *a_log = nullptr, *dt_bias = nullptr, *d = nullptr;  // [heads]
  bool has_wide_d = false;  // the model has it in fp32, so that its product with x is not rounded
  Norm norm;                // [values]; its mean is of a group
  int heads = 0, groups = 0, head_size = 0, state_size = 0;
  DType dtype = DType::bf16;

  int values() const { return heads * head_size; }
  int channels() const { return values() + 2 * groups * state_size; }
};

class Mamba2 final : public DecoderAttention {
 public:
  explicit Mamba2(Mamba2Config config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  // mixed [batch, channels], dt [batch, heads]: what follows from x of the tokens. y [batch, values].
  void advance(float* mixed, const float* dt, const Step& step, const LayerCache& cache, float* y) const;
  ChannelConvolution convolution() const;
  size_t state_values() const {
    return static_cast<size_t>(config_.head_size) * static_cast<size_t>(config_.state_size);
  }
  float* state_of(const LayerCache& cache, int index) const;
  // y of the head index % heads of the row index / heads behind `first`, whose state is the cache's `index`. own:
  // [state_size]
  void head(int index, int first, const float* mixed, const float* dt, const LayerCache& cache, float* own,
            float* y) const;
  // y [batch, values], times silu of what in_proj gives, and normed.
  void gate(const float* projected, int batch, DType dtype, float* y) const;

  Mamba2Config config_;
};

}  // namespace ktinject::attention
