// Mamba-2 of one token a row: projections on the pool, then the convolution in tasks of some channels, then a task for
// each head.
#include "attention/mamba2.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

// Of a task of the convolution.
constexpr int kChannels = 512;

void expect(const Cached& cached, DType dtype, std::vector<int> shape, const char* name) {
  if (cached.dtype == dtype && cached.shape == shape) return;
  std::string wanted;
  for (const int size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  throw std::invalid_argument(std::string("cache: expected ") + name + " [" + wanted + "]");
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

Mamba2::Mamba2(Mamba2Config config) : config_(config) {
  if (config_.groups < 1 || config_.heads < 1 || config_.heads % config_.groups != 0 || config_.head_size < 1 ||
      config_.state_size < 1 || config_.taps < 1)
    throw std::invalid_argument("mamba-2: heads must be a multiple of groups");
  const int given = config_.values() + config_.channels() + config_.heads;
  if (config_.in->config().out_features != given)
    throw std::invalid_argument("mamba-2: in_proj: expected " + std::to_string(given) + " outputs");
  if (config_.norm.size != config_.values())
    throw std::invalid_argument("mamba-2: the norm must be one of " + std::to_string(config_.values()) + " values");
}

bool Mamba2::fits(int hidden) const {
  return config_.in->config().in_features == hidden && config_.out->config().in_features == config_.values() &&
         config_.out->config().out_features == hidden;
}

void Mamba2::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int batch = step.batch, channels = config_.channels(), values = config_.values(), heads = config_.heads;
  const int given = values + channels + heads;
  if (step.dtype != config_.dtype) throw std::invalid_argument("mamba-2: weights of another dtype than the model's");
  expect(cache.first, step.dtype, {step.together(), channels, config_.taps},
         "inputs of the convolution, of the model's dtype,");
  expect(cache.second, DType::f32, {step.together(), heads, config_.head_size, config_.state_size}, "states in fp32");
  const gemm::StepOps& ops = gemm::step_ops();
  runtime::Arrays arrays;
  const size_t projected_at = arrays.take(product(batch, given)), mixed_at = arrays.take(product(batch, channels)),
               dt_at = arrays.take(product(batch, heads)), y_at = arrays.take(product(batch, values));
  const runtime::Scratch memory(arrays.count());
  float *projected = memory + projected_at, *mixed = memory + mixed_at, *dt = memory + dt_at, *y = memory + y_at;
  config_.in->forward(x, DType::f32, batch, projected);
  ops.round(projected, batch * given, step.dtype);
  for (int row = 0; row < batch; ++row) {
    const float* from = projected + product(row, given) + values;
    std::copy(from, from + channels, mixed + product(row, channels));
    std::copy(from + channels, from + channels + heads, dt + product(row, heads));
  }
  if (step.consecutive) remember(mixed, dt, step, cache);
  advance(mixed, dt, step, cache, y);
  const int size = values / config_.groups;
  Norm norm = config_.norm;
  norm.size = size;
  for (int row = 0; row < batch; ++row) {
    float* one = y + product(row, values);
    // In fp32 up to the norm.
    ops.gate_by_silu(one, projected + product(row, given), values, DType::f32);
    for (int g = 0; g < config_.groups; ++g) {
      norm.weight = static_cast<const std::byte*>(config_.norm.weight) + product(g, size) * step.width();
      ops.rms_norm(one + product(g, size), norm, step.dtype, one + product(g, size));
    }
  }
  config_.out->forward(y, DType::f32, batch, out);
  ops.round(out, batch * config_.out->config().out_features, step.dtype);
}

// The states before the step, and what follows from x of its tokens: [tokens, channels | heads].
void Mamba2::remember(const float* mixed, const float* dt, const Step& step, const LayerCache& cache) const {
  Undo& undo = *cache.undo;
  undo.rows = step.batch;
  const size_t size = product(config_.head_size, config_.state_size) * sizeof(float);
  undo.first.resize(product(config_.channels(), config_.taps) * step.width());
  undo.second.resize(static_cast<size_t>(config_.heads) * size);
  undo.inputs.assign(mixed, mixed + product(step.batch, config_.channels()));
  undo.inputs.insert(undo.inputs.end(), dt, dt + product(step.batch, config_.heads));
  std::memcpy(undo.first.data(), cache.first.data, undo.first.size());
  const runtime::Session session;
  each(*session, undo.second.size() < kSerialProducts, config_.heads, [&](int h, int) {
    const size_t begin = static_cast<size_t>(h) * size;
    std::memcpy(undo.second.data() + begin, static_cast<std::byte*>(cache.second.data) + begin, size);
  });
}

void Mamba2::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  std::memcpy(cache.first.data, undo.first.data(), undo.first.size());
  std::memcpy(cache.second.data, undo.second.data(), undo.second.size());
  std::vector<float> mixed = undo.cut(kept, {config_.channels(), config_.heads});
  const float* dt = mixed.data() + product(kept, config_.channels());
  std::vector<float> unused(product(kept, config_.values()));
  Step step;
  step.dtype = config_.dtype;
  step.batch = kept;
  step.consecutive = true;
  advance(mixed.data(), dt, step, cache, unused.data());
}

void Mamba2::advance(float* mixed, const float* dt, const Step& step, const LayerCache& cache, float* y) const {
  const int rows = step.together(), channels = config_.channels(), heads = config_.heads, taps = config_.taps;
  const size_t size = product(config_.head_size, config_.state_size);
  const gemm::StepOps& ops = gemm::step_ops();
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const runtime::Scratch own(product(workers.threads(), config_.state_size));
  const int blocks = (channels + kChannels - 1) / kChannels;
  for (int first_row = 0; first_row < step.batch; first_row += rows) {
    each(workers, product(rows, channels, taps) < kSerialProducts / 4, rows * blocks, [&](int index, int) {
      const int row = index / blocks, first = index % blocks * kChannels, count = std::min(kChannels, channels - first);
      const size_t at = product(first, taps), state = product(row, channels, taps) + at;
      const auto* bias = static_cast<const std::byte*>(config_.taps_bias);
      ops.convolve(mixed + product(first_row + row, channels) + first,
                   static_cast<std::byte*>(cache.first.data) + state * step.width(),
                   static_cast<const std::byte*>(config_.taps_weight) + at * step.width(),
                   bias == nullptr ? nullptr : bias + product(first, 1) * step.width(), count, taps, true, step.dtype);
    });
    each(workers, size * product(rows, heads) * 4 < kSerialProducts, rows * heads, [&](int index, int worker) {
      const int row = first_row + index / heads, h = index % heads;
      head(h, mixed + product(row, channels), dt[product(row, heads) + static_cast<size_t>(h)],
           static_cast<float*>(cache.second.data) + static_cast<size_t>(index) * size,
           own + product(worker, config_.state_size),
           y + product(row, config_.values()) + product(h, config_.head_size));
    });
  }
}

// y [head_size] of a head of a row. own: [state_size]
void Mamba2::head(int h, const float* mixed, float dt, float* state, float* own, float* y) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.head_size, state_size = config_.state_size;
  const float* x = mixed + product(h, size);
  const float* b = mixed + config_.values() + product(h / (config_.heads / config_.groups), state_size);
  float bias = config_.dt_bias[h];
  ops.round(&bias, 1, config_.dtype);
  dt += bias;
  ops.round(&dt, 1, config_.dtype);
  dt = softplus(dt);
  ops.round(&dt, 1, config_.dtype);
  for (int i = 0; i < state_size; ++i) own[i] = dt * b[i];
  ops.round(own, state_size, config_.dtype);
  gemm::StateSpace task;
  task.x = x;
  task.b = own;
  task.c = b + product(config_.groups, state_size);
  task.decay = std::exp(dt * -std::exp(config_.a_log[h]));
  task.state = state;
  task.values = size;
  task.size = state_size;
  task.dtype = config_.dtype;
  task.out = y;
  ops.state_space(task);
  for (int i = 0; i < size; ++i) {
    float skipped = x[i] * config_.d[h];
    if (!config_.has_wide_d) ops.round(&skipped, 1, config_.dtype);
    y[i] += skipped;
  }
  ops.round(y, size, config_.dtype);
}

}  // namespace ktinject::attention
