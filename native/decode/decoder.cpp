#include "decode/decoder.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/scratch.hpp"

namespace ktinject::decode {

namespace {

// Of a batch: so that it may be multiplied with any width of a layer.
constexpr int kMostRows = (1 << 14) - 1;

}  // namespace

void Decoder::add(const LayerConfig& layer) {
  const std::string width = std::to_string(hidden_) + " values";
  for (const attention::Norm& norm :
       {layer.before_attention, layer.behind_attention, layer.before_feed_forward, layer.behind_feed_forward})
    if (norm.weight != nullptr && norm.size != hidden_)
      throw std::invalid_argument("a layer's norm must be one of " + width);
  if (layer.attention == nullptr && layer.feed_forward == nullptr)
    throw std::invalid_argument("a layer needs attention or a feed-forward part");
  if (layer.attention != nullptr && !layer.attention->fits(hidden_))
    throw std::invalid_argument("attention: expected " + width + " in and out");
  if (layer.feed_forward != nullptr && !layer.feed_forward->fits(hidden_))
    throw std::invalid_argument("feed-forward: expected " + width + " in and out");
  if (layer.is_parallel && (layer.attention == nullptr || layer.feed_forward == nullptr ||
                            layer.before_attention.weight == nullptr || layer.before_feed_forward.weight != nullptr))
    throw std::invalid_argument("a parallel layer has both parts, and one norm before them");
  for (const auto& [norm, is_there] : {std::pair{layer.before_attention, layer.attention != nullptr},
                                       {layer.before_feed_forward, layer.feed_forward != nullptr}})
    if (layer.keeps_normed && ((is_there && norm.weight == nullptr) || layer.is_parallel))
      throw std::invalid_argument("a layer that keeps what is normed needs norms before its parts");
  if (layer.first_angle < 0 || layer.angles < -1 || layer.angles % 2 == 1)
    throw std::invalid_argument("a layer's angles must be an even number from a column on, or all");
  const std::lock_guard turn(turn_);
  auto longer = std::make_shared<Layers>(*layers_);  // steps under way keep the shorter one
  longer->push_back(layer);
  layers_ = std::move(longer);
}

std::shared_ptr<const Decoder::Layers> Decoder::layers_for(const std::vector<attention::LayerCache>& caches) const {
  const std::lock_guard turn(turn_);
  if (caches.size() != layers_->size()) throw std::invalid_argument("decoder: the cache has another number of layers");
  return layers_;
}

void Decoder::keep(const std::vector<attention::LayerCache>& caches, int kept) const {
  const auto layers = layers_for(caches);
  for (size_t i = 0; i < layers->size(); ++i)
    if ((*layers)[i].attention != nullptr) (*layers)[i].attention->keep(caches[i], kept);
}

void Decoder::forward(const void* x, const attention::Step& step, const std::vector<attention::LayerCache>& caches,
                      int first, int last, const attention::Norm& final_norm, void* y) const {
  gemm::check_size("batch", step.batch, kMostRows);
  const auto layers = layers_for(caches);
  if (first < 0 || last > static_cast<int>(layers->size()) || first > last)
    throw std::invalid_argument("decoder: there are no such layers");
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = step.batch * hidden_;
  runtime::Arrays arrays;
  const size_t stream_at = arrays.take(static_cast<size_t>(count)), normed_at = arrays.take(static_cast<size_t>(count)),
               out_at = arrays.take(static_cast<size_t>(count));
  const runtime::Scratch memory(arrays.count());
  float *stream = memory + stream_at, *normed = memory + normed_at, *out = memory + out_at;
  gemm::vector_ops().widen(x, step.dtype, 1, count, stream);
  auto norm_all = [&](const attention::Norm& norm, const float* from, float* to) {
    for (int row = 0; row < step.batch; ++row) ops.rms_norm(from + row * hidden_, norm, step.dtype, to + row * hidden_);
  };
  auto before = [&](const attention::Norm& norm) -> const float* {
    if (norm.weight == nullptr) return stream;
    norm_all(norm, stream, normed);
    return normed;
  };
  auto times = [&](float factor, float* values) {
    if (factor == 1.0f) return;
    for (int n = 0; n < count; ++n) values[n] *= factor;
    ops.round(values, count, step.dtype);
  };
  auto add = [&](const attention::Norm& behind, const Sum& sum, bool keeps_normed) {
    if (keeps_normed) std::copy(normed, normed + count, stream);
    if (behind.weight != nullptr) norm_all(behind, out, out);
    times(sum.kept, stream);
    times(sum.added, out);
    ops.add(stream, out, count, step.dtype);
  };
  for (int i = first; i < last; ++i) {
    const LayerConfig& layer = (*layers)[static_cast<size_t>(i)];
    if (layer.attention != nullptr) {
      attention::Step own = step;
      if (layer.angles >= 0 && step.cos != nullptr) {
        if (layer.first_angle + layer.angles > step.angles)
          throw std::invalid_argument("decoder: a layer turns by columns that the rotation does not have");
        own.first_angle = layer.first_angle;
        own.rotary = layer.angles;
      }
      layer.attention->forward(before(layer.before_attention), own, caches[static_cast<size_t>(i)], out);
      add(layer.behind_attention, layer.attention_sum, layer.keeps_normed);
    }
    if (layer.feed_forward != nullptr) {
      const float* given = layer.is_parallel ? normed : before(layer.before_feed_forward);
      layer.feed_forward->forward(given, step.dtype, step.batch, step.live, out);
      add(layer.behind_feed_forward, layer.feed_forward_sum, layer.keeps_normed);
    }
    if (layer.scale != nullptr) {
      for (int n = 0; n < count; ++n) stream[n] *= *layer.scale;
      ops.round(stream, count, step.dtype);
    }
  }
  if (final_norm.weight != nullptr) norm_all(final_norm, stream, normed);
  ops.store(final_norm.weight == nullptr ? stream : normed, count, step.dtype, y);
}

}  // namespace ktinject::decode
