// The decoder layers of a model on the CPU.
#include "decode/decoder.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "attention/block_index.hpp"
#include "attention/decaying_state.hpp"
#include "attention/gated_delta.hpp"
#include "attention/mamba1.hpp"
#include "attention/mamba2.hpp"
#include "attention/short_convolution.hpp"
#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"
#include "bindings/sequences.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"

namespace ktinject {
namespace {

using Mask = Array<const bool, nb::ndim<2>>;
using Live = Array<const bool, nb::ndim<1>, nb::c_contig>;
using Positions = Array<const int64_t, nb::ndim<1>, nb::c_contig>;

attention::Cached cached_of(const Kept& array) {
  if (array.ndim() < 3 || array.ndim() > 4)
    throw std::invalid_argument("cache: found a tensor of " + std::to_string(array.ndim()) +
                                " dimensions; expected 3 or 4, of which the first is the batch");
  attention::Cached found{array.data(), dtype_of(array.dtype(), "cache"), {}};
  for (size_t i = 0; i < array.ndim(); ++i) found.shape.push_back(size_of(array.shape(i), "cache"));
  return found;
}

HeldCache make_cache(std::vector<Kept> first, std::vector<Kept> second, std::vector<std::optional<Kept>> third,
                     std::vector<Kept> parts, const std::vector<int>& part_counts) {
  if (first.empty() || first.size() != second.size())
    throw std::invalid_argument("cache: found " + std::to_string(first.size()) + " and " +
                                std::to_string(second.size()) + " tensors; expected two of each layer");
  if (!third.empty() && third.size() != first.size())
    throw std::invalid_argument("cache: found keys of " + std::to_string(third.size()) + " indexes; expected none or " +
                                std::to_string(first.size()) + ", some of them None");
  int all = 0;
  for (const int count : part_counts) all += count;
  if (static_cast<size_t>(all) != parts.size() || (!part_counts.empty() && part_counts.size() != first.size()))
    throw std::invalid_argument("cache: found " + std::to_string(parts.size()) +
                                " tensors of compressed keys; expected part_counts of them, a number for each layer");
  HeldCache cache;
  cache.undo.resize(first.size());
  cache.choice.resize(1);
  for (size_t i = 0; i < first.size(); ++i) {
    cache.layers.push_back({cached_of(first[i]), cached_of(second[i]), &cache.undo[i], {}, cache.choice.data()});
    if (!third.empty() && third[i]) cache.layers.back().third = cached_of(*third[i]);
  }
  auto part = parts.cbegin();
  for (size_t i = 0; i < part_counts.size(); ++i)
    for (int n = 0; n < part_counts[i]; ++n) cache.layers[i].parts.push_back(cached_of(*part++));
  cache.held = std::move(first);
  cache.held.insert(cache.held.end(), second.begin(), second.end());
  for (std::optional<Kept>& index : third)
    if (index) cache.held.push_back(std::move(*index));
  for (Kept& one : parts) cache.held.push_back(std::move(one));
  return cache;
}

void forward(const decode::Decoder& self, const Input& x, const std::optional<Input>& cos,
             const std::optional<Input>& sin, const std::optional<Mask>& mask, int position, HeldCache& cache,
             int first, int last, const HeldNorm* final_norm, bool consecutive, const std::optional<Live>& live,
             int most_chosen, const std::optional<Positions>& positions, const Output& out,
             const std::optional<Positions>& tokens, bool makes_all, const decode::HyperConnection* head, int prompt) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument("decoder: " + what); };
  const DType dtype = dtype_of(x.dtype(), "hidden states");
  const auto batch = x.shape(0);
  attention::Step step;
  step.dtype = dtype;
  step.batch = size_of(batch, "batch");
  step.position = position;
  step.consecutive = consecutive;
  step.most_chosen = most_chosen;
  step.makes_all = makes_all;
  const auto wide = static_cast<size_t>(self.hidden()) * static_cast<size_t>(self.streams());
  if (dtype != self.dtype() || x.shape(1) != wide || batch == 0)
    refuse("hidden states must be [batch, " + std::to_string(wide) + "] of the model's dtype");
  if (out.shape(0) != batch || out.dtype() != x.dtype() ||
      out.shape(1) != (head == nullptr ? wide : static_cast<size_t>(self.hidden())))
    refuse("output: shape and dtype must be those of the hidden states, or behind a head of one stream");
  if (position < 0) refuse("position " + std::to_string(position));
  if (prompt < 0 || prompt > position) refuse("a prompt of " + std::to_string(prompt) + " tokens");
  step.prompt = prompt;
  if (final_norm != nullptr && (!final_norm->is_of(dtype) || final_norm->norm.size != self.hidden()))
    refuse("the final norm must be one of " + std::to_string(self.hidden()) + " values of the model's dtype");
  if (cos.has_value() != sin.has_value()) refuse("cos and sin belong together");
  if (cos) {
    for (const Input* table : {&*cos, &*sin})
      if ((table->dtype() != x.dtype() && dtype_of(table->dtype(), "cos") != DType::f32) ||
          table->dtype() != cos->dtype() || (table->shape(0) != batch && table->shape(0) != 1) ||
          table->shape(1) != cos->shape(1) || table->shape(0) != cos->shape(0) || cos->shape(1) % 2 != 0)
        refuse("cos and sin must be [batch or 1, rotary] of the model's dtype or fp32, rotary even");
    step.has_wide_rotation = cos->dtype() != x.dtype();
    step.cos = cos->data();
    step.sin = sin->data();
    step.rotary = step.angles = size_of(cos->shape(1), "cos");
    step.shared_rotation = cos->shape(0) == 1;
  }
  if (mask) {
    const int places = step.position_of(step.batch - 1) + 1;
    if (mask->shape(0) != batch || mask->shape(1) < static_cast<size_t>(places) || mask->stride(1) != 1)
      refuse("the mask must be [batch, at least " + std::to_string(places) + "], rows contiguous");
    step.mask = reinterpret_cast<const uint8_t*>(mask->data());
    step.mask_stride = static_cast<size_t>(mask->stride(0));
  }
  if (live) {
    if (live->shape(0) != batch) refuse("live must be [batch]");
    step.live = reinterpret_cast<const uint8_t*>(live->data());
  }
  if (positions) {
    if (positions->shape(0) != batch) refuse("positions must be [batch]");
    step.positions = positions->data();
  }
  if (tokens) {
    if (tokens->shape(0) != batch) refuse("tokens must be [batch]");
    step.tokens = tokens->data();
  }
  cache.rows = 0;  // what an error leaves cannot be taken back
  self.forward(x.data(), step, cache.layers, first, last, norm_of(final_norm), head, out.data());
  if (consecutive) cache.rows = step.batch;
}

void keep(const decode::Decoder& self, HeldCache& cache, int kept) {
  if (kept < 0 || kept > cache.rows)
    throw std::invalid_argument("decoder: found " + std::to_string(kept) + " tokens to keep of a step of " +
                                std::to_string(cache.rows) + " consecutive ones; expected as many or fewer");
  self.keep(cache.layers, kept);
  cache.rows = kept;
}

void def_state(nb::module_& m) {
  nb::class_<HeldNorm>(
      m, "Norm",
      "An RMS norm, or with `centred` a layer norm: weight [n], and bias, of the model's dtype. is_wide: "
      "the weight is fp32 in any model, and only what comes out is rounded.")
      .def(
          "__init__",
          [](HeldNorm* self, Vector weight, float epsilon, bool unit_offset, bool rounds_first, bool centred,
             std::optional<Vector> bias, bool is_wide) {
            if (unit_offset && rounds_first)
              throw std::invalid_argument("norm: a weight less 1 is not multiplied with rounded values");
            if (centred && (unit_offset || rounds_first))
              throw std::invalid_argument("norm: a layer norm rounds what comes out, and its weight is whole");
            if (bias && (!centred || bias->shape(0) != weight.shape(0) || bias->dtype() != weight.dtype()))
              throw std::invalid_argument("norm: a bias is a layer norm's, as long as its weight and of its dtype");
            if (is_wide && (centred || rounds_first || dtype_of(weight.dtype(), "norm") != DType::f32))
              throw std::invalid_argument("norm: a weight that is fp32 in any model is an RMS norm's that rounds last");
            const attention::Norm norm{
                weight.data(), size_of(weight.shape(0), "norm"), epsilon, unit_offset, rounds_first,
                centred,       bias ? bias->data() : nullptr,    is_wide};
            new (self) HeldNorm{std::move(weight), std::move(bias), norm};
          },
          nb::arg("weight"), nb::arg("epsilon"), nb::kw_only(), nb::arg("unit_offset") = false,
          nb::arg("rounds_first") = true, nb::arg("centred") = false, nb::arg("bias") = nb::none(),
          nb::arg("is_wide") = false);
  nb::class_<HeldCache>(
      m, "DecoderCache",
      "What all layers keep of the tokens before, two tensors a layer: keys and values [batch, heads, "
      "capacity, width]. third: keys of an index [batch, 1, capacity, width], None for layers without one. parts: what "
      "compressors keep, those of a layer behind those of the one before, of each so many as part_counts has.")
      .def(
          "__init__",
          [](HeldCache* self, const Sequence<Kept>& first, const Sequence<Kept>& second,
             const Sequence<std::optional<Kept>>& third, const Sequence<Kept>& parts,
             const Sequence<int>& part_counts) {
            new (self)
                HeldCache(make_cache(vector_of(first, "first"), vector_of(second, "second"), vector_of(third, "third"),
                                     vector_of(parts, "parts"), vector_of(part_counts, "part_counts")));
          },
          nb::arg("first"), nb::arg("second"), nb::arg("third") = nb::make_tuple(), nb::arg("parts") = nb::make_tuple(),
          nb::arg("part_counts") = nb::make_tuple());
}

void init_gated_delta(attention::GatedDelta* self, const gemm::Linear& qkv, const HeldProjection& ba,
                      const gemm::Linear* z, const HeldProjection* a, const gemm::Linear& o, const Input& taps,
                      const FloatVector& a_log, const FloatVector& dt_bias, const HeldNorm& norm, int key_heads,
                      int value_heads, int key_size, int value_size, const gemm::Linear* k, const gemm::Linear* v,
                      const gemm::Linear* z_low, const HeldProjection* a_low, bool by_channels, float bound) {
  attention::GatedDeltaConfig config;
  config.qkv = &qkv;
  config.ba = ba.projection;
  config.z = z;
  if (a != nullptr) config.a = a->projection;
  config.o = &o;
  config.k = k;
  config.v = v;
  config.z_low = z_low;
  if (a_low != nullptr) config.a_low = a_low->projection;
  config.by_channels = by_channels;
  config.taps_weight = taps.data();
  config.taps = size_of(taps.shape(1), "taps");
  config.has_wide_taps = by_channels && dtype_of(taps.dtype(), "taps") == DType::f32;
  config.bound = bound;
  config.a_log = a_log.data();
  config.dt_bias = dt_bias.data();
  config.norm = norm.norm;
  config.key_heads = key_heads;
  config.value_heads = value_heads;
  config.key_size = key_size;
  config.value_size = value_size;
  if ((z == nullptr) != (a == nullptr)) throw std::invalid_argument("gated delta rule: z and a belong together");
  if (a_log.shape(0) != static_cast<size_t>(value_heads) || dt_bias.shape(0) != static_cast<size_t>(config.decays()))
    throw std::invalid_argument("gated delta rule: one a_log and one dt_bias a head of values are needed, or by " +
                                std::string("channels one dt_bias each"));
  if (taps.shape(0) != static_cast<size_t>(config.channels()) || (!by_channels && taps.dtype() != norm.weight.dtype()))
    throw std::invalid_argument("gated delta rule: the convolution must be [" + std::to_string(config.channels()) +
                                ", taps] of the norm's dtype");
  if (by_channels && dtype_of(norm.weight.dtype(), "norm") != DType::f32)
    throw std::invalid_argument("gated delta rule: by channels, the norm's weight must be fp32");
  new (self) attention::GatedDelta(config);
}

void def_gated_delta(nb::module_& m) {
  nb::class_<attention::GatedDelta, attention::DecoderAttention>(m, "GatedDelta", "Linear attention, gated delta rule.")
      .def("__init__", &init_gated_delta, nb::kw_only(), nb::arg("qkv"), nb::arg("ba"), nb::arg("z").none(),
           nb::arg("a").none(), nb::arg("o"), nb::arg("taps"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("norm"),
           nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_size"), nb::arg("value_size"),
           nb::arg("k") = nb::none(), nb::arg("v") = nb::none(), nb::arg("z_low") = nb::none(),
           nb::arg("a_low") = nb::none(), nb::arg("by_channels") = false, nb::arg("bound") = 0.0f,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(),
           nb::keep_alive<1, 10>(), nb::keep_alive<1, 15>(), nb::keep_alive<1, 16>(), nb::keep_alive<1, 17>(),
           nb::keep_alive<1, 18>());
}

void def_short_convolution(nb::module_& m) {
  nb::class_<attention::ShortConvolution, attention::DecoderAttention>(m, "ShortConvolution",
                                                                       "A convolution over the last tokens, gated.")
      .def(
          "__init__",
          [](attention::ShortConvolution* self, const gemm::Linear& in, const gemm::Linear& out, const Input& taps) {
            if (taps.shape(0) != static_cast<size_t>(out.config().in_features))
              throw std::invalid_argument("short convolution: the weight must be [" +
                                          std::to_string(out.config().in_features) + ", taps]");
            new (self) attention::ShortConvolution(
                {&in, &out, taps.data(), size_of(taps.shape(1), "taps"), dtype_of(taps.dtype(), "taps")});
          },
          nb::kw_only(), nb::arg("in_proj"), nb::arg("out_proj"), nb::arg("taps"), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
}

void init_mamba2(attention::Mamba2* self, const gemm::Linear& in, const gemm::Linear& out, const Input& taps,
                 const std::optional<Vector>& taps_bias, const FloatVector& a_log, const FloatVector& dt_bias,
                 const FloatVector& d, bool has_wide_d, const HeldNorm& norm, int heads, int groups, int head_size,
                 int state_size) {
  attention::Mamba2Config config;
  config.in = &in;
  config.out = &out;
  config.taps_weight = taps.data();
  config.taps_bias = taps_bias ? taps_bias->data() : nullptr;
  config.taps = size_of(taps.shape(1), "taps");
  config.a_log = a_log.data();
  config.dt_bias = dt_bias.data();
  config.d = d.data();
  config.has_wide_d = has_wide_d;
  config.norm = norm.norm;
  config.heads = heads;
  config.groups = groups;
  config.head_size = head_size;
  config.state_size = state_size;
  config.dtype = dtype_of(taps.dtype(), "taps");
  for (const FloatVector* one : {&a_log, &dt_bias, &d})
    if (one->shape(0) != static_cast<size_t>(heads))
      throw std::invalid_argument("mamba-2: one a_log, dt_bias and d a head are needed");
  const auto channels = static_cast<size_t>(config.channels());
  if (taps.shape(0) != channels || taps.dtype() != norm.weight.dtype() ||
      (taps_bias && (taps_bias->shape(0) != channels || taps_bias->dtype() != taps.dtype())))
    throw std::invalid_argument("mamba-2: the convolution must be [" + std::to_string(channels) +
                                ", taps] of the norm's dtype, and its bias as long");
  new (self) attention::Mamba2(config);
}

void def_mamba2(nb::module_& m) {
  nb::class_<attention::Mamba2, attention::DecoderAttention>(m, "Mamba2", "A state space, as Mamba-2 has it.")
      .def("__init__", &init_mamba2, nb::kw_only(), nb::arg("in_proj"), nb::arg("out_proj"), nb::arg("taps"),
           nb::arg("taps_bias").none(), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("d"), nb::arg("has_wide_d"),
           nb::arg("norm"), nb::arg("heads"), nb::arg("groups"), nb::arg("head_size"), nb::arg("state_size"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 10>());
}

void def_projection(nb::module_& m) {
  nb::class_<HeldProjection>(m, "Projection",
                             "A linear layer: packed, or of a weight [out, in] and maybe a bias [out].")
      .def(
          "__init__",
          [](HeldProjection* self, const gemm::Linear* linear, std::optional<Input> weight,
             std::optional<FloatVector> bias) {
            if ((linear == nullptr) != weight.has_value())
              throw std::invalid_argument("projection: either a packed layer or a weight is needed");
            attention::Projection projection;
            if (linear != nullptr) {
              projection = {linear, nullptr, DType::bf16, linear->config().out_features, linear->config().in_features};
            } else {
              projection = {nullptr, weight->data(), dtype_of(weight->dtype(), "weight"),
                            size_of(weight->shape(0), "weight"), size_of(weight->shape(1), "weight")};
            }
            if (bias && (projection.dtype != DType::f32 || linear != nullptr ||
                         bias->shape(0) != static_cast<size_t>(projection.out)))
              throw std::invalid_argument("projection: a bias is one of each output of a weight in fp32");
            projection.bias = bias ? bias->data() : nullptr;
            new (self) HeldProjection{std::move(weight), std::move(bias), projection};
          },
          nb::kw_only(), nb::arg("linear").none() = nb::none(), nb::arg("weight") = nb::none(),
          nb::arg("bias") = nb::none(), nb::keep_alive<1, 2>());
}

void def_decaying_state(nb::module_& m) {
  nb::class_<attention::DecayingState, attention::DecoderAttention>(m, "DecayingState",
                                                                    "States of heads that decay at fixed rates.")
      .def(
          "__init__",
          [](attention::DecayingState* self, const gemm::Linear& qkv, const gemm::Linear& gate, const gemm::Linear& o,
             const HeldNorm& norm, const FloatVector& slopes, int heads, int size) {
            if (slopes.shape(0) != static_cast<size_t>(heads))
              throw std::invalid_argument("decaying states: one slope a head is needed");
            new (self) attention::DecayingState({&qkv, &gate, &o, norm.norm, slopes.data(), heads, size});
          },
          nb::kw_only(), nb::arg("qkv"), nb::arg("gate"), nb::arg("o"), nb::arg("norm"), nb::arg("slopes"),
          nb::arg("heads"), nb::arg("size"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>());
}

void def_block_index(nb::module_& m) {
  nb::class_<attention::BlockIndex>(m, "BlockIndex", "What chooses blocks of the places that heads attend to.")
      .def(
          "__init__",
          [](attention::BlockIndex* self, const HeldProjection& q, const HeldProjection& k, const HeldNorm& q_norm,
             const HeldNorm& k_norm, int heads, int size, int block, int top_k, int local) {
            if (q_norm.weight.dtype() != k_norm.weight.dtype())
              throw std::invalid_argument("index of blocks: norms of two dtypes");
            new (self) attention::BlockIndex(
                {q.projection, k.projection, q_norm.norm, k_norm.norm, heads, size, block, top_k, local});
          },
          nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("heads"),
          nb::arg("size"), nb::arg("block"), nb::arg("top_k"), nb::arg("local"), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
}

void init_mamba1(attention::Mamba1* self, const gemm::Linear& in, const HeldProjection& proj, const HeldProjection& dt,
                 const gemm::Linear& out, const Input& taps, const std::optional<Vector>& taps_bias,
                 const FloatMatrix& a_log, const FloatVector& d, bool has_wide_d, const HeldNorm& dt_norm,
                 const HeldNorm& b_norm, const HeldNorm& c_norm) {
  attention::Mamba1Config config;
  config.in = &in;
  config.proj = proj.projection;
  config.dt = dt.projection;
  config.out = &out;
  config.taps_weight = taps.data();
  config.taps_bias = taps_bias ? taps_bias->data() : nullptr;
  config.taps = size_of(taps.shape(1), "taps");
  config.a_log = a_log.data();
  config.d = d.data();
  config.has_wide_d = has_wide_d;
  config.dt_norm = dt_norm.norm;
  config.b_norm = b_norm.norm;
  config.c_norm = c_norm.norm;
  config.dtype = dtype_of(taps.dtype(), "taps");
  const auto values = static_cast<size_t>(config.values());
  if (a_log.shape(0) != values || a_log.shape(1) != static_cast<size_t>(config.state_size()) || d.shape(0) != values)
    throw std::invalid_argument("mamba: a_log must be [" + std::to_string(values) + ", " +
                                std::to_string(config.state_size()) + "], and d as long");
  for (const HeldNorm* norm : {&dt_norm, &b_norm, &c_norm})
    if (norm->weight.dtype() != taps.dtype()) throw std::invalid_argument("mamba: norms of another dtype than taps");
  if (taps.shape(0) != values || (taps_bias && (taps_bias->shape(0) != values || taps_bias->dtype() != taps.dtype())))
    throw std::invalid_argument("mamba: the convolution must be [" + std::to_string(values) +
                                ", taps], and its bias as long and of its dtype");
  new (self) attention::Mamba1(config);
}

void def_mamba1(nb::module_& m) {
  nb::class_<attention::Mamba1, attention::DecoderAttention>(m, "Mamba1", "States of channels, as Mamba has them.")
      .def("__init__", &init_mamba1, nb::kw_only(), nb::arg("in_proj"), nb::arg("x_proj"), nb::arg("dt_proj"),
           nb::arg("out_proj"), nb::arg("taps"), nb::arg("taps_bias").none(), nb::arg("a_log"), nb::arg("d"),
           nb::arg("has_wide_d"), nb::arg("dt_norm"), nb::arg("b_norm"), nb::arg("c_norm"), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 11>(),
           nb::keep_alive<1, 12>(), nb::keep_alive<1, 13>());
}

void def_attention(nb::module_& m) {
  nb::class_<attention::DecoderAttention>(m, "DecoderAttention", "Attention of one token a row.");
  def_projection(m);
  def_block_index(m);
  nb::class_<attention::GroupedAttention, attention::DecoderAttention>(m, "GroupedAttention",
                                                                       "Heads in groups that share keys and values.")
      .def(
          "__init__",
          [](attention::GroupedAttention* self, const gemm::Linear& q, const gemm::Linear& k, const gemm::Linear* v,
             const gemm::Linear& o, const HeldNorm* q_norm, const HeldNorm* k_norm, int heads, int groups, int size,
             float scale, int window, std::optional<FloatVector> sinks, bool gated, bool neighbours, bool norms_last,
             int value, float value_scale, const gemm::Linear* gate, bool has_softplus,
             const attention::BlockIndex* index, const HeldNorm* v_norm, bool chunked, float tuned_every,
             float tuned_factor, std::pair<float, float> power, std::optional<FloatVector> gate_bias,
             bool keeps_prompt) {
            if (gate_bias && gate_bias->shape(0) != static_cast<size_t>(heads))
              throw std::invalid_argument("attention: one bias of gates a head is needed");
            if (sinks && sinks->shape(0) != static_cast<size_t>(heads))
              throw std::invalid_argument("attention: one sink a head is needed");
            attention::GroupedAttentionConfig config{&q, &k, v, &o, norm_of(q_norm), norm_of(k_norm)};
            config.heads = heads;
            config.groups = groups;
            config.size = size;
            config.scale = scale;
            config.window = window;
            config.sinks = sinks ? sinks->data() : nullptr;
            config.gated = gated;
            config.neighbours = neighbours;
            config.norms_last = norms_last;
            config.value = value;
            config.value_scale = value_scale;
            config.gate = gate;
            config.has_softplus = has_softplus;
            config.index = index;
            config.v_norm = norm_of(v_norm);
            config.chunked = chunked;
            config.tuned = {tuned_every, tuned_factor};
            config.power = {power.first, power.second};
            config.keeps_prompt = keeps_prompt;
            config.gate_bias = gate_bias ? gate_bias->data() : nullptr;
            new (self) attention::GroupedAttention(config);
          },
          nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v").none(), nb::arg("o"), nb::arg("q_norm").none(),
          nb::arg("k_norm").none(), nb::arg("heads"), nb::arg("groups"), nb::arg("size"), nb::arg("scale"),
          nb::arg("window"), nb::arg("sinks").none(), nb::arg("gated"), nb::arg("neighbours") = false,
          nb::arg("norms_last") = false, nb::arg("value") = 0, nb::arg("value_scale") = 1.0f,
          nb::arg("gate").none() = nb::none(), nb::arg("has_softplus") = false, nb::arg("index").none() = nb::none(),
          nb::arg("v_norm").none() = nb::none(), nb::arg("chunked") = false, nb::arg("tuned_every") = 0.0f,
          nb::arg("tuned_factor") = 0.0f, nb::arg("power") = std::pair(0.0f, 0.0f), nb::arg("gate_bias") = nb::none(),
          nb::arg("keeps_prompt") = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 13>(),
          nb::keep_alive<1, 19>(), nb::keep_alive<1, 21>(), nb::keep_alive<1, 22>(), nb::keep_alive<1, 27>());
  def_gated_delta(m);
  def_decaying_state(m);
  def_short_convolution(m);
  def_mamba1(m);
  def_mamba2(m);
  init_decoder_latent(m);
}

void def_decoder(nb::module_& m) {
  nb::class_<decode::Decoder>(m, "Decoder", "The decoder layers of a model on one token a row.")
      .def(
          "__init__",
          [](decode::Decoder* self, int hidden, const std::string& dtype, int streams) {
            new (self) decode::Decoder(
                hidden,
                one_of<DType>(dtype, "dtype",
                              {{"float32", DType::f32}, {"bfloat16", DType::bf16}, {"float16", DType::f16}}),
                streams);
          },
          nb::arg("hidden"), nb::arg("dtype"), nb::arg("streams") = 1)
      .def(
          "add",
          [](decode::Decoder& self, const HeldNorm* before_attention, attention::DecoderAttention* attention,
             const HeldNorm* before_feed_forward, decode::FeedForward* unit, std::pair<float, float> attention_sum,
             std::pair<float, float> feed_forward_sum, bool keeps_normed, const HeldNorm* behind_attention,
             const HeldNorm* behind_feed_forward, int first_angle, int angles, bool parallel,
             std::optional<FloatVector> scale, const decode::HyperConnection* attention_streams,
             const decode::HyperConnection* feed_forward_streams) {
            if (scale && scale->shape(0) != 1) throw std::invalid_argument("a layer's scale must be one number");
            for (const HeldNorm* held : {before_attention, before_feed_forward, behind_attention, behind_feed_forward})
              if (held != nullptr && !held->is_of(self.dtype()))
                throw std::invalid_argument("a layer's norm must be of the model's dtype");
            decode::LayerConfig layer;
            layer.before_attention = norm_of(before_attention);
            layer.behind_attention = norm_of(behind_attention);
            layer.attention = attention;
            layer.before_feed_forward = norm_of(before_feed_forward);
            layer.behind_feed_forward = norm_of(behind_feed_forward);
            layer.feed_forward = unit;
            layer.attention_sum = {attention_sum.first, attention_sum.second};
            layer.feed_forward_sum = {feed_forward_sum.first, feed_forward_sum.second};
            layer.keeps_normed = keeps_normed;
            layer.first_angle = first_angle;
            layer.angles = angles;
            layer.is_parallel = parallel;
            layer.scale = scale ? scale->data() : nullptr;
            layer.attention_streams = attention_streams;
            layer.feed_forward_streams = feed_forward_streams;
            self.add(layer);
          },
          nb::arg("before_attention").none(), nb::arg("attention").none(), nb::arg("before_feed_forward").none(),
          nb::arg("feed_forward").none(), nb::arg("attention_sum") = std::pair(1.0f, 1.0f),
          nb::arg("feed_forward_sum") = std::pair(1.0f, 1.0f), nb::arg("keeps_normed") = false,
          nb::arg("behind_attention") = nb::none(), nb::arg("behind_feed_forward") = nb::none(),
          nb::arg("first_angle") = 0, nb::arg("angles") = -1, nb::arg("parallel") = false,
          nb::arg("scale") = nb::none(), nb::arg("attention_streams") = nb::none(),
          nb::arg("feed_forward_streams") = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
          nb::keep_alive<1, 14>(), nb::keep_alive<1, 15>(), nb::keep_alive<1, 16>(), nb::call_guard<WithoutGil>(),
          "Add a layer of attention, a feed-forward part or both, with the norms of what they take and give that there "
          "are. attention_sum, feed_forward_sum: what its input, and what is added to that, are multiplied with. "
          "keeps_normed: its input becomes what the norms before the parts give. Its attention turns by so many angles "
          "from the first one on; -1: by all. parallel: the feed-forward part takes what attention takes. scale: all "
          "is multiplied with it in the end. *_streams: around each part of a layer of several streams.")
      .def("forward", &forward, nb::kw_only(), nb::arg("x"), nb::arg("cos").none(), nb::arg("sin").none(),
           nb::arg("mask").none(), nb::arg("position"), nb::arg("cache"), nb::arg("first"), nb::arg("last"),
           nb::arg("final_norm").none(), nb::arg("consecutive") = false, nb::arg("live") = nb::none(),
           nb::arg("most_chosen") = 0, nb::arg("positions") = nb::none(), nb::arg("out"),
           nb::arg("tokens") = nb::none(), nb::arg("makes_all") = false, nb::arg("head") = nb::none(),
           nb::arg("prompt") = 0, nb::call_guard<WithoutGil>(),
           "out [batch, streams * hidden] = x through layers first to last - 1; or [batch, hidden] = these streams "
           "collapsed by a head, where it is given, as is the final norm. The cache takes up these tokens, before "
           "which `position` came; they attend to those where mask [batch, n] is "
           "true. Consecutive rows are tokens of one text, the first at `position`; the cache has one row. For rows "
           "that "
           "are not live [batch] bool, no routed expert is computed. Indexers choose at most `most_chosen` places, if "
           "that is not 0, and not blocks of them. positions [batch]: of the tokens in their texts, where padding "
           "before them is not counted. tokens [batch]: their numbers. makes_all: compressors make the keys of windows "
           "that are not complete, too. prompt: tokens that layers which keep them have in a cache before their rings.")
      .def("keep", &keep, nb::kw_only(), nb::arg("cache"), nb::arg("kept"), nb::call_guard<WithoutGil>(),
           "Leave in the cache what the first `kept` tokens of the last step, of consecutive rows, would have left.");
}

}  // namespace

void init_decoder(nb::module_& m) {
  init_decoder_choice(m);
  def_state(m);
  def_attention(m);
  init_decoder_feed_forward(m);
  init_decoder_streams(m);
  def_decoder(m);
  init_decoder_token(m);
}

}  // namespace ktinject
