// Latent attention of a decoder's layers, and the indexer that chooses places for it.
#include <nanobind/stl/optional.h>

#include <optional>

#include "attention/indexer.hpp"
#include "attention/pooled_index.hpp"
#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"

namespace ktinject {
namespace {

// What queries of so many heads are multiplied with by their position, if anything.
attention::Growth growth_of(const std::optional<FloatVector>& scale, const std::optional<FloatVector>& bias,
                            int heads) {
  const auto count = static_cast<size_t>(heads);
  if (scale.has_value() != bias.has_value() || (scale && (scale->shape(0) != count || bias->shape(0) != count)))
    throw std::invalid_argument("attention: queries grow by one scale and one bias a head, or not");
  return scale ? attention::Growth{scale->data(), bias->data()} : attention::Growth{};
}

void def_indexer(nb::module_& m) {
  nb::class_<attention::PlaceIndex>(m, "PlaceIndex", "What chooses the places that latent attention attends to.");
  nb::class_<attention::Indexer, attention::PlaceIndex>(m, "Indexer", "Chooses the places that a token attends to.")
      .def(
          "__init__",
          [](attention::Indexer* self, const HeldProjection& q, const HeldProjection& k, const HeldProjection& weights,
             const Vector& norm_weight, const Vector& norm_bias, float epsilon, int heads, int size, int rotary,
             int top_k, bool neighbours, const HeldNorm* q_norm, std::optional<FloatVector> growth,
             std::optional<FloatVector> growth_bias, bool at_end) {
            if (norm_weight.shape(0) != static_cast<size_t>(size) || norm_bias.shape(0) != norm_weight.shape(0) ||
                norm_bias.dtype() != norm_weight.dtype())
              throw std::invalid_argument("indexer: the norm must have " + std::to_string(size) +
                                          " weights and biases of one dtype");
            new (self) attention::Indexer({q.projection, k.projection, weights.projection, norm_weight.data(),
                                           norm_bias.data(), dtype_of(norm_weight.dtype(), "norm"), epsilon, heads,
                                           size, rotary, top_k, neighbours, at_end, norm_of(q_norm),
                                           growth_of(growth, growth_bias, heads)});
          },
          nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("weights"), nb::arg("norm_weight"), nb::arg("norm_bias"),
          nb::arg("epsilon"), nb::arg("heads"), nb::arg("size"), nb::arg("rotary"), nb::arg("top_k"),
          nb::arg("neighbours"), nb::arg("q_norm") = nb::none(), nb::arg("growth") = nb::none(),
          nb::arg("growth_bias") = nb::none(), nb::arg("at_end") = false, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
          nb::keep_alive<1, 13>(), nb::keep_alive<1, 14>(), nb::keep_alive<1, 15>());
}

void init_pooled_index(attention::PooledIndex* self, const HeldProjection& q, const HeldProjection& k,
                       const HeldProjection& gate, const HeldProjection& weights, const Vector& norm_weight,
                       const Vector& norm_bias, float epsilon, const FloatMatrix& bias, int heads, int size, int top_k,
                       float score_scale, float weight_scale) {
  const auto count = static_cast<size_t>(size);
  if (norm_weight.shape(0) != count || norm_bias.shape(0) != count || norm_bias.dtype() != norm_weight.dtype())
    throw std::invalid_argument("index of pools: the norm must have " + std::to_string(size) +
                                " weights and biases of one dtype");
  if (bias.shape(1) != count)
    throw std::invalid_argument("index of pools: the bias must be [tokens of a pool, " + std::to_string(size) + "]");
  attention::PooledIndexConfig config;
  config.q = q.projection;
  config.k = k.projection;
  config.gate = gate.projection;
  config.weights = weights.projection;
  config.norm_weight = norm_weight.data();
  config.norm_bias = norm_bias.data();
  config.norm_dtype = dtype_of(norm_weight.dtype(), "norm");
  config.epsilon = epsilon;
  config.bias = bias.data();
  config.heads = heads;
  config.size = size;
  config.pool = size_of(bias.shape(0), "bias");
  config.top_k = top_k;
  config.score_scale = score_scale;
  config.weight_scale = weight_scale;
  new (self) attention::PooledIndex(config);
}

void def_pooled_index(nb::module_& m) {
  nb::class_<attention::PooledIndex, attention::PlaceIndex>(
      m, "PooledIndex", "Chooses pools of the places that a token attends to, each by one key.")
      .def("__init__", &init_pooled_index, nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("gate"),
           nb::arg("weights"), nb::arg("norm_weight"), nb::arg("norm_bias"), nb::arg("epsilon"), nb::arg("bias"),
           nb::arg("heads"), nb::arg("size"), nb::arg("top_k"), nb::arg("score_scale"), nb::arg("weight_scale"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 9>());
}

}  // namespace

void init_decoder_latent(nb::module_& m) {
  def_indexer(m);
  def_pooled_index(m);
  nb::class_<attention::LatentAttention, attention::DecoderAttention>(m, "LatentAttention",
                                                                      "Latent attention, absorbed.")
      .def(
          "__init__",
          [](attention::LatentAttention* self, const gemm::Linear* q, const gemm::Linear* q_a, const HeldNorm* q_norm,
             const gemm::Linear* q_b, const gemm::Linear& kv, const HeldNorm& kv_norm, Input expansion,
             const gemm::Linear& o, int heads, int rank, int nope, int rope, int value, bool neighbours, float scale,
             bool stays, const attention::PlaceIndex* indexer, bool chooses, float tuned_every, float tuned_factor,
             std::optional<FloatVector> growth, std::optional<FloatVector> growth_bias, float low_factor,
             float latent_factor, const HeldNorm* k_norm, int window, const gemm::Linear* gate,
             const std::optional<FloatVector>& sinks) {
            if (sinks && sinks->shape(0) != static_cast<size_t>(heads))
              throw std::invalid_argument("attention: one sink a head is needed");
            if (expansion.shape(0) != static_cast<size_t>(heads) * static_cast<size_t>(nope + value) ||
                expansion.shape(1) != static_cast<size_t>(rank))
              throw std::invalid_argument("attention: kv_b_proj's weight has another shape");
            attention::LatentAttentionConfig config;
            config.q = q;
            config.q_a = q_a;
            config.q_norm = norm_of(q_norm);
            config.q_b = q_b;
            config.kv = &kv;
            config.kv_norm = kv_norm.norm;
            config.expansion = expansion.data();
            config.o = &o;
            config.heads = heads;
            config.rank = rank;
            config.nope = nope;
            config.rope = rope;
            config.value = value;
            config.neighbours = neighbours;
            config.scale = scale;
            config.stays = stays;
            config.indexer = indexer;
            config.chooses = chooses;
            config.tuned = {tuned_every, tuned_factor};
            config.growth = growth_of(growth, growth_bias, heads);
            config.low_factor = low_factor;
            config.latent_factor = latent_factor;
            config.k_norm = norm_of(k_norm);
            config.window = window;
            config.gate = gate;
            config.sinks = sinks ? sinks->data() : nullptr;
            new (self) attention::LatentAttention(config);
          },
          nb::kw_only(), nb::arg("q").none(), nb::arg("q_a").none(), nb::arg("q_norm").none(), nb::arg("q_b").none(),
          nb::arg("kv"), nb::arg("kv_norm"), nb::arg("expansion"), nb::arg("o"), nb::arg("heads"), nb::arg("rank"),
          nb::arg("nope"), nb::arg("rope"), nb::arg("value"), nb::arg("neighbours"), nb::arg("scale"),
          nb::arg("stays") = false, nb::arg("indexer").none() = nb::none(), nb::arg("chooses") = false,
          nb::arg("tuned_every") = 0.0f, nb::arg("tuned_factor") = 0.0f, nb::arg("growth") = nb::none(),
          nb::arg("growth_bias") = nb::none(), nb::arg("low_factor") = 1.0f, nb::arg("latent_factor") = 1.0f,
          nb::arg("k_norm") = nb::none(), nb::arg("window") = 0, nb::arg("gate") = nb::none(),
          nb::arg("sinks") = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(),
          nb::keep_alive<1, 9>(), nb::keep_alive<1, 18>(), nb::keep_alive<1, 22>(), nb::keep_alive<1, 23>(),
          nb::keep_alive<1, 26>(), nb::keep_alive<1, 28>(), nb::keep_alive<1, 29>());
}

}  // namespace ktinject
