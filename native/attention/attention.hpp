// Attention of a decode step on the CPU, over keys and values in a cache: one token a row, or some tokens of one text,
// of which the last may be taken back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <span>
#include <vector>

#include "attention/tuning.hpp"
#include "gemm/linear.hpp"
#include "gemm/step_ops.hpp"

namespace ktinject::attention {

using gemm::Norm;

// A tensor of a layer's cache, contiguous. The first of its sizes is the batch.
struct Cached {
  void* data = nullptr;
  DType dtype = DType::bf16;
  std::vector<int> shape;
};

// What the last step of several tokens has overwritten, and what a layer needs to make it for fewer of them.
struct Undo {
  int position = 0, rows = 0, prompt = 0;  // prompt: tokens that lie before a ring
  std::vector<std::byte> first, second;
  std::vector<float> inputs;

  // Leaves the first `kept` tokens of inputs, in which parts of so many values a token lie one behind the other: what
  // is kept may be cut once more. Returns a copy, which may be written to.
  std::vector<float> cut(int kept, std::initializer_list<int> parts);
};

// The places that the tokens of a step attend to, as an indexer has chosen them.
struct Choice {
  int position = -1;         // of the step; -1: there is none
  std::vector<bool> is_all;  // [batch]: a token attends to all that its mask shows
  // [batch]: else to these, in order; or [batch, heads of an index]: to these blocks of places
  std::vector<std::vector<int>> places;
};

// What a layer keeps of the tokens before: keys and values [batch, heads, capacity, width] of the model's dtype, or
// what attention/gated_delta.hpp says.
struct LayerCache {
  Cached first, second;
  Undo* undo = nullptr;       // of steps whose rows are consecutive
  Cached third;               // keys of an index, see attention/indexer.hpp; without a shape where there is none
  Choice* choice = nullptr;   // of the last layer with an index
  std::vector<Cached> parts;  // what compressors keep, see attention/compressor.hpp
};

// What is computed of a layer's output: begin(), on any one thread, which gives the row that is taken; then either
// linear's product y of it, or run(index) for index < count. Some layers do it within their own call of the pool, see
// stages.hpp.
struct Following {
  std::function<const float*()> begin;
  const gemm::Linear* linear = nullptr;
  float* y = nullptr;
  int count = 0;  // at least one, if there is no linear
  std::function<void(int index)> run;
  std::function<std::span<const std::byte>(int index)> reads;
  bool is_done = false;  // the layer sets it
};

// What is the same for all layers of a step.
struct Step {
  DType dtype = DType::bf16;
  int batch = 1;
  int position = 0;  // of the tokens of this step: so many came before
  // [batch or 1, angles] of dtype, or of fp32: what is turned is then rounded at the end.
  const void *cos = nullptr, *sin = nullptr;
  bool has_wide_rotation = false;
  int angles = 0;
  // The columns that a layer turns by: kinds of layers may have their own, side by side.
  int first_angle = 0, rotary = 0;
  bool shared_rotation = false;   // one row for all
  const uint8_t* mask = nullptr;  // [batch, mask_stride], positions up to `position`
  size_t mask_stride = 0;
  // Rows are tokens of one text, the first at `position`, the others after it, of which each attends to those before
  // it. The cache has one row, and masks are of positions up to each row's own.
  bool consecutive = false;
  int most_chosen = 0;  // places that an indexer chooses at most, if it would choose more; 0: as many as it does
  // Compressors make the key of a window that is not complete, too; where no index chooses, it is seen.
  bool makes_all = false;
  // [batch], 0 for rows whose text has ended, for which no routed expert is computed; null: there are none.
  const uint8_t* live = nullptr;
  // [batch]: of each token in its text, which padding before it is not counted in; null: there is none
  const int64_t* positions = nullptr;
  const int64_t* tokens = nullptr;  // [batch]: their numbers; null: there are none
  Following* following = nullptr;
  int prompt = 0;  // tokens of the prompt, which some layers with a window keep beside it; 0: that is not known

  // Rows that are computed beside each other, those that a cache has, and what belongs to a row.
  int together() const { return consecutive ? 1 : batch; }
  int cache_row(int row) const { return consecutive ? 0 : row; }
  int position_of(int row) const { return consecutive ? position + row : position; }
  int own_position(int row) const {
    const int place = position_of(row);
    return positions == nullptr || positions[row] > place ? place : std::max(0, static_cast<int>(positions[row]));
  }
  const uint8_t* mask_of(int row) const {
    return mask == nullptr ? nullptr : mask + static_cast<size_t>(row) * mask_stride;
  }
  size_t width() const { return dtype_bytes(dtype); }
  const std::byte* rotation(const void* table, int row) const {
    const size_t before = shared_rotation ? 0 : static_cast<size_t>(row) * static_cast<size_t>(angles);
    return static_cast<const std::byte*>(table) +
           (before + static_cast<size_t>(first_angle)) * (has_wide_rotation ? sizeof(float) : width());
  }
};

class BlockIndex;

class DecoderAttention {
 public:
  virtual ~DecoderAttention() = default;
  // Whether it takes and gives rows of `hidden` values.
  virtual bool fits(int hidden) const = 0;
  // out [batch, hidden] of x [batch, hidden], rounded; keys and values of these tokens are left in the cache.
  virtual void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const = 0;
  // Of the tokens of the last step, which were consecutive, leave in the cache what the first `kept` alone would have
  // left, to the bit. What lies behind the last token needs no care.
  virtual void keep(const LayerCache&, int /*kept*/) const {}
};

// Heads in groups that share keys and values; queries and keys may be normed, a head or all heads at once, and the
// first `rotary` values of each head are turned, behind the norms or before them.
//
// Of a layer with a window, the cache is a ring: position p lies at place p % window. Attention does not depend on the
// order of keys, and what the ring holds is what the window shows. One that keeps the prompt has a ring behind it.
struct GroupedAttentionConfig {
  const gemm::Linear *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;  // v null: values are what k gives
  Norm q_norm, k_norm;  // of `size` values, or of those of all heads (MiniMax-M2, OLMoE)
  int heads = 0, groups = 0, size = 0;
  float scale = 1;
  int window = 0;                // positions that are attended to, with the token's own; 0: all
  const float* sinks = nullptr;  // [heads]: scores that take part in the softmax and have no value (gpt-oss)
  bool gated = false;            // q gives [heads, 2, size]: queries, and what the output is gated with (Qwen3-Next)
  bool neighbours = false;       // pairs that are turned are (2i, 2i + 1) and stay there (ERNIE); else (i, i + n / 2)
  bool norms_last = false;       // norms are of heads that are turned (Hunyuan)
  int value = 0;                 // values of a head of v, if not `size` (MiMo-V2)
  float value_scale = 1;         // that values are multiplied with before they are cached
  const gemm::Linear* gate = nullptr;  // from x: what heads, or each of their values, are multiplied with a function of
  bool has_softplus = false;           // softplus (Laguna); else sigmoid (AFMoE)
  const BlockIndex* index = nullptr;   // chooses blocks of places; groups are a multiple of its heads (MiniMax-M3)
  Norm v_norm;                         // of a head's values (Gemma 4)
  // A row's tokens are cut into pieces of `window`, and a token attends to those of its own piece (Llama 4).
  bool chunked = false;
  bool keeps_prompt = false;         // all of it is attended to, and of what is behind it a window (Unlimited-OCR)
  Steps tuned;                       // of queries, for the position behind their own
  Power power;                       // the same, where padding before a token is not counted
  const float* gate_bias = nullptr;  // [heads], added to what `gate` gives their values (BEAM)
};

class GroupedAttention final : public DecoderAttention {
 public:
  explicit GroupedAttention(GroupedAttentionConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  // out [rows computed together, heads, value]: of the chosen blocks of so many places, for these rows from `first` on.
  void attend_blocks(const float* q, const Step& step, const LayerCache& cache, int first, int block, float* out) const;
  int value() const { return config_.value == 0 ? config_.size : config_.value; }
  // The values of a row, normed where there is a norm. k: what its projection gives, not rounded.
  void prepare_values(float* v, const float* k, const Step& step) const;

  GroupedAttentionConfig config_;
};

// Where keys and values of a step lie in a cache, and how many are attended to, from the first on.
struct Places {
  int capacity, own, count;
};

class PlaceIndex;

// operators/probes/attention.py has the formula; with the up-projections absorbed. expansion [heads, nope + value,
// rank] of the model's dtype is kv_b_proj's weight. keys hold the latent, values the rotary key.
struct LatentAttentionConfig {
  const gemm::Linear* q = nullptr;  // from x; where it is null, q_a and q_b with a norm between them
  const gemm::Linear *q_a = nullptr, *q_b = nullptr;
  Norm q_norm;
  const gemm::Linear* kv = nullptr;
  Norm kv_norm;
  const void* expansion = nullptr;
  const gemm::Linear* o = nullptr;
  int heads = 0, rank = 0, nope = 0, rope = 0, value = 0;
  bool neighbours = false;
  bool stays = false;  // pairs of neighbours stay where they are, and the step's rotation is in fp32 (DeepSeek-V2)
  float scale = 1;
  // Of queries, for their position, in which padding before a token is not counted.
  Steps tuned;
  Growth growth;
  // It attends to chosen places: those of its indexer, or of the layer before that has one.
  const PlaceIndex* indexer = nullptr;
  bool chooses = false;
  const float* sinks = nullptr;        // [heads]: scores that take part in the softmax and have no value (Hunyuan 4)
  const gemm::Linear* gate = nullptr;  // from x: by whose sigmoid heads (dots3-note) or their values (Hunyuan 4) are
                                       // multiplied
  // Of dots3-note: what the normed query and latent are multiplied with, a norm of the rotary key, and positions that
  // are attended to; 0: all.
  float low_factor = 1, latent_factor = 1;
  Norm k_norm;
  int window = 0;
};

struct Over;  // see attend_all.hpp

class LatentAttention final : public DecoderAttention {
 public:
  explicit LatentAttention(LatentAttentionConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;
  void keep(const LayerCache& cache, int kept) const override;

 private:
  // out [batch, heads, rank]: the latents of the chosen places, for the rows from `first` that are computed together.
  void attend_chosen(const float* query, const Step& step, const LayerCache& cache, int first, float* out) const;
  // q [batch, heads, nope + rope] and kv [batch, rank + rope] of x, rounded, and gate [batch, heads] where there is
  // one. low: scratch for twice q_a's output
  void project(const float* x, const Step& step, float* low, float* q, float* kv, float* gate) const;
  // One row's rotary values, turned if the step has a rotation.
  void rotate(const float* from, const Step& step, int row, float* to) const;
  // The latent and rotary key of a row of kv, to the cache. latent: scratch for [rank + 2 * rope]
  void write(int row, const float* kv, const Step& step, const Places& places, float* latent,
             const LayerCache& cache) const;
  // query [batch, heads, rank + rope], to compare with what is cached: q, which it tunes, with the keys' up-projection
  // absorbed.
  void absorb(float* q, const Step& step, float* query) const;
  void absorb_head(int h, float* q, const Step& step, float* query) const;
  // head [batch, heads, value] of the attended latents [batch, heads, rank]: the values' up-projection.
  void expand(const float* sum, const Step& step, float* head) const;
  void expand_head(int h, const float* sum, const Step& step, float* head) const;
  std::span<const std::byte> values_of(int h, const Step& step) const;  // that up-projection
  // Of one row, from absorb() to o_proj, as one call of the pool. False where a part is too small for it: then nothing
  // was done.
  template <class Of, class End>
  bool attend_in_one_call(float* q, float* query, const Step& step, const Over& over, Of of, float* sum, float* head,
                          End&& end, const gemm::Linear::Product& to_out) const;

  LatentAttentionConfig config_;
};

}  // namespace ktinject::attention
