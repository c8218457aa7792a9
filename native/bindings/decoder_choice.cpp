// What is beside the layers of a decode step on the CPU: norms of many rows, and the choice of tokens.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"
#include "bindings/waiting.hpp"
#include "decode/choose.hpp"
#include "decode/norm.hpp"

namespace ktinject {
namespace {

using Logits = Array<const float, nb::ndim<2>, nb::c_contig>;
using Tokens = Array<int64_t, nb::ndim<1>, nb::c_contig>;
using TokenColumn = Array<int64_t, nb::shape<-1, 1>, nb::c_contig>;
using Chosen = Array<int64_t, nb::shape<2, -1>, nb::c_contig>;
using Counted = Array<int64_t, nb::shape<1>, nb::c_contig>;
using Ends = Array<const bool, nb::ndim<1>, nb::c_contig>;
using Generator = Array<uint8_t, nb::ndim<1>, nb::c_contig>;

void choose_into(const Logits& scores, const std::optional<Generator>& generator, int64_t* tokens, size_t token_count) {
  const int rows = size_of(scores.shape(0), "scores"), n = size_of(scores.shape(1), "scores");
  if (n < 1 || scores.shape(1) > (1u << 28) || token_count != scores.shape(0))
    throw std::invalid_argument("choose: expected scores [b, v], v at least 1, and tokens [b]");
  if (generator && generator->shape(0) != decode::kGeneratorBytes)
    throw std::invalid_argument("choose: the generator's state must have " + std::to_string(decode::kGeneratorBytes) +
                                " bytes");
  if (generator) decode::draw(scores.data(), rows, n, reinterpret_cast<std::byte*>(generator->data()), tokens);
  else decode::choose_greatest(scores.data(), rows, n, tokens);
}

void choose(const Logits& scores, const std::optional<Generator>& generator, const Tokens& tokens) {
  choose_into(scores, generator, tokens.data(), tokens.shape(0));
}

// What follows from a choice in tensors of a request, which stay where they are.
class TokenChoice {
 public:
  TokenChoice(TokenColumn ids, Chosen result, Counted length, Ends ends, std::optional<int64_t> pad)
      : ids_(std::move(ids)),
        result_(std::move(result)),
        length_(std::move(length)),
        ends_(std::move(ends)),
        pad_(pad),
        tokens_(ids_.shape(0)) {
    if (result_.shape(1) != ids_.shape(0) || ends_.shape(0) == 0)
      throw std::invalid_argument("choice: expected ids [b, 1], result [2, b] and ends [v], v at least 1");
  }

  void choose(const Logits& scores, const std::optional<Generator>& generator) {
    choose_into(scores, generator, tokens_.data(), tokens_.size());
  }

  void take() {
    for (size_t row = 0; row < tokens_.size(); ++row) {
      int64_t& alive = result_.data()[tokens_.size() + row];
      const int64_t token = pad_ && alive != 1 ? *pad_ : tokens_[row];
      result_.data()[row] = ids_.data()[row] = token;
      const auto last = static_cast<int64_t>(ends_.shape(0)) - 1;
      if (ends_.data()[token < 0 ? 0 : std::min(token, last)]) alive = 0;
    }
    ++*length_.data();
  }

 private:
  TokenColumn ids_;
  Chosen result_;
  Counted length_;
  Ends ends_;
  std::optional<int64_t> pad_;
  std::vector<int64_t> tokens_;
};

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
  nb::class_<TokenChoice>(m, "TokenChoice", "The choices of a request's tokens on the CPU, and what follows from them.")
      .def(
          "__init__",
          [](TokenChoice* self, const TokenColumn& ids, const Chosen& result, const Counted& length, const Ends& ends,
             std::optional<int64_t> pad) { new (self) TokenChoice(ids, result, length, ends, pad); },
          nb::kw_only(), nb::arg("ids"), nb::arg("result"), nb::arg("length"), nb::arg("ends"), nb::arg("pad").none(),
          "ids [b, 1] and result [2, b], which get tokens, and in its second row 0 for one of ends [v]; length [1], "
          "which grows by one; pad: the token of rows that have ended.")
      .def("choose", &TokenChoice::choose, nb::kw_only(), nb::arg("scores"), nb::arg("generator").none(),
           nb::call_guard<WithoutGil>(), "As `choose`; nothing follows from it before `take`.")
      .def("take", &TokenChoice::take, "Leave what was chosen in the tensors.");
  m.def("exchange_state", &exchange_state, nb::arg("generator"), nb::arg("expected"), nb::arg("desired"),
        "Set the state of torch's generator on the CPU if it is still the expected one; whether it was.");
}

}  // namespace ktinject
