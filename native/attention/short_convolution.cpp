// A short convolution of one token a row: projections on the pool, then the convolution in tasks of some channels; of a
// single row in one call.
#include "attention/short_convolution.hpp"

#include <stdexcept>
#include <string>

#include "attention/around.hpp"
#include "attention/projection.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

ShortConvolution::ShortConvolution(ShortConvolutionConfig config) : config_(config) {
  const int channels = config_.channels();
  if (config_.taps < 1 || config_.in->config().out_features != 3 * channels)
    throw std::invalid_argument("short convolution: in_proj: expected " + std::to_string(3 * channels) + " outputs");
}

bool ShortConvolution::fits(int hidden) const {
  return config_.in->config().in_features == hidden && config_.out->config().out_features == hidden;
}

void ShortConvolution::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int batch = step.batch, channels = config_.channels(), taps = config_.taps;
  if (step.dtype != config_.dtype)
    throw std::invalid_argument("short convolution: weights of another dtype than the model's");
  expect(cache.first, step.dtype, {step.together(), channels, taps},
         "inputs of the convolution, of the model's dtype,");
  const gemm::StepOps& ops = gemm::step_ops();
  runtime::Arrays arrays;
  const size_t given_at = arrays.take(product(batch, channels, 3)), mixed_at = arrays.take(product(batch, channels));
  const runtime::Scratch memory(arrays.count());
  float *given = memory + given_at, *mixed = memory + mixed_at;
  auto lay_out = [&] {
    ops.round(given, 3 * batch * channels, step.dtype);
    for (int row = 0; row < batch; ++row) {
      const float *b = given + product(row, channels, 3), *values = b + 2 * channels;
      float* to = mixed + product(row, channels);
      for (int c = 0; c < channels; ++c) to[c] = b[c] * values[c];
    }
    ops.round(mixed, batch * channels, step.dtype);
  };
  auto close = [&] {
    for (int row = 0; row < batch; ++row) {
      const float* c_of = given + product(row, channels, 3) + channels;
      float* to = mixed + product(row, channels);
      for (int c = 0; c < channels; ++c) to[c] *= c_of[c];
    }
    ops.round(mixed, batch * channels, step.dtype);
  };
  if (batch == 1 && !step.consecutive) {
    const runtime::Session session;
    Products products;
    products.add(config_.in, given);
    const Products::Tasks in(*session, products, x);
    const ChannelConvolution convolution = this->convolution();
    const Ending ending{mixed, {config_.out, out}, step.dtype, step.following};
    if (!in.is_small() &&
        run_in_one_call(*session, ending, close, in.stage([] {}), convolution.stage(mixed, cache.first, lay_out)))
      return;
  }
  config_.in->forward(x, DType::f32, batch, given);
  lay_out();
  if (step.consecutive) remember(cache, batch, {{mixed, channels}});
  advance(mixed, step, cache);
  close();
  config_.out->forward(mixed, DType::f32, batch, out);
  ops.round(out, batch * config_.out->config().out_features, step.dtype);
}

void ShortConvolution::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  restore(cache);
  Step step;
  step.dtype = config_.dtype;
  step.batch = kept;
  step.consecutive = true;
  std::vector<float> inputs = undo.cut(kept, {config_.channels()});
  advance(inputs.data(), step, cache);
}

ChannelConvolution ShortConvolution::convolution() const {
  return {config_.weight, nullptr, config_.channels(), config_.taps, false};
}

void ShortConvolution::advance(float* mixed, const Step& step, const LayerCache& cache) const {
  const ChannelConvolution convolution = this->convolution();
  const runtime::Session session;
  for (int row = 0; row < step.batch; row += step.together())
    convolution.advance(*session, mixed + product(row, convolution.channels), step.together(), cache.first);
}

}  // namespace ktinject::attention
