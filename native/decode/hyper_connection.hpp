// Residual streams in place of one: collapsed before a part of a layer, which is added to each of the mixed ones.
#pragma once

#include <cstddef>

#include "runtime/dtype.hpp"

namespace ktinject::decode {

// Of one token, with N streams x of n values each, and y that a part makes of `collapsed`:
//
//   w                = fn (x / rms(x)), x as one vector of N n values
//   pre, post, comb  = sigmoid(w scale + base) + eps, post_factor sigmoid(…) + post_eps, softmax(…) + eps of N, N and
//                      N x N of w
//   comb             = its columns, then in turn its rows and columns divided by their sums + eps, `iterations` times
//   collapsed        = sum of pre x
//   x                = post y + comb^T x
//
// Xie et al.: mHC (arXiv 2512.24880), as DeepSeek-V4 has it.
struct HyperConnectionConfig {
  static constexpr int kMostStreams = 16;

  int streams = 0, hidden = 0;
  const float* fn = nullptr;     // [outputs, N n]: of pre, of post, of comb; null: of a head, pre is 1 / N
  const float* base = nullptr;   // [outputs]
  const float* scale = nullptr;  // one number each of pre, post and comb
  float norm_eps = 0, eps = 0;
  float post_factor = 2, post_eps = 0;
  int iterations = 0;    // 0: there is no comb, and streams stay as they are
  bool is_head = false;  // there is pre alone: what is behind the last layer
  bool rounds = true;    // post, comb and both terms are rounded to the model's dtype; else only what comes out

  int outputs() const { return is_head ? streams : (2 + (iterations > 0 ? streams : 0)) * streams; }
};

class HyperConnection {
 public:
  explicit HyperConnection(HyperConnectionConfig config);
  const HyperConnectionConfig& config() const { return config_; }
  // Numbers of a row that `collapse` leaves for `add`.
  int mixing() const { return (1 + config_.streams) * config_.streams; }
  // collapsed [batch, n], rounded, of streams [batch, N, n]; mixing [batch, mixing()], of a head nothing.
  void collapse(const float* streams, int batch, DType dtype, float* collapsed, float* mixing) const;
  // streams = post y + comb^T streams, rounded. y [batch, n]
  void add(const float* y, const float* mixing, int batch, DType dtype, float* streams) const;

 private:
  // pre [N] and mixing of a row, of what fn gives of its streams.
  void weigh(float* logits, DType dtype, float* pre, float* mixing) const;
  void normalise(float* comb) const;

  HyperConnectionConfig config_;
};

}  // namespace ktinject::decode
