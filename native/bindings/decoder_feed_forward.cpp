// The feed-forward parts of a decoder's layers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <optional>
#include <tuple>

#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"
#include "decode/decoder.hpp"

namespace ktinject {

void init_decoder_feed_forward(nb::module_& m) {
  nb::class_<decode::FeedForward>(m, "DecoderFeedForward", "What follows the attention of a layer.");
  nb::class_<decode::GatedUnit, decode::FeedForward>(
      m, "GatedUnit",
      "down(silu(min(gate(x), gate_max)) * (clamp(up(x), -up_limit, up_limit) + up_offset)), silu(x) = x * "
      "sigmoid(alpha * x), or gelu_tanh in its place; without up, gate gives both. is_wide: the activation "
      "is multiplied before it is rounded.")
      .def(
          "__init__",
          [](decode::GatedUnit* self, const gemm::Linear& gate, const gemm::Linear* up, const gemm::Linear& down,
             float alpha, float gate_max, float up_limit, float up_offset, const std::string& activation,
             bool is_wide) {
            if (!(up_limit >= 0)) throw std::invalid_argument("feed-forward: up_limit must not be negative");
            new (self) decode::GatedUnit(
                gate, up, down,
                {alpha, gate_max, up_limit, up_offset,
                 one_of<gemm::ActivationKind>(
                     activation, "activation",
                     {{"silu", gemm::ActivationKind::silu}, {"gelu_tanh", gemm::ActivationKind::gelu_tanh}}),
                 is_wide});
          },
          nb::arg("gate"), nb::arg("up").none(), nb::arg("down"), nb::kw_only(), nb::arg("alpha") = 1.0f,
          nb::arg("gate_max") = std::numeric_limits<float>::infinity(),
          nb::arg("up_limit") = std::numeric_limits<float>::infinity(), nb::arg("up_offset") = 0.0f,
          nb::arg("activation") = "silu", nb::arg("is_wide") = false, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>());
  nb::class_<decode::Normed, decode::FeedForward>(m, "Normed", "Another part between norms of what it takes and gives.")
      .def(
          "__init__",
          [](decode::Normed* self, const decode::FeedForward& part, const HeldNorm* before, const HeldNorm* behind) {
            new (self) decode::Normed(part, {norm_of(before), norm_of(behind)});
          },
          nb::arg("part"), nb::arg("before").none(), nb::arg("behind").none(), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<decode::PlainUnit, decode::FeedForward>(m, "PlainUnit", "down(relu(up(x))²).")
      .def(nb::init<const gemm::Linear&, const gemm::Linear&>(), nb::arg("up"), nb::arg("down"), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>());
  nb::class_<decode::Mixture, decode::FeedForward>(m, "Mixture",
                                                   "Router and routed experts, maybe with a unit beside them.")
      .def(
          "__init__",
          [](decode::Mixture* self, const gemm::Linear* router, std::optional<FloatMatrix> weight,
             const std::string& scores, std::optional<FloatVector> correction, int top_k, int groups, int top_groups,
             bool normed, float factor, bool rounds_logits, bool rounds_scores, bool rounds_weights,
             const moe::Experts& experts, decode::FeedForward* shared, std::optional<Input> gate,
             const gemm::Linear* narrow_in, const gemm::Linear* narrow_out, float routed_factor, float whole_factor,
             std::optional<FloatVector> bias, const HeldNorm* router_norm, float input_factor, bool by_logits,
             std::optional<FloatVector> expert_factors, float nearness, bool scales_input, const HeldNorm* before,
             const HeldNorm* behind, const std::optional<Array<const int64_t, nb::ndim<2>, nb::c_contig>>& table) {
            const auto hidden = static_cast<size_t>(narrow_in == nullptr ? experts.config().hidden_size
                                                                         : narrow_in->config().in_features);
            if (gate && (gate->shape(0) != 1 || gate->shape(1) != hidden))
              throw std::invalid_argument("the shared experts' gate must be [1, hidden]");
            decode::RouterConfig config;
            config.linear = router;
            if (weight) {
              if (weight->shape(0) != static_cast<size_t>(experts.config().experts) || weight->shape(1) != hidden)
                throw std::invalid_argument("router: the weight must be [experts, hidden]");
              config.weight = weight->data();
            }
            config.scores = one_of<decode::Scores>(scores, "scores",
                                                   {{"softmax", decode::Scores::softmax},
                                                    {"sigmoid", decode::Scores::sigmoid},
                                                    {"root_softplus", decode::Scores::root_softplus}});
            for (auto [given, to, what] :
                 {std::tuple{&correction, &config.correction, "correction"}, std::tuple{&bias, &config.bias, "bias"},
                  std::tuple{&expert_factors, &config.expert_factors, "factor"}}) {
              if (!*given) continue;
              if ((*given)->shape(0) != static_cast<size_t>(experts.config().experts))
                throw std::invalid_argument("router: one " + std::string(what) + " an expert is needed");
              *to = (*given)->data();
            }
            if (table) {
              if (table->shape(1) != static_cast<size_t>(top_k))
                throw std::invalid_argument("router: the experts of tokens must be [vocabulary, top_k]");
              config.table = table->data();
              config.vocabulary = size_of(table->shape(0), "table");
            }
            config.norm = norm_of(router_norm);
            config.input_factor = input_factor;
            config.by_logits = by_logits;
            config.nearness = nearness;
            config.scales_input = scales_input;
            config.top_k = top_k;
            config.groups = groups;
            config.top_groups = top_groups;
            config.normed = normed;
            config.factor = factor;
            config.rounds_logits = rounds_logits;
            config.rounds_scores = rounds_scores;
            config.rounds_weights = rounds_weights;
            new (self) decode::Mixture(config, experts, shared, gate ? gate->data() : nullptr, {narrow_in, narrow_out},
                                       {routed_factor, whole_factor}, {norm_of(before), norm_of(behind)});
          },
          nb::kw_only(), nb::arg("router").none(), nb::arg("weight") = nb::none(), nb::arg("scores"),
          nb::arg("correction").none(), nb::arg("top_k"), nb::arg("groups"), nb::arg("top_groups"), nb::arg("normed"),
          nb::arg("factor"), nb::arg("rounds_logits"), nb::arg("rounds_scores"), nb::arg("rounds_weights"),
          nb::arg("experts"), nb::arg("shared").none(), nb::arg("gate").none(), nb::arg("narrow_in") = nb::none(),
          nb::arg("narrow_out") = nb::none(), nb::arg("routed_factor") = 1.0f, nb::arg("whole_factor") = 1.0f,
          nb::arg("bias") = nb::none(), nb::arg("router_norm").none() = nb::none(), nb::arg("input_factor") = 1.0f,
          nb::arg("by_logits") = false, nb::arg("expert_factors") = nb::none(), nb::arg("nearness") = 0.0f,
          nb::arg("scales_input") = false, nb::arg("before").none() = nb::none(), nb::arg("behind").none() = nb::none(),
          nb::arg("table") = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(),
          nb::keep_alive<1, 14>(), nb::keep_alive<1, 15>(), nb::keep_alive<1, 16>(), nb::keep_alive<1, 17>(),
          nb::keep_alive<1, 18>(), nb::keep_alive<1, 21>(), nb::keep_alive<1, 22>(), nb::keep_alive<1, 25>(),
          nb::keep_alive<1, 28>(), nb::keep_alive<1, 29>(), nb::keep_alive<1, 30>());
}

}  // namespace ktinject
