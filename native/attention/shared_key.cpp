#include "attention/shared_key.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "attention/attend_all.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"

namespace ktinject::attention {
namespace {

constexpr int kRowsOfTask = 16;  // of the weight of groups
constexpr int kHeadsOfTask = 8;
constexpr size_t kSerialValues = 16'384;  // of heads that are turned: more are worth waking workers

void expect(const gemm::Linear* linear, int in, int out, const char* name) {
  if (linear == nullptr || (in > 0 && linear->config().in_features != in) || linear->config().out_features != out)
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(out) + " outputs" +
                                (in > 0 ? " of " + std::to_string(in) + " values" : ""));
}

}  // namespace

SharedKeyAttention::SharedKeyAttention(SharedKeyConfig config) : config_(config) {
  if (config_.heads < 1 || config_.size < 1 || config_.window < 1 || config_.groups < 1 ||
      config_.heads % config_.groups != 0)
    throw std::invalid_argument("attention: heads must be a multiple of groups, and the window positive");
  expect(config_.q_a, 0, config_.q_norm.size, "q_a_proj");
  expect(config_.q_b, config_.q_norm.size, config_.heads * config_.size, "q_b_proj");
  expect(config_.kv, config_.q_a->config().in_features, config_.size, "kv_proj");
  if (config_.kv_norm.size != config_.size) throw std::invalid_argument("attention: the norm of keys has another size");
  if (config_.o == nullptr || config_.grouped == nullptr || config_.o->config().in_features % config_.groups != 0)
    throw std::invalid_argument("attention: groups of heads need a weight, and what follows inputs of each");
  if (config_.compressor != nullptr && config_.compressor->size() != config_.size)
    throw std::invalid_argument("attention: compressed keys must have " + std::to_string(config_.size) + " values");
  if (config_.index != nullptr &&
      (config_.compressor == nullptr || config_.index->keys().rate() != config_.compressor->rate()))
    throw std::invalid_argument("attention: an index chooses compressed keys of its own windows");
}

bool SharedKeyAttention::fits(int hidden) const {
  return config_.q_a->config().in_features == hidden && config_.o->config().out_features == hidden &&
         (config_.compressor == nullptr || config_.compressor->fits(hidden)) &&
         (config_.index == nullptr || config_.index->fits(hidden, config_.q_norm.size));
}

std::span<const Cached> SharedKeyAttention::parts_of(const LayerCache& cache, bool of_index) const {
  const auto own = static_cast<size_t>(config_.compressor->parts());
  const auto others = static_cast<size_t>(config_.index == nullptr ? 0 : config_.index->keys().parts());
  if (cache.parts.size() != own + others)
    throw std::invalid_argument("cache: found " + std::to_string(cache.parts.size()) +
                                " tensors of compressed keys; expected " + std::to_string(own + others));
  const std::span all(cache.parts);
  return of_index ? all.subspan(own) : all.first(own);
}

void SharedKeyAttention::check_cache(const Step& step, const LayerCache& cache) const {
  const std::vector<int>& shape = cache.first.shape;
  if (step.consecutive) throw std::invalid_argument("attention: steps of several tokens of one text are not served");
  if (cache.first.dtype != step.dtype || shape.size() != 4 || shape[0] != step.batch || shape[1] != 1 ||
      shape[2] > config_.window || shape[3] != config_.size ||
      (step.position >= shape[2] && shape[2] != config_.window) || cache.second.shape != shape ||
      cache.second.dtype != step.dtype)
    throw std::invalid_argument("cache: keys must be [" + std::to_string(step.batch) + ", 1, places up to " +
                                std::to_string(config_.window) + ", " + std::to_string(config_.size) +
                                "] of the model's dtype");
}

void SharedKeyAttention::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  check_cache(step, cache);
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, size = config_.size, batch = step.batch, rank = config_.q_norm.size;
  runtime::Arrays arrays;
  const size_t low_at = arrays.take(product(batch, rank)), q_at = arrays.take(product(batch, heads, size)),
               key_at = arrays.take(product(batch, size)), sum_at = arrays.take(product(batch, heads, size));
  const runtime::Scratch memory(arrays.count());
  float *low = memory + low_at, *q = memory + q_at, *key = memory + key_at, *sum = memory + sum_at;
  const gemm::Linear::Product products[] = {{config_.q_a, low}, {config_.kv, key}};
  gemm::Linear::forward(products, x, DType::f32, batch);
  ops.round(low, batch * rank, step.dtype);
  ops.round(key, batch * size, step.dtype);
  for (int row = 0; row < batch; ++row)
    ops.rms_norm(low + product(row, rank), config_.q_norm, step.dtype, low + product(row, rank));
  config_.q_b->forward(low, DType::f32, batch, q);
  ops.round(q, batch * heads * size, step.dtype);
  each_head(step, [&](int row, int head) { prepare_query(step, row, q + product(row * heads + head, size)); });
  for (int row = 0; row < batch; ++row) write_key(step, row, key + product(row, size), cache);
  static thread_local std::vector<std::vector<int>> chosen;
  compress(x, low, step, cache, chosen);
  attend(q, step, cache, chosen, sum);
  each_head(step, [&](int row, int head) { turn_end(step, row, size, true, sum + product(row * heads + head, size)); });
  lead_out(sum, step, out);
}

template <class Task>
void SharedKeyAttention::each_head(const Step& step, Task&& task) const {
  const int heads = config_.heads, blocks = (heads + kHeadsOfTask - 1) / kHeadsOfTask;
  const runtime::Session session;
  each(*session, product(step.batch, heads, config_.size) < kSerialValues, step.batch * blocks, [&](int index, int) {
    const int first = index % blocks * kHeadsOfTask;
    for (int head = first; head < std::min(heads, first + kHeadsOfTask); ++head) task(index / blocks, head);
  });
}

void SharedKeyAttention::prepare_query(const Step& step, int row, float* query) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.size;
  float squares = 0;
  ops.rows_times(query, query, 1, size, DType::f32, &squares);
  float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + config_.query_epsilon);
  ops.round(&factor, 1, step.dtype);
  for (int i = 0; i < size; ++i) query[i] *= factor;
  ops.round(query, size, step.dtype);
  turn_end(step, row, size, false, query);
}

void SharedKeyAttention::write_key(const Step& step, int row, float* key, const LayerCache& cache) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.size;
  ops.rms_norm(key, config_.kv_norm, step.dtype, key);
  turn_end(step, row, size, false, key);
  // A cache may hold keys once more, as values.
  const size_t place = product(row, cache.first.shape[2]) + static_cast<size_t>(step.position % config_.window);
  for (const Cached* held : {&cache.first, &cache.second})
    ops.store(key, size, step.dtype, static_cast<std::byte*>(held->data) + place * product(size, 1) * step.width());
}

void SharedKeyAttention::compress(const float* x, const float* low, const Step& step, const LayerCache& cache,
                                  std::vector<std::vector<int>>& chosen) const {
  chosen.resize(static_cast<size_t>(step.batch));
  if (config_.compressor == nullptr) {
    for (std::vector<int>& windows : chosen) windows.clear();
    return;
  }
  config_.compressor->forward(x, step, parts_of(cache, false));
  if (config_.index != nullptr) return config_.index->forward(x, low, step, parts_of(cache, true), chosen);
  // A key that is made although its window is not complete is also seen, so that a comparison shows it.
  const int begun = step.position / config_.compressor->rate(),
            complete = (step.position + 1) / config_.compressor->rate();
  for (std::vector<int>& windows : chosen) {
    windows.resize(static_cast<size_t>(step.makes_all ? begun + 1 : complete));
    std::iota(windows.begin(), windows.end(), 0);
  }
}

void SharedKeyAttention::attend(const float* q, const Step& step, const LayerCache& cache,
                                const std::vector<std::vector<int>>& chosen, float* out) const {
  const int heads = config_.heads, size = config_.size, rows = step.batch, capacity = cache.first.shape[2];
  const int near = std::min(step.position + 1, config_.window);
  size_t most = 0;
  for (const std::vector<int>& windows : chosen) most = std::max(most, windows.size());
  const int count = near + static_cast<int>(most);
  // Side by side: the ring, then the chosen keys, with zeros behind the fewer ones of a row with padding.
  const size_t words = step.width() == sizeof(float) ? 1 : 2, bytes = product(size, 1) * step.width();
  runtime::Arrays arrays;
  const size_t keys_at = arrays.take(product(rows, count, size) / words + 1),
               mask_at = arrays.take(product(rows, count) / sizeof(float) + 1);
  const runtime::Scratch memory(arrays.count());
  auto* keys = reinterpret_cast<std::byte*>(memory + keys_at);
  auto* masks = reinterpret_cast<uint8_t*>(memory + mask_at);
  auto gather = [&](int index, int) {
    const int row = index / count, i = index % count;
    const std::vector<int>& windows = chosen[static_cast<size_t>(row)];
    std::byte* to = keys + static_cast<size_t>(index) * bytes;
    const std::byte* from = nullptr;
    if (i < near) {
      // Of a ring that is full, the place i has the latest position that it is of.
      const int position = step.position - (step.position - i) % config_.window;
      const uint8_t* mask = step.mask_of(row);
      masks[index] = mask == nullptr || mask[position] != 0;
      from =
          static_cast<const std::byte*>(cache.first.data) + (product(row, capacity) + static_cast<size_t>(i)) * bytes;
    } else if (static_cast<size_t>(i - near) < windows.size()) {
      masks[index] = 1;
      from = Compressor::keys_of(parts_of(cache, false), row) +
             static_cast<size_t>(windows[static_cast<size_t>(i - near)]) * bytes;
    } else {
      masks[index] = 0;
    }
    if (from == nullptr) std::fill_n(to, bytes, std::byte{0});
    else std::copy_n(from, bytes, to);
  };
  {
    const runtime::Session session;
    each(*session, product(rows, count, size) < kSerialProducts, rows * count, gather);
  }
  const Over over{rows, 1, heads, count, size, size, config_.scale, config_.sinks};
  attend_all(gemm::step_ops(), over, step.dtype, out, [&](int row, int) {
    gemm::Attend task;
    task.q = q + product(row, heads, size);
    task.k1 = task.v = keys + product(row, count) * bytes;
    task.d1 = task.dv = size;
    task.dtype = step.dtype;
    task.mask = masks + product(row, count);
    return task;
  });
}

void SharedKeyAttention::lead_out(const float* sum, const Step& step, float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int groups = config_.groups, inputs = config_.o->config().in_features, rank = inputs / groups;
  const int wide = config_.heads * config_.size / groups, blocks = (rank + kRowsOfTask - 1) / kRowsOfTask;
  const runtime::Scratch low(product(step.batch, inputs));
  {
    const runtime::Session session;
    each(*session, product(step.batch, inputs, wide) < kSerialProducts, step.batch * groups * blocks,
         [&](int index, int) {
           const int pair = index / blocks, group = pair % groups, first = index % blocks * kRowsOfTask;
           const size_t row = product(group, rank) + static_cast<size_t>(first);
           ops.rows_times(static_cast<const std::byte*>(config_.grouped) + row * product(wide, 1) * step.width(),
                          sum + product(pair, wide), std::min(kRowsOfTask, rank - first), wide, step.dtype,
                          low + product(pair, rank) + first);
         });
  }
  config_.o->forward(low, DType::f32, step.batch, out);
  ops.round(out, config_.o->config().out_features * step.batch, step.dtype);
}

}  // namespace ktinject::attention
