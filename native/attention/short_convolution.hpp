// A short convolution in the place of attention, of one token a row: the last inputs take the place of keys and values.
//
// As in transformers' modeling_lfm2_moe.py.
#pragma once

#include "attention/attention.hpp"
#include "attention/recurrent.hpp"

namespace ktinject::attention {

// out = out_proj(C convolution(B x)), where in_proj gives [B | C | x], and the convolution is one of each channel.
//
// The cache's first tensor has its last inputs [batch, channels, taps] of the model's dtype; the second is not read.
struct ShortConvolutionConfig {
  const gemm::Linear *in = nullptr, *out = nullptr;
  const void* weight = nullptr;  // [channels, taps] of `dtype`, the model's
  int taps = 0;
  DType dtype = DType::bf16;

  int channels() const { return out->config().in_features; }
};

class ShortConvolution final : public DecoderAttention {
 public:
  explicit ShortConvolution(ShortConvolutionConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  // mixed [rows, channels]: inputs of the convolution become what it gives. The cache moves on by a token, or by all.
  void advance(float* mixed, const Step& step, const LayerCache& cache) const;
  ChannelConvolution convolution() const;

  ShortConvolutionConfig config_;
};

}  // namespace ktinject::attention
