// The gated delta rule of one token a row: projections on the pool, then the convolution in tasks of some channels,
// then a task for each head of values; of a single row in one call.
#include "attention/gated_delta.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/around.hpp"
#include "attention/recurrent.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

// Added to the square of a length before its root: what transformers' l2norm has.
constexpr float kLengthEpsilon = 1e-6f;

void expect(const gemm::Linear* linear, int out, const char* name) {
  if (linear == nullptr || linear->config().out_features != out)
    throw std::invalid_argument(std::string("gated delta rule: ") + name + ": expected " + std::to_string(out) +
                                " outputs");
}

void expect(const Projection& layer, int out, const char* name) {
  if (!layer || layer.out != out)
    throw std::invalid_argument(std::string("gated delta rule: ") + name + ": expected " + std::to_string(out) +
                                " outputs");
}

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

// Of all rows: inputs of the convolution [batch, channels], z [batch, values], b [batch, value_heads] and a [batch,
// decays]; and what projections give on the way to that.
struct GatedDelta::Projected {
  float *mixed, *z, *b, *a, *first, *second, *third;
};

GatedDelta::GatedDelta(GatedDeltaConfig config) : config_(config) {
  if (config_.key_heads < 1 || config_.value_heads < 1 || config_.value_heads % config_.key_heads != 0 ||
      config_.key_size < 1 || config_.value_size < 1 || config_.taps < 1)
    throw std::invalid_argument("gated delta rule: heads of values must be a multiple of those of keys");
  expect_projections();
  if (config_.norm.size != config_.value_size)
    throw std::invalid_argument("gated delta rule: the norm must be one of a head's values");
  if ((config_.bound != 0.0f || config_.has_wide_taps) && !config_.by_channels)
    throw std::invalid_argument("gated delta rule: a bound, or taps in fp32, are for decays by channels");
}

void GatedDelta::expect_projections() const {
  if (config_.is_interleaved()) {
    expect(config_.qkv, config_.channels() + config_.values(), "in_proj_qkvz");
    expect(config_.ba, 2 * config_.value_heads, "in_proj_ba");
    if (config_.k != nullptr || config_.v != nullptr || config_.z_low != nullptr || config_.a_low ||
        config_.by_channels)
      throw std::invalid_argument("gated delta rule: what is interleaved has no other projections, and no channels");
    return;
  }
  expect(config_.z, config_.values(), "in_proj_z");
  expect(config_.ba, config_.value_heads, "in_proj_b");
  expect(config_.a, config_.decays(), "in_proj_a");
  if (config_.z_low != nullptr) expect(config_.z_low, config_.z->config().in_features, "what z or a is made of");
  if (config_.a_low) expect(config_.a_low, config_.a.in, "what z or a is made of");
  if (config_.k == nullptr && config_.v == nullptr) return expect(config_.qkv, config_.channels(), "in_proj_qkv");
  expect(config_.qkv, config_.keys(), "q_proj");
  expect(config_.k, config_.keys(), "k_proj");
  expect(config_.v, config_.values(), "v_proj");
}

bool GatedDelta::fits(int hidden) const {
  for (const gemm::Linear* linear :
       {config_.qkv, config_.k, config_.v, config_.z_low, config_.z_low == nullptr ? config_.z : nullptr})
    if (linear != nullptr && linear->config().in_features != hidden) return false;
  const Projection& decays = config_.a_low ? config_.a_low : config_.a;
  if (config_.ba.in != hidden || (decays && decays.in != hidden)) return false;
  return config_.o->config().in_features == config_.values() && config_.o->config().out_features == hidden;
}

Products GatedDelta::products(const Projected& to, int batch) const {
  Products products;
  if (config_.is_interleaved()) {
    products.add(config_.qkv, to.first);
    products.add(config_.ba, to.second);
    return products;
  }
  const bool in_parts = config_.k != nullptr;
  // Of a single row, they lie one behind the other as they are.
  float* parts = batch == 1 ? to.mixed : to.first;
  products.add(config_.qkv, in_parts ? parts : to.mixed);
  products.add(config_.ba, to.b);
  products.add(config_.z_low == nullptr ? config_.z : config_.z_low, config_.z_low == nullptr ? to.z : to.second);
  products.add(config_.a_low ? config_.a_low : config_.a, config_.a_low ? to.third : to.a);
  if (in_parts) {
    products.add(config_.k, parts + product(batch, config_.keys()));
    products.add(config_.v, parts + product(batch, 2 * config_.keys()));
  }
  return products;
}

void GatedDelta::lay_out(const Step& step, const Projected& to) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int batch = step.batch, keys = config_.keys(), values = config_.values(), channels = config_.channels();
  const int shared = config_.value_heads / config_.key_heads, part = shared * config_.value_size;
  const float *first = to.first, *second = to.second;
  for (int row = 0; config_.is_interleaved() && row < batch; ++row)
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
  for (int row = 0; config_.k != nullptr && batch > 1 && row < batch; ++row) {
    float* mixed = to.mixed + product(row, channels);
    for (int i = 0; i < 3; ++i) {
      const int count = i < 2 ? keys : values;
      std::copy_n(to.first + product(batch, i * keys) + product(row, count), count, mixed + i * keys);
    }
  }
  if (config_.z_low != nullptr) ops.round(to.second, batch * config_.z_low->config().out_features, step.dtype);
  if (config_.a_low) ops.round(to.third, batch * config_.a_low.out, step.dtype);
}

void GatedDelta::round(const Step& step, const Projected& to) const {
  const gemm::StepOps& ops = gemm::step_ops();
  ops.round(to.mixed, step.batch * config_.channels(), step.dtype);
  ops.round(to.z, step.batch * config_.values(), step.dtype);
  ops.round(to.b, step.batch * config_.value_heads, step.dtype);
  ops.round(to.a, step.batch * config_.decays(), step.dtype);
}

void GatedDelta::project(const float* x, const Step& step, const Projected& to) const {
  products(to, step.batch).forward(x, step.batch, step.dtype);
  lay_out(step, to);
  if (config_.z_low != nullptr) config_.z->forward(to.second, DType::f32, step.batch, to.z);
  if (config_.a_low) config_.a.forward(to.third, step.batch, step.dtype, to.a);
  round(step, to);
}

bool GatedDelta::run_in_one_call(const float* x, const Step& step, const Projected& to, const LayerCache& cache,
                                 float* sum, float* out) const {
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const Products first = products(to, 1);
  Products of_z, of_a;
  if (config_.z_low != nullptr) of_z.add(config_.z, to.z);
  if (config_.a_low) of_a.add(config_.a, to.a);
  const Products::Tasks in(workers, first, x), z(workers, of_z, to.second, 1), a(workers, of_a, to.third, 2);
  if (in.is_small()) return false;
  const ChannelConvolution taps = convolution();
  const size_t size = product(config_.key_size, config_.value_size);
  const runtime::Scratch own(product(3 * workers.threads(), config_.key_size));
  auto state = [&](int h) { return static_cast<float*>(cache.second.data) + static_cast<size_t>(h) * size; };
  const runtime::Stage heads{config_.value_heads, [] {},
                             [&](int h, int worker) {
                               head(h, 0, to, step, state(h), own + product(3 * worker, config_.key_size),
                                    sum + product(h, config_.value_size));
                             },
                             [&](int h) { return std::as_bytes(std::span(state(h), size)); }};
  const Ending ending{sum, {config_.o, out}, step.dtype, step.following};
  auto given = in.stage([] {});
  auto lay = [&] { lay_out(step, to); };
  auto end_products = [&] { round(step, to); };
  if (config_.z_low != nullptr || config_.a_low)
    return attention::run_in_one_call(
        workers, ending, [] {}, given, beside(z.stage(lay), a.stage([] {})),
        taps.stage(to.mixed, cache.first, end_products), heads);
  return attention::run_in_one_call(
      workers, ending, [] {}, given,
      taps.stage(to.mixed, cache.first,
                 [&] {
                   lay();
                   end_products();
                 }),
      heads);
}

void GatedDelta::decay(int h, const float* a, float* decays) const {
  const float rate = -std::exp(config_.a_log[h]);
  const int count = config_.by_channels ? config_.key_size : 1;
  if (config_.bound != 0.0f) {
    for (int i = 0; i < count; ++i) decays[i] = -rate * (a[h * count + i] + config_.dt_bias[h * count + i]);
    gemm::step_ops().sigmoid(decays, count);
    for (int i = 0; i < count; ++i) decays[i] = std::exp(config_.bound * decays[i]);
    return;
  }
  for (int i = 0; i < count; ++i)
    decays[i] = std::exp(rate * softplus(a[h * count + i] + config_.dt_bias[h * count + i]));
}

// out [value_size] of a head of a row; own: 3 * key_size floats.
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
  float* decays = own + 2 * keys;
  decay(h, from.a + product(row, config_.decays()), decays);
  rule.decay = decays[0];
  rule.decays = config_.by_channels ? decays : nullptr;
  rule.beta = from.b[at];
  ops.sigmoid(&rule.beta, 1);
  ops.round(&rule.beta, 1, step.dtype);
  rule.state = state;
  rule.keys = keys;
  rule.values = rule.stride = values;
  rule.out = out;
  ops.delta_rule(rule);
  ops.round(out, values, step.dtype);
  const float* z = from.z + product(at, values);
  if (config_.by_channels) {
    ops.rms_norm(out, config_.norm, DType::f32, out);
    ops.gate_by_sigmoid(out, z, values, DType::f32);
    ops.round(out, values, step.dtype);
  } else {
    ops.rms_norm(out, config_.norm, step.dtype, out);
    ops.gate_by_silu(out, z, values, step.dtype);
  }
}

void GatedDelta::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int batch = step.batch, channels = config_.channels(), values = config_.values(), heads = config_.value_heads;
  const int taps = config_.taps, key_size = config_.key_size, value_size = config_.value_size;
  const int kept = step.together();
  expect(cache.first, step.dtype, {kept, channels, taps}, "inputs of the convolution, of the model's dtype,");
  expect(cache.second, DType::f32, {kept, heads, key_size, value_size}, "states in fp32");
  const gemm::StepOps& ops = gemm::step_ops();
  auto outputs = [](const gemm::Linear* linear) { return linear == nullptr ? 0 : linear->config().out_features; };
  const bool in_two = config_.is_interleaved(), in_parts = config_.k != nullptr;
  runtime::Arrays arrays;
  const size_t mixed_at = arrays.take(product(batch, channels)), z_at = arrays.take(product(batch, values)),
               b_at = arrays.take(product(batch, heads)), a_at = arrays.take(product(batch, config_.decays())),
               first_at = arrays.take(product(batch, in_two     ? channels + values
                                                     : in_parts ? channels
                                                                : 0)),
               second_at = arrays.take(product(batch, in_two ? 2 * heads : outputs(config_.z_low))),
               third_at = arrays.take(product(batch, config_.a_low.out)), sum_at = arrays.take(product(batch, values));
  const runtime::Scratch memory(arrays.count());
  float *mixed = memory + mixed_at, *sum = memory + sum_at;
  const Projected projected{
      mixed, memory + z_at, memory + b_at, memory + a_at, memory + first_at, memory + second_at, memory + third_at};
  if (batch == 1 && !step.consecutive && run_in_one_call(x, step, projected, cache, sum, out)) return;
  project(x, step, projected);
  if (step.consecutive)
    remember(cache, batch, {{mixed, channels}, {projected.b, heads}, {projected.a, config_.decays()}});
  advance(projected, step, cache, sum);
  config_.o->forward(sum, DType::f32, batch, out);
  ops.round(out, config_.o->config().out_features * batch, step.dtype);
}

void GatedDelta::keep(const LayerCache& cache, int kept) const {
  Undo& undo = *cache.undo;
  if (kept == undo.rows) return;
  restore(cache);
  const size_t values = product(kept, config_.values());
  std::vector<float> unused(2 * values);
  std::vector<float> inputs = undo.cut(kept, {config_.channels(), config_.value_heads, config_.decays()});
  float *b = inputs.data() + product(kept, config_.channels()), *a = b + product(kept, config_.value_heads);
  const Projected from{inputs.data(), unused.data(), b, a, nullptr, nullptr, nullptr};
  Step step;
  step.dtype = cache.first.dtype;
  step.batch = kept;
  step.consecutive = true;
  advance(from, step, cache, unused.data() + values);
}

ChannelConvolution GatedDelta::convolution() const {
  return {config_.taps_weight, nullptr, config_.channels(), config_.taps, true, config_.has_wide_taps};
}

// sum [batch, value_heads, value_size] of all heads, whose states move on by a token, or by all of them.
void GatedDelta::advance(const Projected& from, const Step& step, const LayerCache& cache, float* sum) const {
  for (int first = 0; first < step.batch; first += step.together()) advance_rows(first, from, step, cache, sum);
}

void GatedDelta::advance_rows(int first_row, const Projected& from, const Step& step, const LayerCache& cache,
                              float* sum) const {
  const int rows = step.together(), heads = config_.value_heads;
  const ChannelConvolution taps = convolution();
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const runtime::Scratch own(product(3 * workers.threads(), config_.key_size));
  taps.advance(workers, from.mixed + product(first_row, taps.channels), rows, cache.first);
  const size_t size = product(config_.key_size, config_.value_size);
  each(workers, size * product(rows, heads) * 4 < kSerialProducts, rows * heads, [&](int index, int worker) {
    const int row = first_row + index / heads, h = index % heads;
    head(h, row, from, step, static_cast<float*>(cache.second.data) + static_cast<size_t>(index) * size,
         own + product(3 * worker, config_.key_size), sum + product(row * heads + h, config_.value_size));
  });
}

}  // namespace ktinject::attention
