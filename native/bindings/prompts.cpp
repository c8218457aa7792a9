// Prompts on the CPU: convolutions, the gated delta rule, attention.
#include "attention/linear_prompt.hpp"
#include "attention/prompt.hpp"

#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"

namespace ktinject {
namespace {

using Tokens = Array<nb::ro, nb::ndim<3>>;
using OfHeads = Array<nb::ro, nb::ndim<4>>;
using Gates = Array<const float, nb::ndim<3>, nb::c_contig>;
using Taps = Array<const float, nb::ndim<2>, nb::c_contig>;
using Bias32 = Array<const float, nb::ndim<1>, nb::c_contig>;

void expect(bool is_as_said, const char* name, const char* what) {
  if (!is_as_said) throw std::invalid_argument(std::string(name) + ": expected " + what);
}

template <class Found>
void expect_shape(const Found& found, std::vector<size_t> shape, const char* name) {
  std::string expected, seen;
  bool is_same = found.ndim() == shape.size();
  for (size_t i = 0; i < shape.size(); ++i) {
    is_same = is_same && found.shape(i) == shape[i];
    expected += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
    seen += (i == 0 ? "" : ", ") + std::to_string(found.shape(i));
  }
  if (!is_same) throw std::invalid_argument(std::string(name) + ": found [" + seen + "]; expected [" + expected + "]");
}

void convolve(const Tokens& x, const Taps& weight, const std::optional<Bias32>& bias, bool silu,
              const Array<nb::ndim<3>, nb::c_contig>& out) {
  attention::PromptConvolution prompt;
  prompt.dtype = dtype_of(x.dtype(), "x");
  prompt.batch = size_of(x.shape(0), "x");
  prompt.tokens = size_of(x.shape(1), "x");
  prompt.channels = size_of(x.shape(2), "x");
  prompt.taps = size_of(weight.shape(0), "weight");
  expect(x.stride(2) == 1 || x.shape(2) == 1, "x", "channels that lie together");
  expect(dtype_of(out.dtype(), "out") == prompt.dtype, "out", "the dtype of x");
  expect_shape(weight, {weight.shape(0), x.shape(2)}, "weight");
  expect_shape(out, {x.shape(0), x.shape(1), x.shape(2)}, "out");
  if (bias) expect_shape(*bias, {x.shape(2)}, "bias");
  prompt.x = x.data();
  prompt.batch_stride = x.stride(0);
  prompt.token_stride = x.stride(1);
  prompt.weight = weight.data();
  prompt.bias = bias ? bias->data() : nullptr;
  prompt.has_silu = silu;
  prompt.out = out.data();
  if (out.size() != 0) attention::convolve_prompt(prompt);
}

attention::Heads heads_of(const OfHeads& found, DType dtype, const char* name) {
  expect(dtype_of(found.dtype(), name) == dtype, name, "the dtype of v");
  expect(found.stride(3) == 1 || found.shape(3) == 1, name, "values of a head that lie together");
  return {found.data(), found.stride(0), found.stride(1), found.stride(2)};
}

void delta(const OfHeads& q, const OfHeads& k, const OfHeads& v, const Gates& g, const Gates& beta, bool unit_length,
           float scale, const Array<float, nb::ndim<4>, nb::c_contig>& states,
           const Array<nb::ndim<4>, nb::c_contig>& out) {
  attention::PromptDelta prompt;
  prompt.dtype = dtype_of(v.dtype(), "v");
  prompt.q = heads_of(q, prompt.dtype, "q");
  prompt.k = heads_of(k, prompt.dtype, "k");
  prompt.v = heads_of(v, prompt.dtype, "v");
  const size_t batch = v.shape(0), tokens = v.shape(1), heads = v.shape(2), values = v.shape(3), keys = q.shape(3);
  expect(q.shape(2) > 0 && heads % q.shape(2) == 0, "q", "heads of which those of v are a multiple");
  expect_shape(q, {batch, tokens, q.shape(2), keys}, "q");
  expect_shape(k, {batch, tokens, q.shape(2), keys}, "k");
  expect_shape(g, {batch, tokens, heads}, "g");
  expect_shape(beta, {batch, tokens, heads}, "beta");
  expect_shape(states, {batch, heads, keys, values}, "states");
  expect_shape(out, {batch, tokens, heads, values}, "out");
  expect(dtype_of(out.dtype(), "out") == prompt.dtype, "out", "the dtype of v");
  prompt.g = g.data();
  prompt.beta = beta.data();
  prompt.has_unit_length = unit_length;
  prompt.scale = scale;
  prompt.batch = size_of(batch, "v");
  prompt.tokens = size_of(tokens, "v");
  prompt.key_heads = size_of(q.shape(2), "q");
  prompt.value_heads = size_of(heads, "v");
  prompt.key_size = size_of(keys, "q");
  prompt.value_size = size_of(values, "v");
  prompt.states = states.data();
  prompt.out = out.data();
  if (out.size() != 0) attention::delta_prompt(prompt);
}

attention::PromptMask mask_of(const OfHeads& found, DType dtype, float lowest, std::vector<size_t> shape) {
  const bool is_bool = found.dtype() == nb::dtype<bool>();
  expect(is_bool || dtype_of(found.dtype(), "mask") == dtype, "mask", "bool or the dtype of q");
  expect(found.stride(3) == 1 || found.shape(3) == 1, "mask", "keys that lie together");
  if (found.shape(0) == 1) shape[0] = 1;
  expect_shape(found, shape, "mask");
  return {found.data(), found.shape(0) == 1 ? 0 : found.stride(0), found.stride(2), is_bool, lowest};
}

bool attend(const OfHeads& q, const OfHeads& k, const OfHeads& v, const std::optional<OfHeads>& mask, float lowest,
            const std::optional<Bias32>& sinks, float scale, const Array<nb::ndim<4>, nb::c_contig>& out) {
  attention::PromptAttention prompt;
  prompt.dtype = dtype_of(q.dtype(), "q");
  prompt.q = heads_of(q, prompt.dtype, "q");
  prompt.k = heads_of(k, prompt.dtype, "k");
  prompt.v = heads_of(v, prompt.dtype, "v");
  const size_t batch = q.shape(0), tokens = q.shape(1), heads = q.shape(2), keys = k.shape(1), groups = k.shape(2);
  expect(groups > 0 && heads % groups == 0, "k", "heads of which those of q are a multiple");
  expect(keys >= tokens || mask, "k", "as many keys as there are queries, or a mask");
  expect_shape(k, {batch, keys, groups, q.shape(3)}, "k");
  expect_shape(v, {batch, keys, groups, v.shape(3)}, "v");
  expect_shape(out, {batch, tokens, heads, v.shape(3)}, "out");
  expect(dtype_of(out.dtype(), "out") == prompt.dtype, "out", "the dtype of q");
  if (mask) prompt.mask = mask_of(*mask, prompt.dtype, lowest, {batch, 1, tokens, keys});
  if (sinks) expect_shape(*sinks, {heads}, "sinks");
  prompt.sinks = sinks ? sinks->data() : nullptr;
  prompt.scale = scale;
  prompt.batch = size_of(batch, "q");
  prompt.tokens = size_of(tokens, "q");
  prompt.keys = size_of(keys, "k");
  prompt.heads = size_of(heads, "q");
  prompt.groups = size_of(groups, "k");
  prompt.key_size = size_of(q.shape(3), "q");
  prompt.value_size = size_of(v.shape(3), "v");
  prompt.out = out.data();
  return out.size() == 0 || attention::attend_prompt(prompt);
}

}  // namespace

void init_prompts(nb::module_& m) {
  m.def(
      "convolve_prompt", &convolve, nb::kw_only(), nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(),
      nb::arg("silu"), nb::arg("out"), nb::call_guard<WithoutGil>(),
      "out [batch, tokens, channels] = the causal convolution of x with weight [taps, channels] and bias, then silu.");
  m.def("delta_prompt", &delta, nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("g"), nb::arg("beta"),
        nb::arg("unit_length"), nb::arg("scale"), nb::arg("states"), nb::arg("out"), nb::call_guard<WithoutGil>(),
        "out [batch, tokens, heads, values] of the gated delta rule; states [batch, heads, keys, values] move on in "
        "place.");
  m.def(
      "attend_prompt", &attend, nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("mask").none(),
      nb::arg("lowest"), nb::arg("sinks").none(), nb::arg("scale"), nb::arg("out"), nb::call_guard<WithoutGil>(),
      "out [batch, tokens, heads, dv] of q [batch, tokens, heads, d], k and v [batch, keys, groups, ...]. mask [batch "
      "or 1, 1, tokens, keys] of bool or added, where values up to `lowest` hide a key; none: causal, the last token "
      "has the last key. Whether every token saw a key or has sinks.");
}

}  // namespace ktinject
