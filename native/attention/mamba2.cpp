// Mamba-2 of one token a row: projections on the pool, then the convolution in tasks of some channels, then a task for
// each head.
#include "attention/mamba2.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "attention/recurrent.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

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
  if (step.consecutive) remember(cache, batch, {{mixed, channels}, {dt, heads}});
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

void Mamba2::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  restore(cache);
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
  const int rows = step.together(), channels = config_.channels(), heads = config_.heads;
  const size_t size = product(config_.head_size, config_.state_size);
  const ChannelConvolution convolution{config_.taps_weight, config_.taps_bias, channels, config_.taps, true};
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const runtime::Scratch own(product(workers.threads(), config_.state_size));
  for (int first_row = 0; first_row < step.batch; first_row += rows) {
    convolution.advance(workers, mixed + product(first_row, channels), rows, cache.first);
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
