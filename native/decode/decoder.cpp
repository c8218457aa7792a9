#include "decode/decoder.hpp"

#include <algorithm>
#include <functional>
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

Decoder::Decoder(int hidden, DType dtype, int streams) : hidden_(hidden), dtype_(dtype), streams_(streams) {
  if (streams < 1 || streams > HyperConnectionConfig::kMostStreams)
    throw std::invalid_argument("decoder: found " + std::to_string(streams) + " streams; served are 1 to " +
                                std::to_string(HyperConnectionConfig::kMostStreams));
}

void Decoder::check_streams(const LayerConfig& layer) const {
  auto is_plain = [](const Sum& sum) { return sum.kept == 1.0f && sum.added == 1.0f; };
  if (streams_ > 1 && (layer.keeps_normed || layer.is_parallel || layer.scale != nullptr ||
                       !is_plain(layer.attention_sum) || !is_plain(layer.feed_forward_sum)))
    throw std::invalid_argument("a layer of several streams adds its parts as they are, one after the other");
  for (const auto& [streams, is_there] : {std::pair{layer.attention_streams, layer.attention != nullptr},
                                          {layer.feed_forward_streams, layer.feed_forward != nullptr}}) {
    if ((streams != nullptr) != (streams_ > 1 && is_there))
      throw std::invalid_argument("each part of a layer has a hyper-connection where there are several streams");
    if (streams != nullptr &&
        (streams->config().streams != streams_ || streams->config().hidden != hidden_ || streams->config().is_head))
      throw std::invalid_argument("a layer's hyper-connection must be of " + std::to_string(streams_) + " streams of " +
                                  std::to_string(hidden_) + " values");
  }
}

void Decoder::add(const LayerConfig& layer) {
  check_streams(layer);
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
                      int first, int last, const attention::Norm& final_norm, const HyperConnection* head,
                      void* y) const {
  gemm::check_size("batch", step.batch, kMostRows);
  const auto layers = layers_for(caches);
  if (first < 0 || last > static_cast<int>(layers->size()) || first > last)
    throw std::invalid_argument("decoder: there are no such layers");
  if (head != nullptr && (head->config().streams != streams_ || head->config().hidden != hidden_))
    throw std::invalid_argument("decoder: the head must be of as many streams");
  if (head == nullptr && streams_ > 1 && final_norm.weight != nullptr)
    throw std::invalid_argument("decoder: several streams have a head before the last norm");
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = step.batch * hidden_, all = count * streams_;
  runtime::Arrays arrays;
  const size_t stream_at = arrays.take(static_cast<size_t>(all)), normed_at = arrays.take(static_cast<size_t>(count)),
               out_at = arrays.take(static_cast<size_t>(count)),
               collapsed_at = arrays.take(streams_ > 1 ? static_cast<size_t>(count) : 0),
               mixing_at = arrays.take(streams_ > 1 ? static_cast<size_t>(step.batch * streams_ * (1 + streams_)) : 0);
  const runtime::Scratch memory(arrays.count());
  float *stream = memory + stream_at, *normed = memory + normed_at, *out = memory + out_at;
  float *collapsed = memory + collapsed_at, *mixing = memory + mixing_at;
  gemm::vector_ops().widen(x, step.dtype, 1, all, stream);
  auto norm_all = [&](const attention::Norm& norm, const float* from, float* to) {
    for (int row = 0; row < step.batch; ++row) ops.rms_norm(from + row * hidden_, norm, step.dtype, to + row * hidden_);
  };
  auto before = [&](const attention::Norm& norm, const HyperConnection* streams) -> const float* {
    if (streams != nullptr) streams->collapse(stream, step.batch, step.dtype, collapsed, mixing);
    const float* from = streams == nullptr ? stream : collapsed;
    if (norm.weight == nullptr) return from;
    norm_all(norm, from, normed);
    return normed;
  };
  auto times = [&](float factor, float* values) {
    if (factor == 1.0f) return;
    for (int n = 0; n < count; ++n) values[n] *= factor;
    ops.round(values, count, step.dtype);
  };
  auto add = [&](const attention::Norm& behind, const Sum& sum, bool keeps_normed, const HyperConnection* streams) {
    if (keeps_normed) std::copy(normed, normed + count, stream);
    if (behind.weight != nullptr) norm_all(behind, out, out);
    if (streams != nullptr) return streams->add(out, mixing, step.batch, step.dtype, stream);
    times(sum.kept, stream);
    times(sum.added, out);
    ops.add(stream, out, count, step.dtype);
  };
  for (int i = first; i < last; ++i) {
    const LayerConfig& layer = (*layers)[static_cast<size_t>(i)];
    const FeedForward* const part = layer.feed_forward;
    // Streams have calls of their own.
    const bool may_begin = step.batch == 1 && streams_ == 1 && part != nullptr;
    const FeedForward::Beginning beginning = may_begin ? part->beginning() : FeedForward::Beginning{};
    const runtime::Scratch begun(static_cast<size_t>(beginning.values));
    // What the feed-forward part takes, once attention is done.
    const float* given = nullptr;
    auto end_attention = [&] {
      add(layer.behind_attention, layer.attention_sum, layer.keeps_normed, layer.attention_streams);
      if (part != nullptr)
        given = layer.is_parallel ? normed : before(layer.before_feed_forward, layer.feed_forward_streams);
    };
    Rows rows{step.live, step.tokens};
    if (layer.attention != nullptr) {
      attention::Step own = step;
      if (layer.angles >= 0 && step.cos != nullptr) {
        if (layer.first_angle + layer.angles > step.angles)
          throw std::invalid_argument("decoder: a layer turns by columns that the rotation does not have");
        own.first_angle = layer.first_angle;
        own.rotary = layer.angles;
      }
      attention::Following following;
      auto begin_part = [&] {
        end_attention();
        return given;
      };
      auto run_part = [&](int index) { part->begin(index, given, begun); };
      auto reads_of_part = [&](int index) { return part->reads(index); };
      if (beginning.values > 0) {
        following.begin = std::ref(begin_part);  // a copy might take memory
        following.run = std::ref(run_part);
        following.reads = std::ref(reads_of_part);
        following.linear = beginning.linear;
        following.y = begun;
        following.count = beginning.parts;
        own.following = &following;
      }
      layer.attention->forward(before(layer.before_attention, layer.attention_streams), own,
                               caches[static_cast<size_t>(i)], out);
      if (following.is_done) rows.begun = begun;
      else end_attention();
    } else if (part != nullptr) {
      given = before(layer.before_feed_forward, layer.feed_forward_streams);
    }
    if (part != nullptr) {
      part->forward(given, step.dtype, step.batch, rows, out);
      add(layer.behind_feed_forward, layer.feed_forward_sum, layer.keeps_normed, layer.feed_forward_streams);
    }
    if (layer.scale != nullptr) {
      for (int n = 0; n < count; ++n) stream[n] *= *layer.scale;
      ops.round(stream, count, step.dtype);
    }
  }
  const float* from = stream;
  if (head != nullptr) from = before({}, head);
  if (final_norm.weight != nullptr) norm_all(final_norm, from, normed);
  ops.store(final_norm.weight == nullptr ? from : normed, from == stream ? all : count, step.dtype, y);
}

}  // namespace ktinject::decode
