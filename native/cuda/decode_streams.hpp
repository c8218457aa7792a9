// A decode step of hyper-connections: residual streams that are collapsed before a part of a layer and mixed behind it.
#pragma once

#include "cuda/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::cuda {

// Of one token a row, with N = kStreams streams x of n values each:
//
//   w                = fn (x / rms(x)), x as one vector of N n values
//   pre, post, comb  = sigmoid(w scale + base) + eps, 2 sigmoid(…), softmax(…) + eps of N, N and N x N of w
//   comb             = its columns, then in turn its rows and columns divided by their sums + eps, `iterations` times
//   collapsed        = sum of pre x
//
// Xie et al.: mHC (arXiv 2512.24880), as DeepseekV4HyperConnection in transformers' modeling_deepseek_v4.py. All but
// the streams and `collapsed` is fp32.
struct HyperConnection {
  static constexpr int kStreams = 4;
  static constexpr int kOutputs = (2 + kStreams) * kStreams;  // of fn
  static constexpr int kColumns = 256;                        // of fn, that a thread block works on

  const void* streams = nullptr;  // [rows, N, n]
  const float* fn = nullptr;      // [kOutputs, N n]: of pre, of post, of comb
  const float* base = nullptr;    // [kOutputs]
  const float* scale = nullptr;   // [3]
  float norm_eps = 0, eps = 0;
  float* scratch = nullptr;          // [rows, (N n + kColumns - 1) / kColumns, kOutputs + 1]
  unsigned* block_counts = nullptr;  // [rows]: zero, and zero again after each call
  float* post = nullptr;             // [rows, N]
  float* comb = nullptr;             // [rows, N, N]
  void* collapsed = nullptr;         // [rows, n]
  int rows = 0, n = 0, iterations = 0;
};
// Throws std::invalid_argument for what it does not serve.
void hyper_connection(const HyperConnection& input, DType dtype, Stream stream);

// out = post y + comb^T x: what a part of a layer made of the collapsed streams, added to each of the mixed ones. post,
// comb and both terms are rounded to the streams' dtype, as in DeepseekV4DecoderLayer.
struct MixStreams {
  const void* streams = nullptr;  // [rows, N, n]
  const void* y = nullptr;        // [rows, n]
  const float* post = nullptr;    // [rows, N]
  const float* comb = nullptr;    // [rows, N, N]
  void* out = nullptr;            // [rows, N, n]
  int rows = 0, n = 0;
};
void mix_streams(const MixStreams& input, DType dtype, Stream stream);

}  // namespace ktinject::cuda
