// Mamba-2 of one token a row: projections on the pool, then the convolution in tasks of some channels, then a task for
// each head; of a single row in one call.
#include "attention/mamba2.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>

#include "attention/around.hpp"
#include "attention/projection.hpp"
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
  auto lay_out = [&] {
    ops.round(projected, batch * given, step.dtype);
    for (int row = 0; row < batch; ++row) {
      const float* from = projected + product(row, given) + values;
      std::copy(from, from + channels, mixed + product(row, channels));
      std::copy(from + channels, from + channels + heads, dt + product(row, heads));
    }
  };
  auto close = [&] { gate(projected, batch, step.dtype, y); };
  if (batch == 1 && !step.consecutive) {
    const runtime::Session session;
    runtime::ThreadPool& workers = *session;
    Products products;
    products.add(config_.in, projected);
    const Products::Tasks in(workers, products, x);
    const ChannelConvolution taps = convolution();
    const runtime::Scratch own(product(workers.threads(), config_.state_size));
    const runtime::Stage advancing{
        heads, [] {},
        [&](int h, int worker) { head(h, 0, mixed, dt, cache, own + product(worker, config_.state_size), y); },
        [&](int h) { return std::as_bytes(std::span(state_of(cache, h), state_values())); }};
    const Ending ending{y, {config_.out, out}, step.dtype, step.following};
    if (!in.is_small() &&
        run_in_one_call(workers, ending, close, in.stage([] {}), taps.stage(mixed, cache.first, lay_out), advancing))
      return;
  }
  config_.in->forward(x, DType::f32, batch, projected);
  lay_out();
  if (step.consecutive) remember(cache, batch, {{mixed, channels}, {dt, heads}});
  advance(mixed, dt, step, cache, y);
  close();
  config_.out->forward(y, DType::f32, batch, out);
  ops.round(out, batch * config_.out->config().out_features, step.dtype);
}

void Mamba2::gate(const float* projected, int batch, DType dtype, float* y) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int values = config_.values(), size = values / config_.groups,
            given = values + config_.channels() + config_.heads;
  Norm norm = config_.norm;
  norm.size = size;
  for (int row = 0; row < batch; ++row) {
    float* one = y + product(row, values);
    // In fp32 up to the norm.
    ops.gate_by_silu(one, projected + product(row, given), values, DType::f32);
    for (int g = 0; g < config_.groups; ++g) {
      norm.weight = static_cast<const std::byte*>(config_.norm.weight) + product(g, size) * dtype_bytes(dtype);
      ops.rms_norm(one + product(g, size), norm, dtype, one + product(g, size));
    }
  }
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

ChannelConvolution Mamba2::convolution() const {
  return {config_.taps_weight, config_.taps_bias, config_.channels(), config_.taps, true};
}

void Mamba2::advance(float* mixed, const float* dt, const Step& step, const LayerCache& cache, float* y) const {
  const int rows = step.together(), channels = config_.channels(), heads = config_.heads;
  const ChannelConvolution taps = convolution();
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const runtime::Scratch own(product(workers.threads(), config_.state_size));
  for (int first = 0; first < step.batch; first += rows) {
    taps.advance(workers, mixed + product(first, channels), rows, cache.first);
    each(workers, state_values() * product(rows, heads) * 4 < kSerialProducts, rows * heads,
         [&](int index, int worker) {
           head(index, first, mixed, dt, cache, own + product(worker, config_.state_size), y);
         });
  }
}

float* Mamba2::state_of(const LayerCache& cache, int index) const {
  return static_cast<float*>(cache.second.data) + static_cast<size_t>(index) * state_values();
}

void Mamba2::head(int index, int first, const float* all_mixed, const float* all_dt, const LayerCache& cache,
                  float* own, float* all_y) const {
  const int row = first + index / config_.heads, h = index % config_.heads;
  const float* mixed = all_mixed + product(row, config_.channels());
  float dt = all_dt[product(row, config_.heads) + static_cast<size_t>(h)];
  float* y = all_y + product(row, config_.values()) + product(h, config_.head_size);
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
  task.state = state_of(cache, index);
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
