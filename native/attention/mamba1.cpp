// Mamba of one token a row: projections on the pool, then the convolution and the states in tasks of some channels; of
// a single row in one call.
#include "attention/mamba1.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/around.hpp"
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

// What lies between the convolution and the states: of each row what `proj` gives, its first values normed, and dt.
struct Mamba1::Between {
  float *proj, *low, *dt;
};

size_t Mamba1::between_values(int batch) const {
  return product(batch, 2 * config_.rank() + 2 * config_.state_size() + config_.values());
}

Mamba1::Between Mamba1::between_in(float* memory, int batch) const {
  float* low = memory + product(batch, config_.rank() + 2 * config_.state_size());
  return {memory, low, low + product(batch, config_.rank())};
}

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
  auto lay_out = [&] {
    ops.round(projected, 2 * batch * values, step.dtype);
    for (int row = 0; row < batch; ++row)
      std::copy_n(projected + product(row, values, 2), values, mixed + product(row, values));
  };
  auto close = [&] {
    for (int row = 0; row < batch; ++row) {
      float* z = projected + product(row, values, 2) + values;
      ops.gate_up(z, y + product(row, values), values, gemm::ActivationKind::silu, step.dtype);
      std::copy_n(z, values, y + product(row, values));
    }
  };
  if (batch == 1 && !step.consecutive) {
    const runtime::Scratch own(between_values(1));
    const Between between = between_in(own, 1);
    const runtime::Session session;
    Products first, middle, last;
    first.add(config_.in, projected);
    middle.add(config_.proj, between.proj);
    last.add(config_.dt, between.dt);
    const Products::Tasks in(*session, first, x), proj(*session, middle, mixed, 1), dt(*session, last, between.low, 2);
    const ChannelConvolution taps = convolution();
    const runtime::Stage advancing{blocks(), [&] { ops.round(between.dt, values, step.dtype); },
                                   [&](int block, int) { advance_block(block, 0, mixed, between, step, cache, y); },
                                   runtime::kReadsNothing};
    const Ending ending{y, {config_.out, out}, step.dtype, step.following};
    if (!in.is_small() &&
        run_in_one_call(*session, ending, close, in.stage([] {}), taps.stage(mixed, cache.first, lay_out),
                        proj.stage([] {}), dt.stage([&] { norm(between, 1, step.dtype); }), advancing))
      return;
  }
  config_.in->forward(x, DType::f32, batch, projected);
  lay_out();
  if (step.consecutive) remember(cache, batch, {{mixed, values}});
  advance(mixed, step, cache, y);
  close();
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

ChannelConvolution Mamba1::convolution() const {
  return {config_.taps_weight, config_.taps_bias, config_.values(), config_.taps, true};
}

int Mamba1::blocks() const { return (config_.values() + kChannels - 1) / kChannels; }

void Mamba1::norm(const Between& between, int batch, DType dtype) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int rank = config_.rank(), size = config_.state_size(), given = rank + 2 * size;
  ops.round(between.proj, batch * given, dtype);
  for (int row = 0; row < batch; ++row) {
    float* parts = between.proj + product(row, given);
    ops.rms_norm(parts, config_.dt_norm, dtype, between.low + product(row, rank));
    ops.rms_norm(parts + rank, config_.b_norm, dtype, parts + rank);
    ops.rms_norm(parts + rank + size, config_.c_norm, dtype, parts + rank + size);
  }
}

void Mamba1::advance(float* mixed, const Step& step, const LayerCache& cache, float* y) const {
  const int rows = step.together(), batch = step.batch, values = config_.values();
  const runtime::Scratch memory(between_values(batch));
  const Between between = between_in(memory, batch);
  const ChannelConvolution taps = convolution();
  {
    const runtime::Session session;
    for (int row = 0; row < batch; row += rows) taps.advance(*session, mixed + product(row, values), rows, cache.first);
  }
  config_.proj.forward(mixed, batch, step.dtype, between.proj);
  norm(between, batch, step.dtype);
  config_.dt.forward(between.low, batch, step.dtype, between.dt);
  gemm::step_ops().round(between.dt, batch * values, step.dtype);
  const runtime::Session session;
  for (int first = 0; first < batch; first += rows)
    each(*session, product(rows, values, config_.state_size()) * 8 < kSerialProducts, rows * blocks(),
         [&](int index, int) { advance_block(index, first, mixed, between, step, cache, y); });
}

void Mamba1::advance_block(int index, int first_row, const float* mixed, const Between& between, const Step& step,
                           const LayerCache& cache, float* y) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int values = config_.values(), size = config_.state_size(), rank = config_.rank();
  const int row = first_row + index / blocks(), first = index % blocks() * kChannels;
  const size_t at = product(row, values) + static_cast<size_t>(first);
  float* dt = between.dt + at;
  gemm::ChannelStates task;
  task.channels = std::min(kChannels, values - first);
  for (int c = 0; c < task.channels; ++c) dt[c] = softplus(dt[c]);
  ops.round(dt, task.channels, step.dtype);
  task.x = mixed + at;
  task.dt = dt;
  task.a_log = config_.a_log + product(first, size);
  task.b = between.proj + product(row, rank + 2 * size) + rank;
  task.c = task.b + size;
  task.size = size;
  task.state = static_cast<float*>(cache.second.data) + product(index / blocks(), values, size) + product(first, size);
  task.dtype = step.dtype;
  task.out = y + at;
  ops.channel_states(task);
  for (int c = 0; c < task.channels; ++c) {
    float skipped = task.x[c] * config_.d[first + c];
    if (!config_.has_wide_d) ops.round(&skipped, 1, step.dtype);
    task.out[c] += skipped;
  }
  if (!config_.has_wide_d) ops.round(task.out, task.channels, step.dtype);
}

}  // namespace ktinject::attention
