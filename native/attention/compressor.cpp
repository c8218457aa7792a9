#include "attention/compressor.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/tasks.hpp"
#include "attention/top.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

constexpr int kValuesOfTask = 16;  // of a key
constexpr int kWindowsOfTask = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

std::byte* at(const Cached& cached, int row, int place, int width) {
  const size_t before = product(row, cached.shape[1]) + static_cast<size_t>(place);
  return static_cast<std::byte*>(cached.data) + before * static_cast<size_t>(width) * dtype_bytes(cached.dtype);
}

// Pairs of x [turned] by angles whose cosines and sines are given.
void turn_pairs(float* x, const float* cos, const float* sin, int turned) {
  for (int i = 0; i < turned / 2; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

void turn_end(const Step& step, int row, int n, bool back, float* q) {
  const int rotary = step.rotary, half = rotary / 2;
  if (step.cos == nullptr || half == 0) return;
  if (rotary > n) throw std::invalid_argument("attention: more values are turned than a head has");
  const gemm::StepOps& ops = gemm::step_ops();
  const runtime::Scratch tables(static_cast<size_t>(rotary));
  float *cos = tables, *sin = tables + half;
  const DType dtype = step.has_wide_rotation ? DType::f32 : step.dtype;
  ops.widen(step.rotation(step.cos, row), half, dtype, cos);
  ops.widen(step.rotation(step.sin, row), half, dtype, sin);
  for (int i = 0; back && i < half; ++i) sin[i] = -sin[i];
  turn_pairs(q + n - rotary, cos, sin, rotary);
  ops.round(q + n - rotary, rotary, step.dtype);
}

Compressor::Compressor(CompressorConfig config) : config_(config) {
  if (config_.rate < 1 || size() < 2 || config_.turned < 0 || config_.turned % 2 != 0 || config_.turned > size())
    throw std::invalid_argument("compressor: a window of at least one token, and keys whose pairs of values turn");
  if (config_.kv.out != width() || config_.gate.out != width())
    throw std::invalid_argument("compressor: expected " + std::to_string(width()) + " outputs of its projections");
}

const std::byte* Compressor::keys_of(std::span<const Cached> parts, int row) {
  return at(parts[2], row, 0, parts[2].shape[2]);
}

void Compressor::check(const Step& step, std::span<const Cached> parts) const {
  if (step.consecutive) throw std::invalid_argument("compressor: steps of several tokens of one text are not served");
  const int window = step.position / config_.rate;
  auto is = [&](const Cached& one, int places, int n, DType dtype) {
    return one.dtype == dtype && one.shape.size() == 3 && one.shape[0] == step.batch && one.shape[1] >= places &&
           one.shape[2] == n;
  };
  const bool is_whole =
      parts.size() == static_cast<size_t>(this->parts()) && is(parts[0], config_.rate, width(), step.dtype) &&
      is(parts[1], config_.rate, width(), step.dtype) && is(parts[2], window + 1, size(), step.dtype) &&
      parts[0].shape[1] == config_.rate && parts[1].shape[1] == config_.rate;
  if (!is_whole || (config_.overlaps && (!is(parts[3], config_.rate, size(), step.dtype) ||
                                         !is(parts[4], config_.rate, size(), DType::f32))))
    throw std::invalid_argument("cache: what a compressor keeps must be of " + std::to_string(step.batch) +
                                " rows, windows of " + std::to_string(config_.rate) + " tokens and at least " +
                                std::to_string(window + 1) + " keys of " + std::to_string(size()) + " values");
}

void Compressor::forward(const float* x, const Step& step, std::span<const Cached> parts) const {
  check(step, parts);
  const gemm::StepOps& ops = gemm::step_ops();
  const int batch = step.batch, width = this->width(), slot = step.position % config_.rate;
  const runtime::Scratch memory(product(2 * batch, width));
  float *kv = memory, *gate = memory + product(batch, width);
  Products products;
  products.add(config_.kv, kv);
  products.add(config_.gate, gate);
  products.forward(x, batch, step.dtype);
  const bool is_complete = slot == config_.rate - 1;
  for (int row = 0; row < batch; ++row) {
    ops.store(kv + product(row, width), width, step.dtype, at(parts[0], row, slot, width));
    ops.store(gate + product(row, width), width, step.dtype, at(parts[1], row, slot, width));
    if (is_complete || step.makes_all) make_key(step, row, parts);
    if (is_complete && config_.overlaps) leave_overlap(row, parts);
  }
}

void Compressor::make_key(const Step& step, int row, std::span<const Cached> parts) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int rate = config_.rate, d = size(), width = this->width(), window = step.position / rate;
  const int before = config_.overlaps ? rate : 0, slots = before + rate, first_value = width - d;
  const runtime::Scratch memory(static_cast<size_t>(d + config_.turned));
  float *key = memory, *cos = memory + d, *sin = cos + config_.turned / 2;
  {
    const runtime::Session session;
    const int tasks = (d + kValuesOfTask - 1) / kValuesOfTask;
    each(*session, product(slots, d) < kSerialProducts / 4, tasks, [&](int index, int) {
      const int first = index * kValuesOfTask, count = std::min(kValuesOfTask, d - first);
      const runtime::Scratch own(product(2 * slots, kValuesOfTask) + product(2, slots));
      float *values = own, *logits = own + product(slots, kValuesOfTask);
      float* weights = logits + product(slots, kValuesOfTask);
      auto from = [&](const Cached& part, int slot, int columns, int value, float* to) {
        ops.widen(at(part, row, slot, columns) + product(value, 1) * dtype_bytes(part.dtype), count, part.dtype, to);
      };
      for (int s = 0; s < slots; ++s) {
        float *value = values + s * kValuesOfTask, *logit = logits + s * kValuesOfTask;
        if (s < before) {
          from(parts[3], s, d, first, value);
          from(parts[4], s, d, first, logit);
          continue;
        }
        from(parts[0], s - before, width, first_value + first, value);
        from(parts[1], s - before, width, first_value + first, logit);
        const float* bias = config_.bias + product(s - before, width) + first_value + first;
        for (int i = 0; i < count; ++i) logit[i] += bias[i];
        if (config_.rounds_sum) ops.round(logit, count, step.dtype);
      }
      for (int i = 0; i < count; ++i) {
        for (int s = 0; s < slots; ++s) weights[s] = logits[s * kValuesOfTask + i];
        ops.softmax(weights, slots);
        ops.round(weights, slots, step.dtype);
        for (int s = 0; s < slots; ++s) weights[s] *= values[s * kValuesOfTask + i];
        ops.round(weights, slots, step.dtype);
        key[first + i] = std::accumulate(weights, weights + slots, 0.0f);
      }
    });
  }
  ops.round(key, d, step.dtype);
  ops.rms_norm(key, config_.norm, step.dtype, key);
  const auto position = static_cast<float>(window * rate);
  for (int i = 0; i < config_.turned / 2; ++i) {
    cos[i] = std::cos(position * config_.angles[i]) * config_.scale;
    sin[i] = std::sin(position * config_.angles[i]) * config_.scale;
  }
  ops.round(cos, config_.turned, step.dtype);
  turn_pairs(key + d - config_.turned, cos, sin, config_.turned);
  ops.store(key, d, step.dtype, at(parts[2], row, window, d));
}

void Compressor::leave_overlap(int row, std::span<const Cached> parts) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int d = size(), width = this->width();
  for (int slot = 0; slot < config_.rate; ++slot) {
    const std::byte* kv = at(parts[0], row, slot, width);
    std::copy_n(kv, static_cast<size_t>(d) * dtype_bytes(parts[0].dtype), at(parts[3], row, slot, d));
    auto* gate = reinterpret_cast<float*>(at(parts[4], row, slot, d));
    ops.widen(at(parts[1], row, slot, width), d, parts[1].dtype, gate);
    for (int i = 0; i < d; ++i) gate[i] += config_.bias[product(slot, width) + static_cast<size_t>(i)];
    if (config_.rounds_sum) ops.round(gate, d, parts[1].dtype);
  }
}

CompressedIndex::CompressedIndex(CompressedIndexConfig config) : config_(config) {
  if (config_.keys == nullptr || config_.heads < 1 || config_.top_k < 1)
    throw std::invalid_argument("index: it needs keys, and heads and top_k that are positive");
  if (config_.q.out != config_.heads * keys().size() || config_.weights.out != config_.heads)
    throw std::invalid_argument("index: queries and weights do not fit its heads of " + std::to_string(keys().size()) +
                                " values");
}

void CompressedIndex::forward(const float* x, const float* low, const Step& step, std::span<const Cached> parts,
                              std::vector<std::vector<int>>& chosen) const {
  const int heads = config_.heads, size = keys().size(), batch = step.batch;
  const int most = step.most_chosen > 0 ? std::min(step.most_chosen, config_.top_k) : config_.top_k;
  keys().forward(x, step, parts);
  chosen.resize(static_cast<size_t>(batch));
  const int windows = (step.position + 1) / keys().rate();  // that are complete, or more than a row's own
  runtime::Arrays arrays;
  const size_t q_at = arrays.take(product(batch, heads, size)), weights_at = arrays.take(product(batch, heads)),
               scores_at = arrays.take(static_cast<size_t>(windows));
  const runtime::Scratch memory(arrays.count());
  float *q = memory + q_at, *weights = memory + weights_at, *scores = memory + scores_at;
  if (windows > most) {
    config_.q.forward(low, batch, step.dtype, q);
    config_.weights.forward(x, batch, step.dtype, weights);
    for (int i = 0; i < batch * heads; ++i) weights[i] *= config_.weight_scale;
  }
  static thread_local std::vector<std::pair<float, int>> order;
  for (int row = 0; row < batch; ++row) {
    std::vector<int>& places = chosen[static_cast<size_t>(row)];
    const int seen = (step.own_position(row) + 1) / keys().rate();
    places.resize(static_cast<size_t>(seen));
    std::iota(places.begin(), places.end(), 0);
    if (seen <= most) continue;
    float* query = q + product(row, heads, size);
    for (int h = 0; h < heads; ++h) turn_end(step, row, size, false, query + product(h, size));
    score(query, weights + product(row, heads), step, Compressor::keys_of(parts, row), seen, scores);
    // With those that are complete in the cache, as transformers has them: so of scores that tie, the same are taken.
    order.resize(static_cast<size_t>(windows));
    for (int i = 0; i < windows; ++i) order[static_cast<size_t>(i)] = {i < seen ? scores[i] : kLowest, i};
    take_top(order, most, false);
    places.resize(static_cast<size_t>(most));
    for (int i = 0; i < most; ++i) places[static_cast<size_t>(i)] = order[static_cast<size_t>(i)].second;
    std::sort(places.begin(), places.end());
  }
  runtime::give_back(order);
}

void CompressedIndex::score(const float* query, const float* weights, const Step& step, const std::byte* keys,
                            int windows, float* scores) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, size = this->keys().size();
  const runtime::Session session;
  const int tasks = (windows + kWindowsOfTask - 1) / kWindowsOfTask;
  each(*session, product(heads, size, windows) < kSerialProducts, tasks, [&](int index, int) {
    const runtime::Scratch memory(static_cast<size_t>(size + heads));
    float *key = memory, *products = memory + size;
    const int last = std::min(windows, (index + 1) * kWindowsOfTask);
    for (int window = index * kWindowsOfTask; window < last; ++window) {
      ops.widen(keys + product(window, size) * step.width(), size, step.dtype, key);
      ops.rows_times(query, key, heads, size, DType::f32, products);
      for (int h = 0; h < heads; ++h) products[h] = std::max(products[h], 0.0f) * config_.score_scale;
      ops.rows_times(weights, products, 1, heads, DType::f32, scores + window);
    }
  });
}

}  // namespace ktinject::attention
