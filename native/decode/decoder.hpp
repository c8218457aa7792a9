// The decoder layers of a model on one token a row, in one call: a decode step on the CPU.
//
// At one token a layer's matrix products take tens of microseconds, and twenty small tensor operations around them
// take longer. Here they are loops over a few thousand values, done by the caller or, where it pays, by the pool.
//
//   x += attention(norm(x))        attention: GroupedAttention or LatentAttention
//   x += feed_forward(norm(x))     feed_forward: GatedUnit, or Mixture with one beside it
//
// Weights belong to others: packed ones to Linear and Experts, the rest to the model. A decoder only points to them.
#pragma once

#include <memory>
#include <vector>

#include "decode/math.hpp"
#include "linear/linear.hpp"
#include "moe/experts.hpp"
#include "runtime/waiting.hpp"

namespace ktinject {

// Weight of the model's dtype, null where there is no norm.
struct Norm {
  const void* weight = nullptr;
  int size = 0;
  float epsilon = 0;
};

// Keys and values of one layer, [batch, heads, capacity, width] of the model's dtype, contiguous.
struct LayerCache {
  void* keys = nullptr;
  void* values = nullptr;
  int heads = 0, key_size = 0, value_size = 0;
};

// What is the same for all layers of a step.
struct Step {
  DType dtype = DType::bf16;
  int batch = 1;
  int place = 0;              // in the cache, of the tokens of this step
  int capacity = 0;           // of the cache
  const void* cos = nullptr;  // [batch or 1, rotary] of dtype
  const void* sin = nullptr;
  int rotary = 0;
  bool shared_rotation = false;   // one row for all
  const uint8_t* mask = nullptr;  // [batch, mask_stride], places up to `place`
  size_t mask_stride = 0;

  size_t width() const { return dtype_bytes(dtype); }
  const std::byte* rotation(const void* table, int row) const {
    return static_cast<const std::byte*>(table) +
           (shared_rotation ? 0 : static_cast<size_t>(row) * static_cast<size_t>(rotary) * width());
  }
};

// Memory of the calling thread for as long as this lives, contents undefined. A thread keeps what it has had, so that a
// warmed-up step allocates nothing, and no two threads meet in it.
class Scratch {
 public:
  explicit Scratch(size_t count);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator float*() const { return memory_; }

 private:
  float* memory_;
};

// Lays several arrays into one piece of scratch.
class Arrays {
 public:
  // Offsets first, the memory once all are known.
  size_t take(size_t count) {
    const size_t at = count_;
    count_ += (count + 15) / 16 * 16;
    return at;
  }
  size_t count() const { return count_; }

 private:
  size_t count_ = 0;
};

class DecoderAttention {
 public:
  virtual ~DecoderAttention() = default;
  // Whether it takes and gives rows of `hidden` values.
  virtual bool fits(int hidden) const = 0;
  // out [batch, hidden] of x [batch, hidden], rounded; keys and values of these tokens are left in the cache.
  virtual void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const = 0;
};

// Heads in groups that share keys and values; queries and keys may be normed a head, then the first `rotary` values of
// each are turned by halves.
struct GroupedAttentionConfig {
  const Linear *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;
  Norm q_norm, k_norm;
  int heads = 0, groups = 0, size = 0;
  float scale = 1;
};

class GroupedAttention final : public DecoderAttention {
 public:
  explicit GroupedAttention(GroupedAttentionConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;

 private:
  GroupedAttentionConfig config_;
};

// operators/probes/attention.py has the formula; with the up-projections absorbed. expansion [heads, nope + value,
// rank] of the model's dtype is kv_b_proj's weight. keys hold the latent, values the rotary key.
struct LatentAttentionConfig {
  const Linear* q = nullptr;  // from x; where it is null, q_a and q_b with a norm between them
  const Linear *q_a = nullptr, *q_b = nullptr;
  Norm q_norm;
  const Linear* kv = nullptr;
  Norm kv_norm;
  const void* expansion = nullptr;
  const Linear* o = nullptr;
  int heads = 0, rank = 0, nope = 0, rope = 0, value = 0;
  bool neighbours = false;
  float scale = 1;
};

class LatentAttention final : public DecoderAttention {
 public:
  explicit LatentAttention(LatentAttentionConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;

 private:
  LatentAttentionConfig config_;
};

class FeedForward {
 public:
  virtual ~FeedForward() = default;
  virtual bool fits(int hidden) const = 0;  // as DecoderAttention's
  // out [batch, hidden] of x [batch, hidden], rounded.
  virtual void forward(const float* x, DType dtype, int batch, float* out) const = 0;
};

// down(silu(gate(x)) * up(x))
class GatedUnit final : public FeedForward {
 public:
  GatedUnit(const Linear& gate, const Linear& up, const Linear& down);
  bool fits(int hidden) const override;
  void forward(const float* x, DType dtype, int batch, float* out) const override;

 private:
  const Linear &gate_, &up_, &down_;
};

enum class Scores { softmax, sigmoid };

// Chooses a token's experts as transformers' routers do.
struct RouterConfig {
  const Linear* linear = nullptr;
  Scores scores = Scores::softmax;
  const float* correction = nullptr;  // [experts], added for the choice only; sigmoid
  int top_k = 0;
  int groups = 1, top_groups = 1;  // only experts of the best groups are taken; sigmoid
  bool normed = false;             // weights of a token add up to one
  float factor = 1;
};

// Router and routed experts; added to them, where it is given, what `shared` makes of all tokens, times sigmoid(gate ·
// x) where there is a gate [hidden] of the model's dtype.
class Mixture final : public FeedForward {
 public:
  Mixture(RouterConfig router, const Experts& experts, const FeedForward* shared, const void* gate = nullptr);
  bool fits(int hidden) const override;
  void forward(const float* x, DType dtype, int batch, float* out) const override;

 private:
  void choose(float* logits, int32_t* ids, float* weights, DType dtype) const;

  RouterConfig router_;
  const Experts& experts_;
  const FeedForward* shared_;
  const void* gate_;
};

class Decoder {
 public:
  Decoder(int hidden, DType dtype) : hidden_(hidden), dtype_(dtype) {}

  void add(const Norm& before_attention, const DecoderAttention& attention, const Norm& before_feed_forward,
           const FeedForward& unit);
  int hidden() const { return hidden_; }
  DType dtype() const { return dtype_; }

  // y [batch, hidden] = x through layers first to last - 1, and through `final_norm` where that has a weight. `caches`
  // has one for each layer.
  void forward(const void* x, const Step& step, const std::vector<LayerCache>& caches, int first, int last,
               const Norm& final_norm, void* y) const;

 private:
  struct Layer {
    Norm before_attention;
    const DecoderAttention* attention;
    Norm before_feed_forward;
    const FeedForward* feed_forward;
  };
  using Layers = std::vector<Layer>;
  int hidden_;
  DType dtype_;
  mutable Turns turn_;  // of the pointer
  std::shared_ptr<const Layers> layers_ = std::make_shared<Layers>();
};

}  // namespace ktinject
