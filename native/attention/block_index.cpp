#include "attention/block_index.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/tasks.hpp"
#include "attention/top.hpp"
#include "attention/turning.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

}  // namespace

BlockIndex::BlockIndex(BlockIndexConfig config) : config_(config) {
  if (config_.heads < 1 || config_.size < 1 || config_.block < 1 || config_.top_k < 1 || config_.local < 0 ||
      config_.local > config_.top_k)
    throw std::invalid_argument("index of blocks: heads, size, block and top_k must be positive, local 0 to top_k");
  if (config_.q.out != config_.heads * config_.size || config_.k.out != config_.size || config_.k.in != config_.q.in ||
      config_.q_norm.size != config_.size || config_.k_norm.size != config_.size)
    throw std::invalid_argument("index of blocks: queries, key and norms do not fit its heads of " +
                                std::to_string(config_.size) + " values");
}

int BlockIndex::forward(const float* x, const Step& step, const LayerCache& cache) const {
  const Cached& keys = cache.third;
  const int heads = config_.heads, size = config_.size, batch = step.batch, capacity = cache.first.shape[2];
  if (keys.dtype != step.dtype || keys.shape != std::vector<int>{step.together(), 1, capacity, size})
    throw std::invalid_argument("cache: the keys of an index must be [" + std::to_string(step.together()) + ", 1, " +
                                std::to_string(capacity) + ", " + std::to_string(size) + "] of the model's dtype");
  if (step.rotary > size)
    throw std::invalid_argument("index of blocks: found a rotation of " + std::to_string(step.rotary) +
                                " values; expected at most " + std::to_string(size));
  const int block = step.most_chosen > 0 ? 1 : config_.block;
  const int most =
      step.most_chosen > 0 ? std::min(std::max(step.most_chosen, config_.local), config_.top_k) : config_.top_k;
  Choice& choice = *cache.choice;
  choice.position = -1;  // what an error leaves is none
  choice.places.resize(product(batch, heads));
  choice.is_all.assign(static_cast<size_t>(batch), true);
  write(x, step, keys);
  for (int row = 0; row < batch; ++row) {
    const int own = step.position_of(row) / block, last = step.own_position(row) / block;
    choice.is_all[static_cast<size_t>(row)] = last < most && last == own;
  }
  if (std::find(choice.is_all.begin(), choice.is_all.end(), false) != choice.is_all.end()) {
    const int blocks = (capacity + block - 1) / block;
    runtime::Arrays arrays;
    const size_t q_at = arrays.take(product(batch, heads, size)), query_at = arrays.take(product(heads, size)),
                 scores_at = arrays.take(product(heads, blocks));
    const runtime::Scratch memory(arrays.count());
    float *q = memory + q_at, *query = memory + query_at, *scores = memory + scores_at;
    config_.q.forward(x, batch, step.dtype, q);
    static thread_local std::vector<std::pair<float, int>> order;
    for (int row = 0; row < batch; ++row) {
      const int last = step.own_position(row), seen = last / block + 1;
      for (int h = 0; h < heads; ++h)
        prepare(q + product(row * heads + h, size), config_.q_norm, step, row, query + product(h, size));
      if (!choice.is_all[static_cast<size_t>(row)]) score(query, step, row, keys, block, last, scores);
      for (int h = 0; h < heads; ++h) {
        std::vector<int>& chosen = choice.places[product(row * heads + h, 1)];
        chosen.clear();
        float* of_head = scores + product(h, seen);
        if (choice.is_all[static_cast<size_t>(row)]) {
          for (int b = 0; b < seen; ++b) chosen.push_back(b);
          continue;
        }
        for (int back = 0; back < config_.local; ++back)
          of_head[std::max(seen - 1 - back, 0)] = std::numeric_limits<float>::infinity();
        order.resize(static_cast<size_t>(seen));
        for (int b = 0; b < seen; ++b) order[static_cast<size_t>(b)] = {of_head[b], b};
        const int taken = std::min(most, seen);
        if (taken < seen) take_top(order, taken, false);
        for (int i = 0; i < taken; ++i) chosen.push_back(order[static_cast<size_t>(i)].second);
        std::sort(chosen.begin(), chosen.end());
      }
    }
  }
  choice.position = step.position;
  return block;
}

void BlockIndex::prepare(float* x, const Norm& norm, const Step& step, int row, float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  ops.rms_norm(x, norm, step.dtype, x);
  if (!step.has_wide_rotation) return turn(ops, x, config_.size, step, row, false, out);
  const runtime::Scratch tables(product(4, step.rotary) + 1);
  turn_in_place(ops, x, config_.size, step, row, false, tables, out);
}

void BlockIndex::write(const float* x, const Step& step, const Cached& keys) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int size = config_.size, batch = step.batch;
  runtime::Arrays arrays;
  const size_t k_at = arrays.take(product(batch, size)), turned_at = arrays.take(static_cast<size_t>(size));
  const runtime::Scratch memory(arrays.count());
  float *k = memory + k_at, *turned = memory + turned_at;
  config_.k.forward(x, batch, step.dtype, k);
  for (int row = 0; row < batch; ++row) {
    prepare(k + product(row, size), config_.k_norm, step, row, turned);
    const size_t slot = product(step.cache_row(row), keys.shape[2]) + static_cast<size_t>(step.position_of(row));
    ops.store(turned, size, step.dtype,
              static_cast<std::byte*>(keys.data) + slot * static_cast<size_t>(size) * step.width());
  }
}

void BlockIndex::score(const float* query, const Step& step, int row, const Cached& keys, int block, int last,
                       float* scores) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, size = config_.size, blocks = last / block + 1;
  const std::byte* held =
      static_cast<const std::byte*>(keys.data) + product(step.cache_row(row), keys.shape[2], size) * step.width();
  const runtime::Session session;
  each(*session, product(heads, size, last + 1) < kSerialProducts, blocks, [&](int index, int) {
    const runtime::Scratch memory(static_cast<size_t>(size + heads));
    float *key = memory, *products = memory + size;
    for (int h = 0; h < heads; ++h) scores[product(h, blocks) + static_cast<size_t>(index)] = kLowest;
    for (int place = index * block; place < std::min(last + 1, (index + 1) * block); ++place) {
      ops.widen(held + product(place, size) * step.width(), size, step.dtype, key);
      ops.rows_times(query, key, heads, size, DType::f32, products);
      for (int h = 0; h < heads; ++h) {
        float& most = scores[product(h, blocks) + static_cast<size_t>(index)];
        most = std::max(most, products[h]);
      }
    }
  });
}

}  // namespace ktinject::attention
