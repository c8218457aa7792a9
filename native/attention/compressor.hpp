// Compressed keys (DeepSeek-V4): one for each window of `rate` tokens, beside what attention keeps of single tokens;
// and the index that chooses some of them. The captured step has the same, see cuda/decode_compress.hpp.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "attention/attention.hpp"
#include "attention/projection.hpp"

namespace ktinject::attention {

// q [n] with its last `step.rotary` values turned in pairs (2i, 2i + 1), which stay where they are, or turned back. The
// first half of a step's rotation has the angles.
void turn_end(const Step& step, int row, int n, bool back, float* q);

// Of one token a row, at `position` in the cache:
//
//   kv, gate  go to their slot of the present window, position % rate
//   weights   = softmax over the window's slots of gate + bias, for each of d values
//   key       = turned(norm(sum of weights kv)), goes to position / rate
//
// Where windows overlap, kv and gate have 2 d values: the second half counts in the present window, beside the first
// half of the window before, which a window that is complete leaves in `overlap`, with its bias. Pairs of the last
// values turn by the position of the window's first token.
struct CompressorConfig {
  Projection kv, gate;
  const float* bias = nullptr;    // [rate, width]; width is d, or 2 d where windows overlap
  Norm norm;                      // [d]
  const float* angles = nullptr;  // [turned / 2]: by which a position turns
  float scale = 1;                // of cos and sin
  int rate = 0, turned = 0;
  bool overlaps = false;
  bool rounds_sum = false;  // gate + bias is rounded to the model's dtype
};

// Keeps in a layer's cache kv and gate [batch, rate, width] and keys [batch, windows, d]; and where windows overlap,
// overlap_kv [batch, rate, d] and overlap_gate as well, the latter in fp32.
class Compressor {
 public:
  explicit Compressor(CompressorConfig config);
  bool fits(int hidden) const { return config_.kv.in == hidden && config_.gate.in == hidden; }
  int parts() const { return config_.overlaps ? 5 : 3; }
  int size() const { return config_.norm.size; }
  int rate() const { return config_.rate; }
  // Takes the tokens of a step; makes the key of their window if that is complete, or `step.makes_all`.
  void forward(const float* x, const Step& step, std::span<const Cached> parts) const;
  // The keys of a row: [windows, d] of the model's dtype.
  static const std::byte* keys_of(std::span<const Cached> parts, int row);

 private:
  void check(const Step& step, std::span<const Cached> parts) const;
  void make_key(const Step& step, int row, std::span<const Cached> parts) const;
  void leave_overlap(int row, std::span<const Cached> parts) const;
  int width() const { return config_.overlaps ? 2 * size() : size(); }

  CompressorConfig config_;
};

// Scores of a row's windows: the sum over heads of weight · max(query · key, 0); the best top_k are chosen.
struct CompressedIndexConfig {
  const Compressor* keys = nullptr;
  Projection q, weights;  // q [heads * d] of the low-rank query; weights [heads] of x
  int heads = 0, top_k = 0;
  float score_scale = 1, weight_scale = 1;
};

class CompressedIndex {
 public:
  explicit CompressedIndex(CompressedIndexConfig config);
  const Compressor& keys() const { return *config_.keys; }
  bool fits(int hidden, int low) const {
    return keys().fits(hidden) && config_.weights.in == hidden && config_.q.in == low;
  }
  // chosen [batch]: windows in order, of those that are complete at each row's own position.
  void forward(const float* x, const float* low, const Step& step, std::span<const Cached> parts,
               std::vector<std::vector<int>>& chosen) const;

 private:
  void score(const float* query, const float* weights, const Step& step, const std::byte* keys, int windows,
             float* scores) const;

  CompressedIndexConfig config_;
};

}  // namespace ktinject::attention
