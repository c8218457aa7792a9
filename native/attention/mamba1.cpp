// Mamba of one token a row: projections on the pool, then the convolution and the states in tasks of some channels.
#include "attention/mamba1.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/recurrent.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

// Of a task of the states.
constexpr int kChannels = 256;

void expect(int found_in, int found_out, int in, int out, const char* name) {
  if (found_in != in || found_out != out)
    throw std::invalid_argument(std::string("mamba: ") + name + ": expected " + std::to_string(in) + " inputs and " +
                                std::to_string(out) + " outputs");
}

}  // namespace

Mamba1::Mamba1(Mamba1Config config) : config_(config) {
  const int values = config_.values(), rank = config_.rank(), size = config_.state_size();
  if (rank < 1 || size < 1 || config_.c_norm.size != size || config_.taps < 1)
    throw std::invalid_argument("mamba: the norms of B and C must be of one size");
  const int hidden = config_.in->config().in_features;
  expect(hidden, config_.in->config().out_features, hidden, 2 * values, "in_proj");
  expect(config_.proj.in, config_.proj.out, values, rank + 2 * size, "x_proj");
  expect(config_.dt.in, config_.dt.out, rank, values, "dt_proj");
}

bool Mamba1::fits(int hidden) const {
  return config_.in->config().in_features == hidden && config_.out->config().out_features == hidden;
}

void Mamba1::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int batch = step.batch, values = config_.values();
  if (step.dtype != config_.dtype) throw std::invalid_argument("mamba: weights of another dtype than the model's");
  expect(cache.first, step.dtype, {step.together(), values, config_.taps},
         "inputs of the convolution, of the model's dtype,");
  expect(cache.second, DType::f32, {step.together(), values, config_.state_size()}, "states in fp32");
  const gemm::StepOps& ops = gemm::step_ops();
  runtime::Arrays arrays;
  const size_t projected_at = arrays.take(product(batch, values, 2)), mixed_at = arrays.take(product(batch, values)),
               y_at = arrays.take(product(batch, values));
  const runtime::Scratch memory(arrays.count());
  float *projected = memory + projected_at, *mixed = memory + mixed_at, *y = memory + y_at;
  config_.in->forward(x, DType::f32, batch, projected);
  ops.round(projected, 2 * batch * values, step.dtype);
  for (int row = 0; row < batch; ++row)
    std::copy_n(projected + product(row, values, 2), values, mixed + product(row, values));
  if (step.consecutive) remember(cache, batch, {{mixed, values}});
  advance(mixed, step, cache, y);
  for (int row = 0; row < batch; ++row) {
    float* z = projected + product(row, values, 2) + values;
    ops.gate_up(z, y + product(row, values), values, gemm::ActivationKind::silu, step.dtype);
    std::copy_n(z, values, y + product(row, values));
  }
  config_.out->forward(y, DType::f32, batch, out);
  ops.round(out, batch * config_.out->config().out_features, step.dtype);
}

void Mamba1::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  restore(cache);
  std::vector<float> mixed = undo.cut(kept, {config_.values()});
  std::vector<float> unused(product(kept, config_.values()));
  Step step;
  step.dtype = config_.dtype;
  step.batch = kept;
  step.consecutive = true;
  advance(mixed.data(), step, cache, unused.data());
}

void Mamba1::advance(float* mixed, const Step& step, const LayerCache& cache, float* y) const {
  const int rows = step.together(), batch = step.batch, values = config_.values(), rank = config_.rank();
  const int size = config_.state_size(), given = rank + 2 * size, blocks = (values + kChannels - 1) / kChannels;
  const gemm::StepOps& ops = gemm::step_ops();
  runtime::Arrays arrays;
  const size_t proj_at = arrays.take(product(batch, given)), low_at = arrays.take(product(batch, rank)),
               dt_at = arrays.take(product(batch, values));
  const runtime::Scratch memory(arrays.count());
  float *proj = memory + proj_at, *low = memory + low_at, *dt = memory + dt_at;
  const ChannelConvolution convolution{config_.taps_weight, config_.taps_bias, values, config_.taps, true};
  {
    const runtime::Session session;
    for (int row = 0; row < batch; row += rows)
      convolution.advance(*session, mixed + product(row, values), rows, cache.first);
  }
  config_.proj.forward(mixed, batch, step.dtype, proj);
  ops.round(proj, batch * given, step.dtype);
  for (int row = 0; row < batch; ++row) {
    float* parts = proj + product(row, given);
    ops.rms_norm(parts, config_.dt_norm, step.dtype, low + product(row, rank));
    ops.rms_norm(parts + rank, config_.b_norm, step.dtype, parts + rank);
    ops.rms_norm(parts + rank + size, config_.c_norm, step.dtype, parts + rank + size);
  }
  config_.dt.forward(low, batch, step.dtype, dt);
  ops.round(dt, batch * values, step.dtype);
  const runtime::Session session;
  for (int first_row = 0; first_row < batch; first_row += rows)
    each(*session, product(rows, values, size) * 8 < kSerialProducts, rows * blocks, [&](int index, int) {
      const int row = first_row + index / blocks, first = index % blocks * kChannels;
      const size_t at = product(row, values) + static_cast<size_t>(first);
      gemm::ChannelStates task;
      task.channels = std::min(kChannels, values - first);
      for (int c = 0; c < task.channels; ++c)
        dt[at + static_cast<size_t>(c)] = softplus(dt[at + static_cast<size_t>(c)]);
      ops.round(dt + at, task.channels, step.dtype);
      task.x = mixed + at;
      task.dt = dt + at;
      task.a_log = config_.a_log + product(first, size);
      task.b = proj + product(row, given) + rank;
      task.c = task.b + size;
      task.size = size;
      task.state =
          static_cast<float*>(cache.second.data) + product(index / blocks, values, size) + product(first, size);
      task.dtype = step.dtype;
      task.out = y + at;
      ops.channel_states(task);
      for (int c = 0; c < task.channels; ++c) {
        float skipped = task.x[c] * config_.d[first + c];
        if (!config_.has_wide_d) ops.round(&skipped, 1, step.dtype);
        task.out[c] += skipped;
      }
      if (!config_.has_wide_d) ops.round(task.out, task.channels, step.dtype);
    });
}

}  // namespace ktinject::attention
