// The gated delta rule of one token a row: projections on the pool, then the convolution in tasks of some channels,
// then a task for each head of values.
#include "attention/gated_delta.hpp"

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
// Added to the square of a length before its root: what transformers' l2norm has.
constexpr float kLengthEpsilon = 1e-6f;

void expect(const gemm::Linear* linear, int out, const char* name) {
  if (linear == nullptr || linear->config().out_features != out)
    throw std::invalid_argument(std::string("gated delta rule: ") + name + ": expected " + std::to_string(out) +
                                " outputs");
}

void expect(const Cached& cached, DType dtype, std::vector<int> shape, const char* name) {
  if (cached.dtype == dtype && cached.shape == shape) return;
  std::string wanted;
  for (const int size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  throw std::invalid_argument(std::string("cache: expected ") + name + " [" + wanted + "]");
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// to [n] = x [n] of length `scale`.
void with_length(const float* x, int n, float scale, float* to) {
  const float factor = length_factor(x, n, scale);
  for (int i = 0; i < n; ++i) to[i] = x[i] * factor;
}

}  // namespace

float length_factor(const float* x, int n, float length) {
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i] * x[i];
  return length / std::sqrt(sum + kLengthEpsilon);
}

// Of all rows: inputs of the convolution [batch, channels], z [batch, values], b and a [batch, value_heads]; and what
// the projections give before it is sorted, if they give it interleaved.
struct GatedDelta::Projected {
  float *mixed, *z, *b, *a, *first, *second;
};

GatedDelta::GatedDelta(GatedDeltaConfig config) : config_(config) {
  if (config_.key_heads < 1 || config_.value_heads < 1 || config_.value_heads % config_.key_heads != 0 ||
      config_.key_size < 1 || config_.value_size < 1 || config_.taps < 1)
    throw std::invalid_argument("gated delta rule: heads of values must be a multiple of those of keys");
  if (config_.is_interleaved()) {
    expect(config_.qkv, config_.channels() + config_.values(), "in_proj_qkvz");
    expect(config_.ba, 2 * config_.value_heads, "in_proj_ba");
  } else {
    expect(config_.qkv, config_.channels(), "in_proj_qkv");
    expect(config_.z, config_.values(), "in_proj_z");
    expect(config_.ba, config_.value_heads, "in_proj_b");
    expect(config_.a, config_.value_heads, "in_proj_a");
  }
  if (config_.norm.size != config_.value_size)
    throw std::invalid_argument("gated delta rule: the norm must be one of a head's values");
}

bool GatedDelta::fits(int hidden) const {
  for (const gemm::Linear* linear : {config_.qkv, config_.ba, config_.z, config_.a})
    if (linear != nullptr && linear->config().in_features != hidden) return false;
  return config_.o->config().in_features == config_.values() && config_.o->config().out_features == hidden;
}

void GatedDelta::project(const float* x, const Step& step, const Projected& to) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int batch = step.batch, keys = config_.keys(), values = config_.values(), channels = config_.channels();
  if (config_.is_interleaved()) {
    const gemm::Linear::Product products[] = {{config_.qkv, to.first}, {config_.ba, to.second}};
    gemm::Linear::forward(products, x, DType::f32, batch);
    const int shared = config_.value_heads / config_.key_heads, part = shared * config_.value_size;
    const float *first = to.first, *second = to.second;
    for (int row = 0; row < batch; ++row)
      for (int g = 0; g < config_.key_heads; ++g) {
        float* mixed = to.mixed + product(row, channels);
        auto take = [](const float*& from, int count, float* out) {
          std::copy(from, from + count, out);
          from += count;
        };
        take(first, config_.key_size, mixed + g * config_.key_size);
        take(first, config_.key_size, mixed + keys + g * config_.key_size);
        take(first, part, mixed + 2 * keys + g * part);
        take(first, part, to.z + product(row, values) + g * part);
        take(second, shared, to.b + row * config_.value_heads + g * shared);
        take(second, shared, to.a + row * config_.value_heads + g * shared);
      }
  } else {
    const gemm::Linear::Product products[] = {
        {config_.qkv, to.mixed}, {config_.z, to.z}, {config_.ba, to.b}, {config_.a, to.a}};
    gemm::Linear::forward(products, x, DType::f32, batch);
  }
  ops.round(to.mixed, batch * channels, step.dtype);
  ops.round(to.z, batch * values, step.dtype);
  for (float* gates : {to.b, to.a}) ops.round(gates, batch * config_.value_heads, step.dtype);
}

// out [value_size] of a head of a row; own: 2 * key_size floats.
void GatedDelta::head(int h, int row, const Projected& from, const Step& step, float* state, float* own,
                      float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const float* mixed = from.mixed + product(row, config_.channels());
  const int keys = config_.key_size, values = config_.value_size;
  const int group = h / (config_.value_heads / config_.key_heads), at = row * config_.value_heads + h;
  gemm::DeltaRule rule;
  with_length(mixed + group * keys, keys, 1.0f / std::sqrt(static_cast<float>(keys)), own);
  with_length(mixed + config_.keys() + group * keys, keys, 1.0f, own + keys);
  rule.q = own;
  rule.k = own + keys;
  rule.v = mixed + 2 * config_.keys() + h * values;
  rule.decay = std::exp(-std::exp(config_.a_log[h]) * softplus(from.a[at] + config_.dt_bias[h]));
  rule.beta = from.b[at];
  ops.sigmoid(&rule.beta, 1);
  ops.round(&rule.beta, 1, step.dtype);
  rule.state = state;
  rule.keys = keys;
  rule.values = rule.stride = values;
  rule.out = out;
  ops.delta_rule(rule);
  ops.round(out, values, step.dtype);
  ops.rms_norm(out, config_.norm, step.dtype, out);
  ops.gate_by_silu(out, from.z + product(at, values), values, step.dtype);
}

void GatedDelta::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int batch = step.batch, channels = config_.channels(), values = config_.values(), heads = config_.value_heads;
  const int taps = config_.taps, key_size = config_.key_size, value_size = config_.value_size;
  const int kept = step.together();
  expect(cache.first, step.dtype, {kept, channels, taps}, "inputs of the convolution, of the model's dtype,");
  expect(cache.second, DType::f32, {kept, heads, key_size, value_size}, "states in fp32");
  const gemm::StepOps& ops = gemm::step_ops();
  const bool in_two = config_.is_interleaved();
  runtime::Arrays arrays;
  const size_t mixed_at = arrays.take(product(batch, channels)), z_at = arrays.take(product(batch, values)),
               b_at = arrays.take(product(batch, heads)), a_at = arrays.take(product(batch, heads)),
               first_at = arrays.take(in_two ? product(batch, channels + values) : 0),
               second_at = arrays.take(in_two ? product(batch, 2 * heads) : 0),
               sum_at = arrays.take(product(batch, values));
  const runtime::Scratch memory(arrays.count());
  float *mixed = memory + mixed_at, *sum = memory + sum_at;
  const Projected projected{mixed, memory + z_at, memory + b_at, memory + a_at, memory + first_at, memory + second_at};
  project(x, step, projected);
  if (step.consecutive) remember(projected, step, cache);
  advance(projected, step, cache, sum);
  config_.o->forward(sum, DType::f32, batch, out);
  ops.round(out, config_.o->config().out_features * batch, step.dtype);
}

// The states before the step, and what follows from x of its tokens: [tokens, channels | value_heads | value_heads].
void GatedDelta::remember(const Projected& from, const Step& step, const LayerCache& cache) const {
  Undo& undo = *cache.undo;
  undo.rows = step.batch;
  const size_t size = product(config_.key_size, config_.value_size) * sizeof(float);
  undo.first.resize(product(config_.channels(), config_.taps) * step.width());
  undo.second.resize(static_cast<size_t>(config_.value_heads) * size);
  undo.inputs.clear();
  for (auto [values, count] : {std::pair{from.mixed, config_.channels()}, std::pair{from.b, config_.value_heads},
                               std::pair{from.a, config_.value_heads}})
    undo.inputs.insert(undo.inputs.end(), values, values + product(step.batch, count));
  std::memcpy(undo.first.data(), cache.first.data, undo.first.size());
  const runtime::Session session;
  each(*session, undo.second.size() < kSerialProducts, config_.value_heads, [&](int h, int) {
    const size_t begin = static_cast<size_t>(h) * size;
    std::memcpy(undo.second.data() + begin, static_cast<std::byte*>(cache.second.data) + begin, size);
  });
}

void GatedDelta::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  std::memcpy(cache.first.data, undo.first.data(), undo.first.size());
  std::memcpy(cache.second.data, undo.second.data(), undo.second.size());
  const size_t values = product(kept, config_.values());
  std::vector<float> unused(2 * values);
  std::vector<float> inputs = undo.cut(kept, {config_.channels(), config_.value_heads, config_.value_heads});
  float *b = inputs.data() + product(kept, config_.channels()), *a = b + product(kept, config_.value_heads);
  const Projected from{inputs.data(), unused.data(), b, a, nullptr, nullptr};
  Step step;
  step.dtype = cache.first.dtype;
  step.batch = kept;
  step.consecutive = true;
  advance(from, step, cache, unused.data() + values);
}

// sum [batch, value_heads, value_size] of all heads, whose states move on by a token, or by all of them.
void GatedDelta::advance(const Projected& from, const Step& step, const LayerCache& cache, float* sum) const {
  for (int first = 0; first < step.batch; first += step.together()) advance_rows(first, from, step, cache, sum);
}

void GatedDelta::advance_rows(int first_row, const Projected& from, const Step& step, const LayerCache& cache,
                              float* sum) const {
  const int rows = step.together(), channels = config_.channels(), heads = config_.value_heads, taps = config_.taps;
  const gemm::StepOps& ops = gemm::step_ops();
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const runtime::Scratch own(product(2 * workers.threads(), config_.key_size));
  const int blocks = (channels + kChannels - 1) / kChannels;
  each(workers, product(rows, channels, taps) < kSerialProducts / 4, rows * blocks, [&](int index, int) {
    const int row = index / blocks, first = index % blocks * kChannels, count = std::min(kChannels, channels - first);
    float* part = from.mixed + product(first_row + row, channels) + first;
    const size_t at = static_cast<size_t>(first) * static_cast<size_t>(taps);
    auto* state = static_cast<std::byte*>(cache.first.data) + (product(row, channels, taps) + at) * step.width();
    const auto* weight = static_cast<const std::byte*>(config_.taps_weight) + at * step.width();
    ops.convolve(part, state, weight, nullptr, count, taps, true, step.dtype);
  });
  const size_t size = product(config_.key_size, config_.value_size);
  each(workers, size * product(rows, heads) * 4 < kSerialProducts, rows * heads, [&](int index, int worker) {
    const int row = first_row + index / heads, h = index % heads;
    head(h, row, from, step, static_cast<float*>(cache.second.data) + static_cast<size_t>(index) * size,
         own + product(2 * worker, config_.key_size), sum + product(row * heads + h, config_.value_size));
  });
}

}  // namespace ktinject::attention
