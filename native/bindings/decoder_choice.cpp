// What is beside the layers of a decode step on the CPU: norms of many rows, and the choice of tokens.
#include <nanobind/stl/optional.h>

#include <cstring>
#include <optional>

#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"
#include "bindings/waiting.hpp"
#include "decode/choose.hpp"
#include "decode/norm.hpp"

namespace ktinject {
namespace {

using Logits = Array<const float, nb::ndim<2>, nb::c_contig>;
using Tokens = Array<int64_t, nb::ndim<1>, nb::c_contig>;
using Generator = Array<uint8_t, nb::ndim<1>, nb::c_contig>;

void choose(const Logits& scores, const std::optional<Generator>& generator, const Tokens& tokens) {
  const int rows = size_of(scores.shape(0), "scores"), n = size_of(scores.shape(1), "scores");
  if (n < 1 || scores.shape(1) > (1u << 28) || tokens.shape(0) != scores.shape(0))
    throw std::invalid_argument("choose: expected scores [b, v], v at least 1, and tokens [b]");
  if (generator && generator->shape(0) != decode::kGeneratorBytes)
    throw std::invalid_argument("choose: the generator's state must have " + std::to_string(decode::kGeneratorBytes) +
                                " bytes");
  if (generator) decode::draw(scores.data(), rows, n, reinterpret_cast<std::byte*>(generator->data()), tokens.data());
  else decode::choose_greatest(scores.data(), rows, n, tokens.data());
}

std::byte* bytes_of(const nb::object& state) {
  return reinterpret_cast<std::byte*>(
      nb::cast<uintptr_t>(state.attr("data_ptr")()));  // NOLINT: torch gives addresses so
}

// torch's generator is asked and set by functions of its own in C++, which keep the GIL: no other thread of Python
// comes between.
bool exchange_state(nb::object generator, nb::object expected, nb::object desired) {
  for (const nb::object& state : {expected, desired})
    if (nb::cast<size_t>(state.attr("nbytes")) != decode::kGeneratorBytes || !nb::cast<bool>(state.attr("is_cpu")))
      throw std::invalid_argument("exchange_state: expected the states of torch's generator on the CPU");
  const std::byte *before = bytes_of(expected), *now = nullptr;
  nb::object set = generator.attr("set_state"), get = generator.attr("get_state");
  nb::object found = get();
  now = bytes_of(found);
  if (std::memcmp(before, now, decode::kGeneratorBytes) != 0) return false;
  set(desired);
  return true;
}

void normalise(const Input& x, const Vector& weight, float epsilon, const Output& out, bool unit_offset,
               bool rounds_first) {
  const DType dtype = dtype_of(x.dtype(), "norm");
  if (weight.dtype() != x.dtype() || out.dtype() != x.dtype() || weight.shape(0) != x.shape(1) || x.shape(1) == 0 ||
      x.shape(1) > (1u << 24) || out.shape(0) != x.shape(0) || out.shape(1) != x.shape(1))
    throw std::invalid_argument("norm: expected x and out [rows, n] and weight [n] of one dtype, n at least 1");
  const gemm::Norm norm{weight.data(), static_cast<int>(x.shape(1)), epsilon, unit_offset, rounds_first};
  decode::norm_rows(x.data(), dtype, x.shape(0), norm, out.data());
}

}  // namespace

void init_decoder_choice(nb::module_& m) {
  m.def("norm_rows", &normalise, nb::kw_only(), nb::arg("x"), nb::arg("weight"), nb::arg("epsilon"), nb::arg("out"),
        nb::arg("unit_offset") = false, nb::arg("rounds_first") = true, nb::call_guard<WithoutGil>(),
        "out [rows, n] = weight * round(x / sqrt(mean(x²) + epsilon)), on the CPU. unit_offset: 1 is added to the "
        "weight; "
        "not rounds_first: the product is rounded instead.");
  m.def("choose", &choose, nb::kw_only(), nb::arg("scores"), nb::arg("generator").none(), nb::arg("tokens"),
        nb::call_guard<WithoutGil>(),
        "tokens [b] of scores [b, v]: the greatest; or, with the state of torch's generator on the CPU, one drawn from "
        "their softmax, as torch.multinomial draws it.");
  m.def("exchange_state", &exchange_state, nb::arg("generator"), nb::arg("expected"), nb::arg("desired"),
        "Set the state of torch's generator on the CPU if it is still the expected one; whether it was.");
}

}  // namespace ktinject
