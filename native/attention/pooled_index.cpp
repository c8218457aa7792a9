#include "attention/pooled_index.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/tasks.hpp"
#include "attention/top.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

constexpr int kPoolsOfTask = 8;
constexpr float kLowest = std::numeric_limits<float>::lowest();  // what transformers gives those that are not complete

}  // namespace

PooledIndex::PooledIndex(PooledIndexConfig config) : config_(config) {
  if (config_.heads < 1 || config_.size < 1 || config_.pool < 1 || config_.top_k < config_.pool ||
      config_.top_k % config_.pool != 0)
    throw std::invalid_argument("index of pools: heads, size and pool must be positive, top_k a multiple of pool");
  if (config_.q.out != config_.heads * config_.size || config_.k.out != config_.size ||
      config_.gate.out != config_.size || config_.weights.out != config_.heads || config_.gate.in != config_.k.in ||
      config_.weights.in != config_.k.in)
    throw std::invalid_argument("index of pools: queries, key, gate and weights do not fit its heads of " +
                                std::to_string(config_.size) + " values");
}

bool PooledIndex::fits(int hidden, int low) const { return config_.k.in == hidden && config_.q.in == low; }

void PooledIndex::forward(const float* x, const float* low, const Step& step, const LayerCache& cache) const {
  const Cached& index = cache.third;
  const int heads = config_.heads, size = config_.size, batch = step.batch, capacity = cache.first.shape[2];
  if (index.dtype != step.dtype || index.shape != std::vector<int>{step.together(), 1, capacity, width()})
    throw std::invalid_argument("cache: an index of pools must be [" + std::to_string(step.together()) + ", 1, " +
                                std::to_string(capacity) + ", " + std::to_string(width()) + "] of the model's dtype");
  if (config_.norm_dtype != step.dtype)
    throw std::invalid_argument("index of pools: its norm must be of the model's dtype");
  const int places =
      step.most_chosen > 0 ? std::min(std::max(step.most_chosen, config_.pool), config_.top_k) : config_.top_k;
  const int most = places / config_.pool;
  Choice& choice = *cache.choice;
  choice.position = -1;  // what an error leaves is none
  choice.places.assign(static_cast<size_t>(batch), {});
  choice.is_all.assign(static_cast<size_t>(batch), true);
  write(x, step, index);
  std::vector<Text> texts;
  size_t pools = 0;
  for (int row = 0; row < batch; ++row) {
    texts.push_back(text_of(step, row, index));
    pools = std::max(pools, texts.back().complete.size());
    choice.is_all[static_cast<size_t>(row)] = sees_all(texts.back(), step.mask_of(row), most);
  }
  if (std::find(choice.is_all.begin(), choice.is_all.end(), false) != choice.is_all.end()) {
    runtime::Arrays arrays;
    const size_t q_at = arrays.take(product(batch, heads, size)), weights_at = arrays.take(product(batch, heads)),
                 scores_at = arrays.take(pools + 1);
    const runtime::Scratch memory(arrays.count());
    float *q = memory + q_at, *weights = memory + weights_at, *scores = memory + scores_at;
    config_.q.forward(low, batch, step.dtype, q);
    config_.weights.forward(x, batch, step.dtype, weights);
    for (int i = 0; i < batch * heads; ++i) weights[i] *= config_.weight_scale;
    std::vector<std::pair<float, int>> order;
    for (int row = 0; row < batch; ++row) {
      const Text& text = texts[static_cast<size_t>(row)];
      if (choice.is_all[static_cast<size_t>(row)]) {
        choice.places[static_cast<size_t>(row)] = places_of(text, {}, 0, true);
        continue;
      }
      const std::byte* held = static_cast<const std::byte*>(index.data) +
                              product(step.cache_row(row), capacity, width()) * dtype_bytes(index.dtype);
      score(q + product(row, heads, size), weights + product(row, heads), text, held, index.dtype, scores);
      // With those that are complete in any row of the batch, as transformers has them: so of scores that tie, the same
      // are taken.
      order.clear();
      for (size_t pool = 0; pool < pools; ++pool) {
        auto is_complete = [pool](const Text& one) { return pool < one.complete.size() && one.complete[pool]; };
        const bool is_there =
            step.consecutive ? is_complete(text) : std::any_of(texts.begin(), texts.end(), is_complete);
        if (is_there) order.emplace_back(is_complete(text) ? scores[pool] : kLowest, static_cast<int>(pool));
      }
      const int chosen = std::min(most, static_cast<int>(order.size()));
      if (chosen > 0) take_top(order, chosen, false);
      choice.places[static_cast<size_t>(row)] = places_of(text, order, chosen, false);
      if (choice.places[static_cast<size_t>(row)].empty())
        throw std::invalid_argument("index of pools: a token that attends to none: its row has padding between tokens");
    }
    // Rows that are computed beside each other go by their choice, or none does.
    if (!step.consecutive) choice.is_all.assign(static_cast<size_t>(batch), false);
  }
  choice.position = step.position;
}

void PooledIndex::write(const float* x, const Step& step, const Cached& index) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.size, batch = step.batch;
  const auto count = static_cast<size_t>(size);
  runtime::Arrays arrays;
  const size_t k_at = arrays.take(product(batch, size)), gate_at = arrays.take(product(batch, size)),
               weight_at = arrays.take(count), bias_at = arrays.take(count);
  const runtime::Scratch memory(arrays.count());
  float *k = memory + k_at, *gate = memory + gate_at, *weight = memory + weight_at, *bias = memory + bias_at;
  ops.widen(config_.norm_weight, size, step.dtype, weight);
  ops.widen(config_.norm_bias, size, step.dtype, bias);
  config_.k.forward(x, batch, step.dtype, k);
  config_.gate.forward(x, batch, step.dtype, gate);
  const float one = 1;
  for (int row = 0; row < batch; ++row) {
    float* key = k + product(row, size);
    layer_norm(key, size, config_.epsilon, weight, bias);
    const size_t place = product(step.cache_row(row), index.shape[2]) + static_cast<size_t>(step.position_of(row));
    std::byte* to = static_cast<std::byte*>(index.data) + place * static_cast<size_t>(width()) * step.width();
    ops.store(key, size, step.dtype, to);
    ops.store(gate + product(row, size), size, step.dtype, to + count * step.width());
    ops.store(&one, 1, step.dtype, to + 2 * count * step.width());
  }
}

PooledIndex::Text PooledIndex::text_of(const Step& step, int row, const Cached& index) const {
  const int seen = step.position_of(row) + 1, pool = config_.pool;
  const size_t width = dtype_bytes(index.dtype), stride = static_cast<size_t>(this->width()) * width;
  const std::byte* is_token = static_cast<const std::byte*>(index.data) +
                              product(step.cache_row(row), index.shape[2]) * stride + stride - width;
  Text text;
  text.there.resize(static_cast<size_t>(seen));
  text.first = seen;
  for (int place = 0; place < seen; ++place) {
    uint32_t bits = 0;  // of 1, or of 0
    std::memcpy(&bits, is_token + static_cast<size_t>(place) * stride, width);
    if (bits == 0) continue;
    text.there[static_cast<size_t>(place)] = true;
    text.first = std::min(text.first, place);
    ++text.tokens;
  }
  const auto begin = text.there.begin() + text.first;
  for (int end = pool; text.first + end <= seen; end += pool)
    text.complete.push_back(std::find(begin + end - pool, begin + end, false) == begin + end);
  return text;
}

bool PooledIndex::sees_all(const Text& text, const uint8_t* mask, int most) const {
  const auto seen = static_cast<int>(text.there.size());
  if (static_cast<int>(text.complete.size()) > most || text.tokens != seen - text.first) return false;
  for (int place = 0; mask != nullptr && place < seen; ++place)
    if ((mask[place] != 0) != text.there[static_cast<size_t>(place)]) return false;
  return mask != nullptr || text.first == 0;
}

void PooledIndex::score(const float* query, const float* weights, const Text& text, const std::byte* held, DType dtype,
                        float* scores) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, size = config_.size, pool = config_.pool;
  const auto pools = static_cast<int>(text.complete.size());
  const int tasks = (pools + kPoolsOfTask - 1) / kPoolsOfTask;
  const runtime::Session session;
  each(*session, product(heads + 8 * pool, size, pools) < kSerialProducts, tasks, [&](int index, int) {
    const runtime::Scratch memory(static_cast<size_t>(size + heads));
    float *key = memory, *products = memory + size;
    for (int at = index * kPoolsOfTask; at < std::min(pools, (index + 1) * kPoolsOfTask); ++at) {
      scores[at] = kLowest;
      if (!text.complete[static_cast<size_t>(at)]) continue;
      make_key(held + product(text.first + at * pool, width()) * dtype_bytes(dtype), dtype, key);
      ops.rows_times(query, key, heads, size, DType::f32, products);
      for (int h = 0; h < heads; ++h) products[h] = std::max(products[h] * config_.score_scale, 0.0f);
      ops.rows_times(weights, products, 1, heads, DType::f32, scores + at);
    }
  });
}

void PooledIndex::make_key(const std::byte* begin, DType dtype, float* key) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.size, pool = config_.pool, all = pool * size;
  runtime::Arrays arrays;
  const size_t token_at = arrays.take(product(2, size)), keys_at = arrays.take(product(pool, size)),
               weights_at = arrays.take(product(pool, size)), most_at = arrays.take(static_cast<size_t>(size)),
               sums_at = arrays.take(static_cast<size_t>(size));
  const runtime::Scratch memory(arrays.count());
  float *one = memory + token_at, *keys = memory + keys_at, *weights = memory + weights_at;
  float *most = memory + most_at, *sums = memory + sums_at;
  std::fill_n(most, size, std::numeric_limits<float>::lowest());
  for (int token = 0; token < pool; ++token) {
    ops.widen(begin + product(token, width()) * dtype_bytes(dtype), 2 * size, dtype, one);
    std::copy_n(one, size, keys + token * size);
    float* gate = weights + token * size;
    const float* bias = config_.bias + product(token, size);
    for (int i = 0; i < size; ++i) {
      gate[i] = one[size + i] + bias[i];
      most[i] = std::max(most[i], gate[i]);
    }
  }
  // A softmax of each value over the tokens: one over all, of which each value's greatest is 0, then divided by its own
  // sum.
  auto of_each = [&](auto&& work) {
    for (int token = 0; token < pool; ++token)
      for (int i = 0; i < size; ++i) work(weights[token * size + i], i);
  };
  of_each([&](float& weight, int i) { weight -= most[i]; });
  ops.softmax(weights, all);
  std::fill_n(sums, size, 0.0f);
  of_each([&](const float& weight, int i) { sums[i] += weight; });
  of_each([&](float& weight, int i) { weight /= sums[i]; });
  ops.round(weights, all, dtype);
  for (int i = 0; i < all; ++i) weights[i] *= keys[i];
  ops.round(weights, all, dtype);
  std::fill_n(key, size, 0.0f);
  of_each([&](const float& value, int i) { key[i] += value; });
  ops.round(key, size, dtype);
}

std::vector<int> PooledIndex::places_of(const Text& text, const std::vector<std::pair<float, int>>& order, int chosen,
                                        bool is_all) const {
  const auto seen = static_cast<int>(text.there.size());
  std::vector<int> places;
  auto take = [&](int begin, int count) {
    for (int place = begin; place < std::min(begin + count, seen); ++place)
      if (text.there[static_cast<size_t>(place)]) places.push_back(place);
  };
  for (int i = 0; i < chosen; ++i) {
    const int pool = order[static_cast<size_t>(i)].second;
    const bool is_own = static_cast<size_t>(pool) < text.complete.size() && text.complete[static_cast<size_t>(pool)];
    if (is_own) take(text.first + pool * config_.pool, config_.pool);
  }
  const int rest = is_all ? text.tokens : text.tokens % config_.pool;
  take(text.first + text.tokens - rest, rest);
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  return places;
}

}  // namespace ktinject::attention
