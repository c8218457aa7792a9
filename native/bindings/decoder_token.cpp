// A decode step of one token in one call: from its number to its logits. All tensors are those of a request, which stay
// where they are; so none is converted, made or copied from step to step.
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "bindings/arrays.hpp"
#include "bindings/decoder_parts.hpp"
#include "bindings/sequences.hpp"
#include "bindings/waiting.hpp"
#include "decode/decoder.hpp"
#include "gemm/linear.hpp"

namespace ktinject {
namespace {

using Numbers = Array<const int64_t, nb::shape<1, 1>, nb::c_contig>;
using Seen = Array<const bool, nb::ndim<1>, nb::c_contig>;
using LogitsOut = Array<float, nb::shape<1, -1>, nb::c_contig>;

class TokenStep {
 public:
  TokenStep(const decode::Decoder& decoder, HeldCache& cache, const HeldNorm& norm, const gemm::Linear& head,
            Input embeddings, Numbers ids, Numbers positions, Seen mask, LogitsOut logits, bool turns)
      : decoder_(decoder),
        cache_(cache),
        norm_(norm),
        head_(head),
        embeddings_(std::move(embeddings)),
        ids_(std::move(ids)),
        positions_(std::move(positions)),
        mask_(std::move(mask)),
        logits_(std::move(logits)),
        turns_(turns),
        normed_(static_cast<size_t>(decoder.hidden()) * dtype_bytes(decoder.dtype())) {
    const auto hidden = static_cast<size_t>(decoder.hidden());
    if (decoder.streams() != 1) refuse("a step of one token has one stream");
    if (dtype_of(embeddings_.dtype(), "embeddings") != decoder.dtype() || embeddings_.shape(1) != hidden)
      refuse("embeddings must be [vocabulary, " + std::to_string(hidden) + "] of the model's dtype");
    if (!norm.is_of(decoder.dtype()) || norm.norm.size != decoder.hidden())
      refuse("the final norm must be one of " + std::to_string(hidden) + " values of the model's dtype");
    if (head.config().in_features != decoder.hidden() ||
        logits_.shape(1) != static_cast<size_t>(head.config().out_features))
      refuse("the output layer must take " + std::to_string(hidden) + " values and give as many as there are logits");
  }

  void turn(Input cos, Input sin, int64_t first) {
    const DType dtype = dtype_of(cos.dtype(), "cos");
    if (sin.dtype() != cos.dtype() || sin.shape(0) != cos.shape(0) || sin.shape(1) != cos.shape(1) ||
        (dtype != decoder_.dtype() && dtype != DType::f32) || cos.shape(1) % 2 != 0)
      refuse("cos and sin must be [positions, rotary] of the model's dtype or fp32, rotary even");
    cos_ = std::move(cos);
    sin_ = std::move(sin);
    first_ = first;
  }

  bool run(int place, int prompt) const {
    attention::Step step;
    step.dtype = decoder_.dtype();
    step.position = place;
    step.prompt = prompt;
    step.positions = positions_.data();
    step.tokens = ids_.data();
    step.mask = reinterpret_cast<const uint8_t*>(mask_.data());
    step.mask_stride = mask_.shape(0);
    if (place < 0 || static_cast<size_t>(place) >= mask_.shape(0))
      refuse("found place " + std::to_string(place) + " of a mask of " + std::to_string(mask_.shape(0)));
    if (prompt < 0 || prompt > place)
      refuse("found " + std::to_string(prompt) + " tokens of a prompt before place " + std::to_string(place));
    if (turns_ && !turn_by(step)) return false;
    const int64_t token = *ids_.data();
    if (token < 0 || static_cast<size_t>(token) >= embeddings_.shape(0))
      refuse("found token " + std::to_string(token) + "; the model embeds 0 to " +
             std::to_string(embeddings_.shape(0) - 1));
    const auto* x = static_cast<const std::byte*>(embeddings_.data()) + static_cast<size_t>(token) * normed_.size();
    cache_.rows = 0;  // what an error leaves cannot be taken back
    decoder_.forward(x, step, cache_.layers, 0, static_cast<int>(cache_.layers.size()), norm_.norm, nullptr,
                     normed_.data());
    const gemm::Linear::Product product{&head_, logits_.data(), true};
    gemm::Linear::forward(std::span(&product, 1), normed_.data(), step.dtype, 1);
    return true;
  }

 private:
  [[noreturn]] static void refuse(const std::string& what) { throw std::invalid_argument("token step: " + what); }

  // Whether the rotation of this position is known.
  bool turn_by(attention::Step& step) const {
    const int64_t row = *positions_.data() - first_;
    if (!cos_ || row < 0 || static_cast<size_t>(row) >= cos_->shape(0)) return false;
    step.has_wide_rotation = cos_->dtype() != embeddings_.dtype();
    step.rotary = step.angles = size_of(cos_->shape(1), "cos");
    step.shared_rotation = true;
    const size_t before =
        static_cast<size_t>(row) * cos_->shape(1) * (step.has_wide_rotation ? sizeof(float) : step.width());
    step.cos = static_cast<const std::byte*>(cos_->data()) + before;
    step.sin = static_cast<const std::byte*>(sin_->data()) + before;
    return true;
  }

  const decode::Decoder& decoder_;
  HeldCache& cache_;
  const HeldNorm& norm_;
  const gemm::Linear& head_;
  Input embeddings_;
  Numbers ids_, positions_;
  Seen mask_;
  LogitsOut logits_;
  bool turns_;
  std::optional<Input> cos_, sin_;  // [positions, angles]
  int64_t first_ = 0;               // of these positions
  mutable std::vector<std::byte> normed_;
};

using Number = Array<int64_t, nb::shape<1>, nb::c_contig>;
using NumberColumn = Array<int64_t, nb::shape<-1, 1>, nb::c_contig>;
using Shown = Array<bool, nb::shape<-1, 1, 1, -1>>;
struct Ring {
  int64_t window;
  Number place;
  Shown mask;
};

// Where the tokens of a step go, on the CPU, and what is attended to.
class NextPlace {
 public:
  NextPlace(Number place, NumberColumn positions, Shown mask, size_t capacity, std::vector<Ring> rings, int64_t prompt)
      : place_(std::move(place)),
        positions_(std::move(positions)),
        mask_(std::move(mask)),
        rings_(std::move(rings)),
        prompt_(prompt) {
    check(mask_);
    if (mask_.shape(3) != capacity)
      throw std::invalid_argument("next place: found a mask of " + std::to_string(mask_.shape(3)) +
                                  " places; expected " + std::to_string(capacity));
    for (const Ring& ring : rings_) {
      check(ring.mask);
      if (ring.window < 1) throw std::invalid_argument("next place: found a window of " + std::to_string(ring.window));
    }
    if (prompt < 0) throw std::invalid_argument("next place: found a prompt of " + std::to_string(prompt) + " tokens");
  }

  void advance() {
    const int64_t place = ++*place_.data();
    for (size_t row = 0; row < positions_.shape(0); ++row) ++positions_.data()[row];
    show(mask_, place);
    for (const Ring& ring : rings_) {
      const int64_t behind = (place - prompt_) % ring.window, own = behind < 0 ? behind + ring.window : behind;
      *ring.place.data() = prompt_ + own;
      // A ring that is shorter than its window is full before the place is beyond its end.
      show(ring.mask, std::min(prompt_ + own, static_cast<int64_t>(ring.mask.shape(3)) - 1));
    }
  }

 private:
  void check(const Shown& mask) const {
    if (mask.shape(0) != positions_.shape(0) || mask.shape(3) == 0 || (mask.shape(3) > 1 && mask.stride(3) != 1))
      throw std::invalid_argument(
          "next place: masks must be [b, 1, 1, n] as positions are [b, 1], n at least 1, their "
          "places side by side");
  }
  static void show(const Shown& mask, int64_t place) {
    if (place < 0 || place >= static_cast<int64_t>(mask.shape(3))) return;
    for (size_t row = 0; row < mask.shape(0); ++row)
      mask.data()[static_cast<int64_t>(row) * mask.stride(0) + place] = true;
  }

  Number place_;
  NumberColumn positions_;
  Shown mask_;
  std::vector<Ring> rings_;
  int64_t prompt_;
};

}  // namespace

void init_decoder_token(nb::module_& m) {
  nb::class_<TokenStep>(m, "TokenStep",
                        "The decode steps of a request of one row, from a token's number to its logits.")
      .def(
          "__init__",
          [](TokenStep* self, const decode::Decoder& decoder, HeldCache& cache, const HeldNorm& norm,
             const gemm::Linear& head, const Input& embeddings, const Numbers& ids, const Numbers& positions,
             const Seen& mask, const LogitsOut& logits, bool turns) {
            new (self) TokenStep(decoder, cache, norm, head, embeddings, ids, positions, mask, logits, turns);
          },
          nb::kw_only(), nb::arg("decoder"), nb::arg("cache"), nb::arg("norm"), nb::arg("head"), nb::arg("embeddings"),
          nb::arg("ids"), nb::arg("positions"), nb::arg("mask"), nb::arg("logits"), nb::arg("turns"),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
          "Where a step finds ids and positions [1, 1] and the mask [places] of what is attended to, and leaves logits "
          "[1, vocabulary] fp32, of values rounded to the model's dtype. turns: layers turn by `turn`'s rotation.")
      .def(
          "turn",
          [](TokenStep& self, const Input& cos, const Input& sin, int64_t first) { self.turn(cos, sin, first); },
          nb::arg("cos"), nb::arg("sin"), nb::arg("first"),
          "cos and sin [n, angles] of positions first, first + 1 and so on.")
      .def("run", &TokenStep::run, nb::arg("place"), nb::arg("prompt") = 0, nb::call_guard<WithoutGil>(),
           "One step, whose keys go to this place of the cache. prompt: tokens of a prompt that lies before rings. "
           "False, and nothing is done: `turn` has not given the "
           "rotation of its position.");
  nb::class_<NextPlace>(m, "NextPlace", "Where the tokens of a step go in a cache on the CPU, and what is attended to.")
      .def(
          "__init__",
          [](NextPlace* self, const Number& place, const NumberColumn& positions, const Shown& mask, size_t capacity,
             const Sequence<int64_t>& windows, const Sequence<Number>& places, const Sequence<Shown>& rings,
             int64_t prompt) {
            const std::vector<int64_t> sizes = vector_of(windows, "windows");
            std::vector<Number> own = vector_of(places, "places");
            std::vector<Shown> shown = vector_of(rings, "rings");
            if (own.size() != sizes.size() || shown.size() != sizes.size())
              throw std::invalid_argument("next place: each window has a place and a ring");
            std::vector<Ring> all;
            all.reserve(sizes.size());
            for (size_t i = 0; i < sizes.size(); ++i) all.push_back({sizes[i], std::move(own[i]), std::move(shown[i])});
            new (self) NextPlace(place, positions, mask, capacity, std::move(all), prompt);
          },
          nb::kw_only(), nb::arg("place"), nb::arg("positions"), nb::arg("mask"), nb::arg("capacity"),
          nb::arg("windows"), nb::arg("places"), nb::arg("rings"), nb::arg("prompt"),
          "What grows by one: place [1] and positions [b, 1]; mask [b, 1, 1, capacity] becomes true there, within it. "
          "Of each window, a place [1] and a ring [b, 1, 1, size] go round behind `prompt` places.")
      .def("advance", &NextPlace::advance, "By one token.");
}

}  // namespace ktinject
