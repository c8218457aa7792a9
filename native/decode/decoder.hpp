// The decoder layers of a model on one token a row, or some tokens of one text, in one call: a decode step on the CPU.
//
// At one token a layer's matrix products take tens of microseconds, and twenty small tensor operations around them
// take longer. Here they are loops over a few thousand values, done by the caller or, where it pays, by the pool.
//
//   x += norm(attention(norm(x)))        attention: GroupedAttention or LatentAttention, or one with states
//   x += norm(feed_forward(norm(x)))     feed_forward: GatedUnit, PlainUnit, or Mixture with one beside it
//   x *= scale
//
// Each line may be missing, and each of the norms. Both sides of a sum may be multiplied with numbers. Of a parallel
// layer, the second line takes what the first takes. In place of x there may be several streams, see
// hyper_connection.hpp: then each part takes what they are collapsed to.
//
// Weights belong to others: packed ones to Linear and Experts, the rest to the model. A decoder only points to them.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "attention/attention.hpp"
#include "decode/hyper_connection.hpp"
#include "gemm/linear.hpp"
#include "gemm/step_ops.hpp"
#include "moe/experts.hpp"
#include "runtime/waiting.hpp"

namespace ktinject::decode {

// What is known of the rows of a step beside their values, as a step has it.
struct Rows {
  const uint8_t* live = nullptr;
  const int64_t* tokens = nullptr;
  const float* begun = nullptr;  // of one row: what FeedForward::begin() has left
};

class FeedForward {
 public:
  virtual ~FeedForward() = default;
  virtual bool fits(int hidden) const = 0;  // as DecoderAttention's
  // out [batch, hidden] of x [batch, hidden], rounded.
  virtual void forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const = 0;

  // What it begins with for one row may be computed before, and be given to forward(): `values` of them, 0 if there is
  // nothing. They are linear's product of the row, or `parts` of any order leave them.
  struct Beginning {
    int values = 0;
    const gemm::Linear* linear = nullptr;
    int parts = 0;
  };
  virtual Beginning beginning() const { return {}; }
  virtual void begin(int /*part*/, const float* /*x*/, float* /*values*/) const {}
  virtual std::span<const std::byte> reads(int /*part*/) const { return {}; }
};

// g and u of a gated unit: silu(min(g, gate_max)) * (clamp(u, -up_limit, up_limit) + up_offset), where silu(x) is
// x * sigmoid(alpha * x), or gelu_tanh in its place.
struct Gating {
  float alpha = 1;
  float gate_max = std::numeric_limits<float>::infinity(), up_limit = std::numeric_limits<float>::infinity();
  float up_offset = 0;
  gemm::ActivationKind activation = gemm::ActivationKind::silu;
  bool is_wide = false;  // the activation is multiplied with u before anything is rounded (BEAM)

  bool is_plain() const { return alpha == 1.0f && std::isinf(gate_max) && std::isinf(up_limit) && up_offset == 0.0f; }
};

// down(silu(gate(x)) * up(x)), gated as above; without `up`, gate gives both, one behind the other.
class GatedUnit final : public FeedForward {
 public:
  GatedUnit(const gemm::Linear& gate, const gemm::Linear* up, const gemm::Linear& down, Gating gating = {});
  bool fits(int hidden) const override;
  void forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const override;

 private:
  int inner() const { return down_.config().in_features; }
  // gate [count] *= up [count], as `gating_` has it; both are rounded.
  void multiply(float* gate, float* up, int count, DType dtype) const;

  const gemm::Linear &gate_, *up_, &down_;
  Gating gating_;
};

// down(relu(up(x))²)
class PlainUnit final : public FeedForward {
 public:
  PlainUnit(const gemm::Linear& up, const gemm::Linear& down);
  bool fits(int hidden) const override;
  void forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const override;

 private:
  const gemm::Linear &up_, &down_;
};

// What a part takes and gives, normed where there is a norm.
struct Between {
  attention::Norm before, behind;
};

// behind(part(before(x)))
class Normed final : public FeedForward {
 public:
  Normed(const FeedForward& part, Between norms);
  bool fits(int hidden) const override;
  void forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const override;

 private:
  const FeedForward& part_;
  Between norms_;
};

enum class Scores { softmax, sigmoid, root_softplus };

// Chooses a token's experts as transformers' routers do.
struct RouterConfig {
  // Either packed, or [experts, hidden], and a bias [experts] where there is one.
  const gemm::Linear* linear = nullptr;
  const float *weight = nullptr, *bias = nullptr;
  attention::Norm norm;    // of what it takes,
  float input_factor = 1;  // which is then multiplied with this
  Scores scores = Scores::softmax;
  const float* correction = nullptr;  // [experts], added to scores for the choice only
  int top_k = 0;
  int groups = 1, top_groups = 1;  // only experts of the best groups are taken; sigmoid
  bool normed = false;             // weights of a token add up to one
  float factor = 1;
  // To the model's dtype.
  bool rounds_logits = false, rounds_scores = false, rounds_weights = false;
  bool by_logits = false;                 // the choice is by what scores are made of: these may tie where it does not
  const float* expert_factors = nullptr;  // [experts], that the weights of those chosen are multiplied with
  // Weights are those of a softmax over experts near the best one, and for the second expert over those near that one,
  // the first left out: experts of which (best - logit) / max(|logit|, best) is at most this. 0: it is not so. For two
  // experts.
  float nearness = 0;
  bool scales_input = false;  // what an expert takes is multiplied with its weight, not what it gives
  // [vocabulary, top_k]: the experts of a token, by its number; null: they are chosen (DeepSeek-V4)
  const int64_t* table = nullptr;
  int vocabulary = 0;
};

// Linear layers around experts that are narrower than the model: to their width and back.
struct Narrow {
  const gemm::Linear *in = nullptr, *out = nullptr;
};

// Of the routed experts' sum, and of all of a mixture.
struct Factors {
  float routed = 1, whole = 1;
};

// Router and routed experts, times a factor; added to them, where it is given, what `shared` makes of all tokens, times
// sigmoid(gate · x) where there is a gate [hidden] of the model's dtype; then all times another factor.
class Mixture final : public FeedForward {
 public:
  // norms: of what the routed experts take and give.
  Mixture(RouterConfig router, const moe::Experts& experts, const FeedForward* shared, const void* gate = nullptr,
          Narrow narrow = {}, Factors factors = {}, Between norms = {});
  bool fits(int hidden) const override;
  void forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const override;
  // The router's logits.
  Beginning beginning() const override;
  void begin(int part, const float* x, float* logits) const override;
  std::span<const std::byte> reads(int part) const override;

 private:
  void check_router() const;
  // ids and weights [batch, top_k] of x; -1 for rows that are not live.
  void route(const float* x, DType dtype, int batch, const Rows& rows, int32_t* ids, float* weights) const;
  // [batch, experts] of x, without the bias of a weight that is not packed
  void score(const float* x, int batch, float* logits) const;
  // Of a weight that is not packed, a part of a row's.
  int parts_of_router() const;
  void score_part(int part, const float* x, float* logits) const;
  // token: of the row; or null
  void choose(float* logits, const int64_t* token, int32_t* ids, float* weights, DType dtype) const;
  // Scores of logits, in place; and which expert is a token's i-th.
  void score_logits(float* logits, DType dtype) const;
  int expert_of(int64_t token, int i) const;
  void choose_near(const float* logits, int32_t* ids, float* weights, DType dtype) const;
  // out [batch, hidden], rounded; ids and weights [batch, top_k]
  void run_experts(const float* x, const int32_t* ids, const float* weights, DType dtype, int batch, float* out) const;
  void run_scaled(const float* x, const int32_t* ids, const float* weights, DType dtype, int batch, float* out) const;
  int hidden() const {
    return narrow_.in == nullptr ? experts_.config().hidden_size : narrow_.in->config().in_features;
  }

  RouterConfig router_;
  const moe::Experts& experts_;
  const FeedForward* shared_;
  const void* gate_;
  Narrow narrow_;
  Factors factors_;
  Between norms_;
};

// How a part is added to the stream x: kept * x + added * part.
struct Sum {
  float kept = 1, added = 1;
};

// One part of a layer or both; each with the norms of its input and output that there are.
struct LayerConfig {
  attention::Norm before_attention, behind_attention;
  const attention::DecoderAttention* attention = nullptr;
  attention::Norm before_feed_forward, behind_feed_forward;
  const FeedForward* feed_forward = nullptr;
  Sum attention_sum, feed_forward_sum;
  bool keeps_normed = false;  // the stream itself becomes what the norms before the parts give (MiniMax-01)
  // The columns of the step's rotation that its attention turns by; -1: all.
  int first_angle = 0, angles = -1;
  bool is_parallel = false;      // the feed-forward part takes what attention takes, and has no norm of its own
  const float* scale = nullptr;  // one number, or none
  // Around the parts, in a model of several streams; then what is added is not multiplied.
  const HyperConnection *attention_streams = nullptr, *feed_forward_streams = nullptr;
};

class Decoder {
 public:
  Decoder(int hidden, DType dtype, int streams = 1);

  void add(const LayerConfig& layer);
  int hidden() const { return hidden_; }
  int streams() const { return streams_; }
  DType dtype() const { return dtype_; }

  // y [batch, streams, hidden] = x through layers first to last - 1; or [batch, hidden], these collapsed by `head`, if
  // there is one, and through `final_norm` where that has a weight. `caches` has one for each layer.
  void forward(const void* x, const attention::Step& step, const std::vector<attention::LayerCache>& caches, int first,
               int last, const attention::Norm& final_norm, const HyperConnection* head, void* y) const;
  // Of the tokens of the last step, which were consecutive, only the first `kept` were read.
  void keep(const std::vector<attention::LayerCache>& caches, int kept) const;

 private:
  using Layers = std::vector<LayerConfig>;
  std::shared_ptr<const Layers> layers_for(const std::vector<attention::LayerCache>& caches) const;
  void check_streams(const LayerConfig& layer) const;
  int hidden_;
  DType dtype_;
  int streams_;
  mutable runtime::Turns turn_;  // of the pointer
  std::shared_ptr<const Layers> layers_ = std::make_shared<Layers>();
};

}  // namespace ktinject::decode
