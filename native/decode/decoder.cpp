#include "decode/decoder.hpp"

#include <stdexcept>
#include <string>

namespace ktinject {

void Decoder::add(const Norm& before_attention, Attention& attention, const Norm& before_feed_forward,
                  FeedForward& unit) {
  const std::string width = std::to_string(hidden_) + " values";
  for (const Norm& norm : {before_attention, before_feed_forward})
    if (norm.weight == nullptr || norm.size != hidden_)
      throw std::invalid_argument("a layer's norm must be one of " + width);
  if (!attention.fits(hidden_)) throw std::invalid_argument("attention: expected " + width + " in and out");
  if (!unit.fits(hidden_)) throw std::invalid_argument("feed-forward: expected " + width + " in and out");
  layers_.push_back({before_attention, &attention, before_feed_forward, &unit});
}

void Decoder::forward(const void* x, const Step& step, const std::vector<LayerCache>& caches, int first, int last,
                      const Norm& final_norm, void* y) {
  const std::lock_guard turn(turn_);
  const Math& math = ktinject::math();
  const int count = step.batch * hidden_;
  Arrays arrays;
  const size_t stream_at = arrays.take(static_cast<size_t>(count)), normed_at = arrays.take(static_cast<size_t>(count)),
               out_at = arrays.take(static_cast<size_t>(count));
  float* memory = scratch_(arrays.count());
  float *stream = memory + stream_at, *normed = memory + normed_at, *out = memory + out_at;
  choose_stages(~uint32_t{0}).widen(x, step.dtype, 1, count, stream);
  auto norm_all = [&](const Norm& norm) {
    for (int row = 0; row < step.batch; ++row)
      math.rms_norm(stream + row * hidden_, norm.weight, hidden_, norm.epsilon, step.dtype, normed + row * hidden_);
  };
  for (int i = first; i < last; ++i) {
    const Layer& layer = layers_[static_cast<size_t>(i)];
    norm_all(layer.before_attention);
    layer.attention->forward(normed, step, caches[static_cast<size_t>(i)], out);
    math.add(stream, out, count, step.dtype);
    norm_all(layer.before_feed_forward);
    layer.feed_forward->forward(normed, step.dtype, step.batch, out);
    math.add(stream, out, count, step.dtype);
  }
  if (final_norm.weight != nullptr) norm_all(final_norm);
  math.store(final_norm.weight == nullptr ? stream : normed, count, step.dtype, y);
}

}  // namespace ktinject
