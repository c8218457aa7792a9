// Residual streams, and attention with compressed keys.
#include <nanobind/stl/optional.h>

#include <optional>

#include "attention/shared_key.hpp"
#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"
#include "decode/hyper_connection.hpp"

namespace ktinject {
namespace {

void init_connection(decode::HyperConnection* self, int streams, int hidden, const std::optional<FloatMatrix>& fn,
                     const std::optional<FloatVector>& base, const std::optional<FloatVector>& scale, float norm_eps,
                     float eps, float post_factor, float post_eps, int iterations, bool is_head, bool rounds) {
  decode::HyperConnectionConfig config;
  config.streams = streams;
  config.hidden = hidden;
  config.fn = fn ? fn->data() : nullptr;
  config.base = base ? base->data() : nullptr;
  config.scale = scale ? scale->data() : nullptr;
  config.norm_eps = norm_eps;
  config.eps = eps;
  config.post_factor = post_factor;
  config.post_eps = post_eps;
  config.iterations = iterations;
  config.is_head = is_head;
  config.rounds = rounds;
  new (self) decode::HyperConnection(config);
  const auto outputs = static_cast<size_t>(config.outputs());
  const size_t scales = is_head ? 1 : iterations > 0 ? 3 : 2;
  if (fn && (fn->shape(0) != outputs || fn->shape(1) != static_cast<size_t>(streams) * static_cast<size_t>(hidden) ||
             base->shape(0) != outputs || scale->shape(0) != scales))
    throw std::invalid_argument("streams: expected a weight and a base of " + std::to_string(outputs) +
                                " outputs, and " + std::to_string(scales) + " scales");
}

void def_connection(nb::module_& m) {
  nb::class_<decode::HyperConnection>(m, "HyperConnection",
                                      "What a part of a layer gets of several residual streams, and how it is added to "
                                      "them; or as a head what is behind "
                                      "the last layer.")
      .def("__init__", &init_connection, nb::kw_only(), nb::arg("streams"), nb::arg("hidden"), nb::arg("fn").none(),
           nb::arg("base").none(), nb::arg("scale").none(), nb::arg("norm_eps") = 0.0f, nb::arg("eps") = 0.0f,
           nb::arg("post_factor") = 2.0f, nb::arg("post_eps") = 0.0f, nb::arg("iterations") = 0,
           nb::arg("is_head") = false, nb::arg("rounds") = true, nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
           nb::keep_alive<1, 6>());
}

void def_compressor(nb::module_& m) {
  nb::class_<attention::Compressor>(m, "Compressor", "Makes one key for each window of tokens.")
      .def(
          "__init__",
          [](attention::Compressor* self, const HeldProjection& kv, const HeldProjection& gate, const FloatMatrix& bias,
             const HeldNorm& norm, const FloatVector& angles, float scale, bool rounds_sum) {
            attention::CompressorConfig config;
            config.kv = kv.projection;
            config.gate = gate.projection;
            config.bias = bias.data();
            config.norm = norm.norm;
            config.angles = angles.data();
            config.scale = scale;
            config.rounds_sum = rounds_sum;
            config.rate = size_of(bias.shape(0), "bias");
            config.turned = 2 * size_of(angles.shape(0), "angles");
            config.overlaps = bias.shape(1) == 2 * static_cast<size_t>(norm.norm.size);
            if (!config.overlaps && bias.shape(1) != static_cast<size_t>(norm.norm.size))
              throw std::invalid_argument("compressor: the bias must be as wide as a key, or twice");
            new (self) attention::Compressor(config);
          },
          nb::kw_only(), nb::arg("kv"), nb::arg("gate"), nb::arg("bias"), nb::arg("norm"), nb::arg("angles"),
          nb::arg("scale"), nb::arg("rounds_sum") = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>());
  nb::class_<attention::CompressedIndex>(m, "CompressedIndex", "Chooses compressed keys.")
      .def(
          "__init__",
          [](attention::CompressedIndex* self, const attention::Compressor& keys, const HeldProjection& q,
             const HeldProjection& weights, int heads, int top_k, float score_scale, float weight_scale) {
            new (self) attention::CompressedIndex(
                {&keys, q.projection, weights.projection, heads, top_k, score_scale, weight_scale});
          },
          nb::kw_only(), nb::arg("keys"), nb::arg("q"), nb::arg("weights"), nb::arg("heads"), nb::arg("top_k"),
          nb::arg("score_scale"), nb::arg("weight_scale"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>());
}

void init_shared_key(attention::SharedKeyAttention* self, const gemm::Linear& q_a, const HeldNorm& q_norm,
                     const gemm::Linear& q_b, const gemm::Linear& kv, const HeldNorm& kv_norm, const Input& grouped,
                     const gemm::Linear& o, const FloatVector& sinks, const attention::Compressor* compressor,
                     const attention::CompressedIndex* index, int heads, int size, int groups, int window, float scale,
                     float query_epsilon) {
  attention::SharedKeyConfig config;
  config.q_a = &q_a;
  config.q_b = &q_b;
  config.kv = &kv;
  config.o = &o;
  config.q_norm = q_norm.norm;
  config.kv_norm = kv_norm.norm;
  config.grouped = grouped.data();
  config.sinks = sinks.data();
  config.compressor = compressor;
  config.index = index;
  config.heads = heads;
  config.size = size;
  config.groups = groups;
  config.window = window;
  config.scale = scale;
  config.query_epsilon = query_epsilon;
  new (self) attention::SharedKeyAttention(config);
  if (grouped.shape(0) != static_cast<size_t>(o.config().in_features) ||
      grouped.shape(1) * static_cast<size_t>(groups) != static_cast<size_t>(heads) * static_cast<size_t>(size) ||
      sinks.shape(0) != static_cast<size_t>(heads))
    throw std::invalid_argument(
        "attention: the weight of groups must be [o_b_proj's inputs, values of a group's heads], "
        "and there is one sink a head");
}

void def_shared_key(nb::module_& m) {
  nb::class_<attention::SharedKeyAttention, attention::DecoderAttention>(
      m, "SharedKeyAttention",
      "Heads that share one key, which is the value, in a window, and compressed ones of the tokens before.")
      .def("__init__", &init_shared_key, nb::kw_only(), nb::arg("q_a"), nb::arg("q_norm"), nb::arg("q_b"),
           nb::arg("kv"), nb::arg("kv_norm"), nb::arg("grouped"), nb::arg("o"), nb::arg("sinks"),
           nb::arg("compressor").none(), nb::arg("index").none(), nb::arg("heads"), nb::arg("size"), nb::arg("groups"),
           nb::arg("window"), nb::arg("scale"), nb::arg("query_epsilon"), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>(), nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>(),
           nb::keep_alive<1, 11>());
}

}  // namespace

void init_decoder_streams(nb::module_& m) {
  def_connection(m);
  def_compressor(m);
  def_shared_key(m);
}

}  // namespace ktinject
