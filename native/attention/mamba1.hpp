// Mamba of one token a row, each of whose channels has a state and a time step of its own.
//
// Gu, Dao: Mamba (arXiv 2312.00752); with the projections, convolution, norms and roundings of transformers'
// modeling_jamba.py.
#pragma once

#include "attention/attention.hpp"
#include "attention/projection.hpp"
#include "attention/recurrent.hpp"

namespace ktinject::attention {

// in gives [x | z], both [values]. With x behind the convolution, proj gives of it [t: rank | B: state_size | C:
// state_size], each normed, and with a state S [values, state_size]:
//
//   dt = softplus(dt(t))
//   S  = exp(-exp(a_log) dt) S + dt x B
//   out = (S C + d x) silu(z)
//
// The cache has the last inputs of the convolution [batch, values, taps] of the model's dtype, and the states [batch,
// values, state_size] in fp32.
struct Mamba1Config {
  const gemm::Linear *in = nullptr, *out = nullptr;
  Projection proj, dt;
  const void* taps_weight = nullptr;  // [values, taps] of dtype
  const void* taps_bias = nullptr;    // [values] of dtype, or null
  int taps = 0;
  const float *a_log = nullptr, *d = nullptr;  // [values, state_size], [values]
  bool has_wide_d =
      false;  // the model has it in fp32, so that its product with x is not rounded, nor what that is added to
  Norm dt_norm, b_norm, c_norm;
  DType dtype = DType::bf16;

  int values() const { return out->config().in_features; }
  int rank() const { return dt_norm.size; }
  int state_size() const { return b_norm.size; }
};

class Mamba1 final : public DecoderAttention {
 public:
  explicit Mamba1(Mamba1Config config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  // mixed [batch, values], inputs of the convolution, become what it gives; y [batch, values] is S C + d x of it.
  void advance(float* mixed, const Step& step, const LayerCache& cache, float* y) const;
  struct Between;
  // Of so many rows; and where it lies in memory of so many floats.
  size_t between_values(int batch) const;
  Between between_in(float* memory, int batch) const;
  ChannelConvolution convolution() const;
  // What follows `proj`.
  void norm(const Between& between, int batch, DType dtype) const;
  // The states of some channels of the row index / blocks() behind `first_row`, which are the cache's of that index.
  int blocks() const;
  void advance_block(int index, int first_row, const float* mixed, const Between& between, const Step& step,
                     const LayerCache& cache, float* y) const;

  Mamba1Config config_;
};

}  // namespace ktinject::attention
