#include "attention/indexer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

#include "attention/tasks.hpp"
#include "attention/top.hpp"
#include "attention/turning.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

constexpr int kPlacesOfTask = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

}  // namespace

void layer_norm(float* x, int n, float epsilon, const float* weight, const float* bias) {
  double sum = 0, squares = 0;
  for (int i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / n;
  for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const auto scale = static_cast<float>(1 / std::sqrt(squares / n + epsilon));
  for (int i = 0; i < n; ++i) x[i] = (x[i] - static_cast<float>(mean)) * scale * weight[i] + bias[i];
}

Indexer::Indexer(IndexerConfig config) : config_(config) {
  if (config_.heads < 1 || config_.size < 1 || config_.top_k < 1 || config_.rotary < 0 || config_.rotary % 2 != 0 ||
      config_.rotary > config_.size)
    throw std::invalid_argument("indexer: heads, size and top_k must be positive, rotary even and at most size");
  if (takes_input() && config_.q_norm.size != config_.q.in)
    throw std::invalid_argument("indexer: the norm of its input has another size");
  if (config_.q.out != config_.heads * config_.size || config_.k.out != config_.size ||
      config_.weights.out != config_.heads || config_.weights.in != config_.k.in)
    throw std::invalid_argument("indexer: queries, key and weights do not fit its heads of " +
                                std::to_string(config_.size) + " values");
}

bool Indexer::fits(int hidden, int low) const { return config_.k.in == hidden && config_.q.in == low; }

void Indexer::forward(const float* x, const float* low, const Step& step, const LayerCache& cache) const {
  const Cached& keys = cache.third;
  const int heads = config_.heads, size = config_.size, batch = step.batch, capacity = cache.first.shape[2];
  const DType dtype = step.has_wide_rotation ? DType::f32 : step.dtype;
  if (keys.dtype != dtype || keys.shape != std::vector<int>{step.together(), 1, capacity, size})
    throw std::invalid_argument("cache: the keys of an index must be [" + std::to_string(step.together()) + ", 1, " +
                                std::to_string(capacity) + ", " + std::to_string(size) + "] of the rotation's dtype");
  if (step.rotary != config_.rotary || (config_.norm_dtype != step.dtype && config_.norm_dtype != DType::f32))
    throw std::invalid_argument("indexer: found a rotation of " + std::to_string(step.rotary) +
                                " values or a norm of another dtype; expected " + std::to_string(config_.rotary));
  const gemm::StepOps& ops = gemm::step_ops();
  Choice& choice = *cache.choice;
  const int most = step.most_chosen > 0 ? std::min(step.most_chosen, config_.top_k) : config_.top_k;
  choice.position = -1;  // what an error leaves is none
  choice.places.resize(static_cast<size_t>(batch));
  choice.is_all.assign(static_cast<size_t>(batch), true);
  write(x, step, keys);
  if (step.position_of(batch - 1) >= most) {
    runtime::Arrays arrays;
    const size_t q_at = arrays.take(product(batch, heads, size)), weights_at = arrays.take(product(batch, heads)),
                 query_at = arrays.take(product(heads, size)), scores_at = arrays.take(static_cast<size_t>(capacity)),
                 normed_at = arrays.take(takes_input() ? product(batch, config_.q.in) : 0);
    const runtime::Scratch memory(arrays.count());
    float *q = memory + q_at, *weights = memory + weights_at, *query = memory + query_at, *scores = memory + scores_at;
    if (takes_input()) {
      for (int row = 0; row < batch; ++row) {
        const size_t at = product(row, config_.q.in);
        ops.rms_norm(x + at, config_.q_norm, step.dtype, memory + normed_at + at);
      }
      low = memory + normed_at;
    }
    config_.q.forward(low, batch, step.dtype, q);
    config_.weights.forward(x, batch, step.dtype, weights);
    static thread_local std::vector<std::pair<float, int>> order;
    for (int row = 0; row < batch; ++row) {
      if (step.position_of(row) < most) continue;
      for (int h = 0; h < heads; ++h) {
        float* one = q + product(row * heads + h, size);
        if (config_.growth)
          tune(config_.growth, h, static_cast<float>(step.own_position(row)), step.dtype,
               {one, static_cast<size_t>(size)});
        rotate(one, step, row, query + product(h, size));
      }
      score(query, weights + product(row, heads), step, row, keys, scores);
      order.resize(static_cast<size_t>(capacity));
      for (int place = 0; place < capacity; ++place) order[static_cast<size_t>(place)] = {scores[place], place};
      take_top(order, most, false);
      std::vector<int>& places = choice.places[static_cast<size_t>(row)];
      places.clear();
      // Of a row with padding, some may be chosen that are masked.
      for (int i = 0; i < most; ++i)
        if (order[static_cast<size_t>(i)].first != kLowest) places.push_back(order[static_cast<size_t>(i)].second);
      std::sort(places.begin(), places.end());
      choice.is_all[static_cast<size_t>(row)] = false;
    }
    runtime::give_back(order);
  }
  choice.position = step.position;
}

void Indexer::write(const float* x, const Step& step, const Cached& keys) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.size, batch = step.batch;
  const auto count = static_cast<size_t>(size);
  runtime::Arrays arrays;
  const size_t k_at = arrays.take(product(batch, size)), weight_at = arrays.take(count), bias_at = arrays.take(count),
               turned_at = arrays.take(count);
  const runtime::Scratch memory(arrays.count());
  float *k = memory + k_at, *weight = memory + weight_at, *bias = memory + bias_at, *turned = memory + turned_at;
  ops.widen(config_.norm_weight, size, config_.norm_dtype, weight);
  ops.widen(config_.norm_bias, size, config_.norm_dtype, bias);
  config_.k.forward(x, batch, step.dtype, k);
  for (int row = 0; row < batch; ++row) {
    float* key = k + product(row, size);
    layer_norm(key, size, config_.epsilon, weight, bias);
    ops.round(key, size, step.dtype);
    rotate(key, step, row, turned);
    const size_t slot = product(step.cache_row(row), keys.shape[2]) + static_cast<size_t>(step.position_of(row));
    ops.store(turned, size, keys.dtype, static_cast<std::byte*>(keys.data) + slot * count * dtype_bytes(keys.dtype));
  }
}

void Indexer::rotate(const float* from, const Step& step, int row, float* to) const {
  const int before = config_.at_end ? config_.size - config_.rotary : 0;
  std::copy(from, from + before, to);
  turn(gemm::step_ops(), from + before, config_.size - before, step, row, config_.neighbours, to + before);
}

void Indexer::score(const float* query, const float* weights, const Step& step, int row, const Cached& keys,
                    float* scores) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, size = config_.size, seen = step.position_of(row) + 1, capacity = keys.shape[2];
  const uint8_t* mask = step.mask_of(row);
  const std::byte* held =
      static_cast<const std::byte*>(keys.data) + product(step.cache_row(row), capacity, size) * dtype_bytes(keys.dtype);
  std::fill(scores + seen, scores + capacity, kLowest);
  const runtime::Session session;
  const int tasks = (seen + kPlacesOfTask - 1) / kPlacesOfTask;
  each(*session, product(heads, size, seen) < kSerialProducts, tasks, [&](int index, int) {
    const runtime::Scratch memory(static_cast<size_t>(size + heads));
    float *key = memory, *products = memory + size;
    const int last = std::min(seen, (index + 1) * kPlacesOfTask);
    for (int place = index * kPlacesOfTask; place < last; ++place) {
      scores[place] = kLowest;
      if (mask != nullptr && mask[place] == 0) continue;
      ops.widen(held + product(place, size) * dtype_bytes(keys.dtype), size, keys.dtype, key);
      ops.rows_times(query, key, heads, size, DType::f32, products);
      for (int h = 0; h < heads; ++h) products[h] = std::max(products[h], 0.0f);
      ops.rows_times(weights, products, 1, heads, DType::f32, scores + place);
    }
  });
}

}  // namespace ktinject::attention
