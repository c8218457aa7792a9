// Linear attention by the gated delta rule, of one token a row: a state of fixed size takes the place of keys and
// values.
//
// Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv 2412.06464); with the projections, convolution and gates of
// transformers' modeling_qwen3_next.py and modeling_qwen3_5_moe.py. And Kimi Linear (arXiv 2510.26692), whose states
// decay by channels, with those of modeling_kimi_linear.py.
#pragma once

#include "attention/attention.hpp"
#include "attention/projection.hpp"
#include "attention/recurrent.hpp"

namespace ktinject::attention {

// With q, k, v of a head behind the convolution, q and k of length 1, and a state S [key_size, value_size]:
//
//   S = exp(-exp(a_log) softplus(a + dt_bias)) S
//   S += k (sigmoid(b) (v - k S))
//   o = norm(q S / sqrt(key_size)) silu(z)
//
// By channels, a and dt_bias are vectors [key_size], each value for a row of S, and the last factor is sigmoid(z). With
// a bound, S decays by exp(bound sigmoid(exp(a_log) (a + dt_bias))) (GLM-5.3-Flash).
//
// The cache has the last inputs of the convolution [batch, channels, taps] of the model's dtype, channels being those
// of all q, all k and all v, and the states [batch, value_heads, key_size, value_size] in fp32.
struct GatedDeltaConfig {
  // Either the first two, which give [key_heads, q | k | v | z] and [key_heads, b | a], where a head of keys has
  // several of values; or all four: [q | k | v], z, b and a. With k and v, the first one gives q alone. What is given
  // as z_low and a_low gives z and a what they take, else that is x.
  const gemm::Linear *qkv = nullptr, *z = nullptr, *k = nullptr, *v = nullptr, *z_low = nullptr;
  Projection ba, a, a_low;
  const gemm::Linear* o = nullptr;
  const void* taps_weight = nullptr;  // [channels, taps] of the model's dtype
  bool has_wide_taps = false;         // or of fp32, and what the convolution gives is rounded once, at its end
  int taps = 0;
  const float* a_log = nullptr;    // [value_heads]
  const float* dt_bias = nullptr;  // [decays]
  Norm norm;                       // of the values of a head; by channels, its weight is fp32, and nothing is rounded
                                   // before the product with the gate
  int key_heads = 0, value_heads = 0, key_size = 0, value_size = 0;
  bool by_channels = false;
  float bound = 0;  // of the logarithm of decays by channels; 0: there is none

  bool is_interleaved() const { return z == nullptr; }
  int keys() const { return key_heads * key_size; }
  int values() const { return value_heads * value_size; }
  int channels() const { return 2 * keys() + values(); }
  int decays() const { return by_channels ? value_heads * key_size : value_heads; }
};

class GatedDelta final : public DecoderAttention {
 public:
  explicit GatedDelta(GatedDeltaConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  struct Projected;
  void expect_projections() const;
  // Of x: all, but what z_low and a_low lead to.
  Products products(const Projected& to, int batch) const;
  // What follows: that it lies as it is taken; and once all products are there, their rounding.
  void lay_out(const Step& step, const Projected& to) const;
  void round(const Step& step, const Projected& to) const;
  void project(const float* x, const Step& step, const Projected& to) const;
  ChannelConvolution convolution() const;
  void advance(const Projected& from, const Step& step, const LayerCache& cache, float* sum) const;
  // Rows first to first + step.together() - 1 of that.
  void advance_rows(int first, const Projected& from, const Step& step, const LayerCache& cache, float* sum) const;
  // Of one row, all of it as one call of the pool. False where a part is too small for it: then nothing is done.
  bool run_in_one_call(const float* x, const Step& step, const Projected& to, const LayerCache& cache, float* sum,
                       float* out) const;
  void head(int h, int row, const Projected& from, const Step& step, float* state, float* own, float* out) const;
  // decays [key_size] of a head of a row
  void decay(int h, const float* a, float* decays) const;

  GatedDeltaConfig config_;
};

// What x [n] is multiplied with to have a length, as in transformers' l2norm.
float length_factor(const float* x, int n, float length);

}  // namespace ktinject::attention
