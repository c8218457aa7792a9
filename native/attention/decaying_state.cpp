// States that decay at fixed rates, of one token a row: projections on the pool, then a task for each head; of a single
// row in one call.
#include "attention/decaying_state.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention/around.hpp"
#include "attention/projection.hpp"
#include "attention/recurrent.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

DecayingState::DecayingState(DecayingStateConfig config) : config_(config) {
  if (config_.heads < 1 || config_.size < 1) throw std::invalid_argument("decaying states: no heads or no values");
  for (const auto& [linear, parts, name] : {std::tuple{config_.qkv, 3, "qkv_proj"}, {config_.gate, 1, "output_gate"}})
    if (linear->config().out_features != parts * config_.values())
      throw std::invalid_argument(std::string("decaying states: ") + name + ": expected " +
                                  std::to_string(parts * config_.values()) + " outputs");
  if (config_.norm.size != config_.values())
    throw std::invalid_argument("decaying states: the norm must be one of " + std::to_string(config_.values()) +
                                " values");
}

bool DecayingState::fits(int hidden) const {
  return config_.qkv->config().in_features == hidden && config_.gate->config().in_features == hidden &&
         config_.o->config().in_features == config_.values() && config_.o->config().out_features == hidden;
}

void DecayingState::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int batch = step.batch, values = config_.values(), size = config_.size;
  expect(cache.first, step.dtype, {step.together(), config_.heads, size, size}, "states of the model's dtype");
  const gemm::StepOps& ops = gemm::step_ops();
  runtime::Arrays arrays;
  const size_t mixed_at = arrays.take(product(batch, values, 3)), factor_at = arrays.take(product(batch, values, 3)),
               gate_at = arrays.take(product(batch, values)), sum_at = arrays.take(product(batch, values));
  const runtime::Scratch memory(arrays.count());
  float *mixed = memory + mixed_at, *factor = memory + factor_at, *gate = memory + gate_at, *sum = memory + sum_at;
  Products products;
  products.add(config_.qkv, mixed);
  products.add(config_.gate, gate);
  const int count = 3 * batch * values;
  auto lay_out = [&] {
    ops.round(mixed, count, step.dtype);
    std::copy(mixed, mixed + count, factor);
    ops.sigmoid(factor, count);
    for (int i = 0; i < count; ++i) mixed[i] *= factor[i];
    ops.round(mixed, count, step.dtype);
  };
  auto close = [&] {
    for (int row = 0; row < batch; ++row)
      ops.rms_norm(sum + product(row, values), config_.norm, step.dtype, sum + product(row, values));
    ops.round(gate, batch * values, step.dtype);
    ops.gate_by_sigmoid(sum, gate, batch * values, step.dtype);
  };
  if (batch == 1 && !step.consecutive) {
    const runtime::Session session;
    runtime::ThreadPool& workers = *session;
    const Products::Tasks in(workers, products, x);
    const runtime::Scratch own(product(workers.threads(), size, 2));
    const runtime::Stage heads{
        config_.heads, lay_out,
        [&](int h, int worker) { head(h, 0, mixed, step.dtype, cache, own + product(worker, size, 2), sum); },
        [&](int h) { return state_of(cache, h); }};
    const Ending ending{sum, {config_.o, out}, step.dtype, step.following};
    if (!in.is_small() && run_in_one_call(workers, ending, close, in.stage([] {}), heads)) return;
  }
  products.forward(x, batch, step.dtype);
  lay_out();
  if (step.consecutive) remember(cache, batch, {{mixed, 3 * values}});
  advance(mixed, step, cache, sum);
  close();
  config_.o->forward(sum, DType::f32, batch, out);
  ops.round(out, batch * config_.o->config().out_features, step.dtype);
}

void DecayingState::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  restore(cache);
  const std::vector<float> mixed = undo.cut(kept, {3 * config_.values()});
  std::vector<float> unused(product(kept, config_.values()));
  Step step;
  step.dtype = cache.first.dtype;
  step.batch = kept;
  step.consecutive = true;
  advance(mixed.data(), step, cache, unused.data());
}

void DecayingState::advance(const float* mixed, const Step& step, const LayerCache& cache, float* sum) const {
  const int heads = config_.heads, size = config_.size, rows = step.together();
  const runtime::Session session;
  const runtime::Scratch own(product(session->threads(), size, 2));
  const bool serial = product(size, size) * product(rows, heads) * 4 < kSerialProducts;
  for (int first = 0; first < step.batch; first += rows)
    each(*session, serial, rows * heads, [&](int index, int worker) {
      head(index, first, mixed, step.dtype, cache, own + product(worker, size, 2), sum);
    });
}

std::span<std::byte> DecayingState::state_of(const LayerCache& cache, int index) const {
  const size_t bytes = product(config_.size, config_.size) * dtype_bytes(cache.first.dtype);
  return {static_cast<std::byte*>(cache.first.data) + static_cast<size_t>(index) * bytes, bytes};
}

void DecayingState::head(int index, int first, const float* all_mixed, DType dtype, const LayerCache& cache, float* own,
                         float* sum) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, size = config_.size, row = first + index / heads, h = index % heads;
  const float* mixed = all_mixed + product(row * heads + h, size, 3);
  float* out = sum + product(row * heads + h, size);
  std::byte* state = state_of(cache, index).data();
  const float *q = mixed, *k = q + size, *v = k + size;
  float *held = own, *added = own + size;
  float decay = std::exp(-config_.slopes[h]);
  ops.round(&decay, 1, dtype);
  std::fill_n(out, size, 0.0f);
  for (int i = 0; i < size; ++i) {
    void* line = state + product(i, size) * dtype_bytes(dtype);
    ops.widen(line, size, dtype, held);
    for (int j = 0; j < size; ++j) {
      held[j] *= decay;
      added[j] = k[i] * v[j];
    }
    ops.round(held, size, dtype);
    ops.round(added, size, dtype);
    ops.add(held, added, size, dtype);
    ops.store(held, size, dtype, line);
    for (int j = 0; j < size; ++j) out[j] += q[i] * held[j];
  }
  ops.round(out, size, dtype);
}

}  // namespace ktinject::attention
