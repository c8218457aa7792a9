// Latent attention of one token a row, with the up-projections absorbed.
#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "attention/around.hpp"
#include "attention/attend_all.hpp"
#include "attention/attention.hpp"
#include "attention/cached.hpp"
#include "attention/indexer.hpp"
#include "attention/ring.hpp"
#include "attention/tasks.hpp"
#include "attention/turning.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

LatentAttention::LatentAttention(LatentAttentionConfig config) : config_(config) {
  const int query = config_.heads * (config_.nope + config_.rope);
  if (config_.q == nullptr) {
    expect(config_.q_b, query, "q_b_proj");
    expect(config_.q_a, config_.q_b->config().in_features, "q_a_proj");
    if (config_.q_norm.size != config_.q_b->config().in_features)
      throw std::invalid_argument("attention: the norm between q_a_proj and q_b_proj has another size");
  } else {
    expect(config_.q, query, "q_proj");
  }
  expect(config_.kv, config_.rank + config_.rope, "kv_a_proj_with_mqa");
  if (config_.kv_norm.size != config_.rank)
    throw std::invalid_argument("attention: the latent's norm has another size");
  if (config_.tuned.every < 0) throw std::invalid_argument("attention: queries tuned by less than one position");
  if (config_.k_norm.weight != nullptr && config_.k_norm.size != config_.rope)
    throw std::invalid_argument("attention: the norm of the rotary key has another size");
  if (config_.gate != nullptr && config_.gate->config().out_features != config_.heads)
    expect(config_.gate, config_.heads * config_.value, "the projection to gates");
  if (config_.window > 0 && config_.chooses) throw std::invalid_argument("attention: chosen places beside a window");
  if (config_.indexer != nullptr && ((config_.q != nullptr) != config_.indexer->takes_input() || !config_.chooses))
    throw std::invalid_argument(
        "attention: an indexer takes a low-rank query, or norms its input where there is none, and attention goes by "
        "its choice");
}

bool LatentAttention::fits(int hidden) const {
  for (const gemm::Linear* linear : {config_.q == nullptr ? config_.q_a : config_.q, config_.kv, config_.gate})
    if (linear != nullptr && linear->config().in_features != hidden) return false;
  const int low = config_.q_a == nullptr ? hidden : config_.q_a->config().out_features;
  if (config_.indexer != nullptr && !config_.indexer->fits(hidden, low)) return false;
  return config_.o->config().in_features == config_.heads * config_.value && config_.o->config().out_features == hidden;
}

void LatentAttention::keep(const LayerCache& cache, int kept) const { restore_ring(cache, config_.window, kept); }

void LatentAttention::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  places_of(cache, step, step.batch - 1, 1, config_.rank, config_.rope, config_.window);
  const int heads = config_.heads, rank = config_.rank, nope = config_.nope, rope = config_.rope, batch = step.batch;
  const int wide = rank + rope;
  const bool has_masks = step.mask != nullptr && config_.window > 0;
  const int gates = config_.gate == nullptr ? 0 : config_.gate->config().out_features;
  if (step.rotary != rope && step.rotary != 0)
    throw std::invalid_argument("attention: found a rotation of " + std::to_string(step.rotary) + " values; expected " +
                                std::to_string(rope));
  const int low = config_.q == nullptr ? config_.q_a->config().out_features : 0;
  runtime::Arrays arrays;
  const size_t low_at = arrays.take(product(2 * batch, low)), q_at = arrays.take(product(batch, heads, nope + rope)),
               kv_at = arrays.take(product(batch, wide)), latent_at = arrays.take(product(1, wide + rope)),
               query_at = arrays.take(product(batch, heads, wide)), sum_at = arrays.take(product(batch, heads, rank)),
               head_at = arrays.take(product(batch, heads, config_.value)),
               gate_at = arrays.take(product(batch, gates)),
               mask_at = arrays.take(has_masks ? product(step.together(), config_.window) / sizeof(float) + 1 : 0);
  const runtime::Scratch memory(arrays.count());
  auto* masks = reinterpret_cast<uint8_t*>(memory + mask_at);
  float *q = memory + q_at, *kv = memory + kv_at, *query = memory + query_at;
  float *sum = memory + sum_at, *head = memory + head_at;

  project(x, step, memory + low_at, q, kv, memory + gate_at);
  if (step.consecutive) remember_ring(step, cache, config_.window);
  if (config_.indexer != nullptr) config_.indexer->forward(x, memory + low_at + product(batch, low), step, cache);
  const Choice* choice = config_.chooses ? cache.choice : nullptr;
  if (choice != nullptr && (choice->position != step.position || choice->is_all.size() != static_cast<size_t>(batch)))
    throw std::invalid_argument("attention: no layer before has chosen places in this step");
  const gemm::StepOps& ops = gemm::step_ops();
  const gemm::Linear::Product to_out{config_.o, out};
  auto close_gates = [&] {
    if (gates != 0) multiply_by_gate(head, heads * config_.value, memory + gate_at, gates, false, step);
  };
  const bool is_one_call = batch == 1 && (choice == nullptr || choice->is_all[0]);
  if (!is_one_call) absorb(q, step, query);
  for (int first = 0; first < batch; first += step.together()) {
    const Places places = places_of(cache, step, first, 1, rank, rope, config_.window);
    const bool wraps = has_masks && step.position_of(first) >= places.count;
    for (int row = first; row < first + step.together(); ++row) {
      write(row, kv, step, places, memory + latent_at, cache);
      if (wraps)
        mask_of_ring(step.mask_of(row), step.position_of(row), places.count, false,
                     masks + product(row - first, places.count));
    }
    if (choice != nullptr && !choice->is_all[static_cast<size_t>(first)]) {
      attend_chosen(query, step, cache, first, sum + product(first, heads, rank));
      continue;
    }
    const Over over{step.together(), 1, heads, places.count, wide, rank, config_.scale, config_.sinks};
    auto of = [&](int index, int) {
      const int row = first + index, held = step.cache_row(row);
      gemm::Attend task;
      task.q = query + product(row * heads, wide);
      task.k1 = task.v = at(cache.first.data, product(held, places.capacity, rank), step);
      task.k2 = at(cache.second.data, product(held, places.capacity, rope), step);
      task.d1 = task.dv = rank;
      task.d2 = rope;
      task.dtype = step.dtype;
      task.mask = wraps ? masks + product(index, places.count) : step.mask_of(row);
      return task;
    };
    if (is_one_call) {
      if (attend_in_one_call(q, query, step, over, of, sum, head, close_gates, to_out)) return;
      absorb(q, step, query);
    }
    attend_all(ops, over, step.dtype, sum + product(first, heads, rank), of);
  }
  expand(sum, step, head);
  close_gates();
  config_.o->forward(head, DType::f32, batch, out);
  ops.round(out, config_.o->config().out_features * batch, step.dtype);
}

template <class Of, class End>
bool LatentAttention::attend_in_one_call(float* q, float* query, const Step& step, const Over& over, Of of, float* sum,
                                         float* head, End&& end, const gemm::Linear::Product& to_out) const {
  const int heads = config_.heads;
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  AttendTasks tasks(workers, gemm::step_ops(), over, step.dtype, sum, of);
  if (tasks.is_small() || !tasks.tasks_merge() || product(heads, config_.nope * config_.rank) < kSerialProducts)
    return false;
  const runtime::Stage absorbing{heads, [] {}, [&](int h, int) { absorb_head(h, q, step, query); },
                                 runtime::kReadsNothing};
  const runtime::Stage expanding{heads, [] {}, [&](int h, int) { expand_head(h, sum, step, head); },
                                 [&](int h) { return values_of(h, step); }};
  return run_in_one_call(workers, {head, to_out, step.dtype, step.following}, end, absorbing, tasks.stage(), expanding);
}

void LatentAttention::attend_chosen(const float* query, const Step& step, const LayerCache& cache, int first,
                                    float* out) const {
  const int heads = config_.heads, rank = config_.rank, rope = config_.rope, wide = rank + rope;
  const int rows = step.together(), capacity = cache.first.shape[2];
  const std::vector<int>* chosen = cache.choice->places.data() + first;
  size_t most = 1;
  for (int row = 0; row < rows; ++row) most = std::max(most, chosen[row].size());
  const int count = static_cast<int>(most);
  // Side by side, with zeros behind the fewer ones of a row with padding.
  const size_t words = step.width() == sizeof(float) ? 1 : 2;
  runtime::Arrays arrays;
  const size_t latent_at = arrays.take(product(rows, count, rank) / words + 1),
               key_at = arrays.take(product(rows, count, rope) / words + 1),
               mask_at = arrays.take(product(rows, count) / sizeof(float) + 1);
  const runtime::Scratch memory(arrays.count());
  auto* latents = reinterpret_cast<std::byte*>(memory + latent_at);
  auto* keys = reinterpret_cast<std::byte*>(memory + key_at);
  auto* masks = reinterpret_cast<uint8_t*>(memory + mask_at);
  auto gather = [&](int index, int) {
    const int row = index / count, i = index % count;
    const bool is_there = static_cast<size_t>(i) < chosen[row].size();
    masks[index] = is_there;
    const int place = is_there ? chosen[row][static_cast<size_t>(i)] : 0;
    const size_t from = product(step.cache_row(first + row), capacity) + static_cast<size_t>(place);
    for (auto [cached, to, size] : {std::tuple{&cache.first, latents, rank}, std::tuple{&cache.second, keys, rope}}) {
      const size_t bytes = static_cast<size_t>(size) * step.width();
      std::byte* here = to + static_cast<size_t>(index) * bytes;
      const auto* there = static_cast<const std::byte*>(cached->data) + from * bytes;
      if (is_there) std::copy(there, there + bytes, here);
      else std::fill(here, here + bytes, std::byte{0});
    }
  };
  {
    const runtime::Session session;
    each(*session, product(rows, count, wide) < kSerialProducts, rows * count, gather);
  }
  const Over over{rows, 1, heads, count, wide, rank, config_.scale, config_.sinks};
  attend_all(gemm::step_ops(), over, step.dtype, out, [&](int index, int) {
    gemm::Attend task;
    task.q = query + product((first + index) * heads, wide);
    task.k1 = task.v = latents + product(index, count, rank) * step.width();
    task.k2 = keys + product(index, count, rope) * step.width();
    task.d1 = task.dv = rank;
    task.d2 = rope;
    task.dtype = step.dtype;
    task.mask = masks + product(index, count);
    return task;
  });
}

void LatentAttention::project(const float* x, const Step& step, float* low, float* q, float* kv, float* gate) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int batch = step.batch;
  const bool is_low = config_.q == nullptr;
  gemm::Linear::Product products[3] = {{is_low ? config_.q_a : config_.q, is_low ? low : q}, {config_.kv, kv}};
  size_t linears = 2;
  if (config_.gate != nullptr) products[linears++] = {config_.gate, gate};
  const auto given = std::span(products).first(linears);
  if (is_low) {
    const int size = config_.q_a->config().out_features;
    float* normed = low + product(batch, size);
    auto norm = [&] {
      ops.round(low, batch * size, step.dtype);
      for (int row = 0; row < batch; ++row)
        ops.rms_norm(low + product(row, size), config_.q_norm, step.dtype, normed + product(row, size));
      if (config_.low_factor != 1.0f) multiply(config_.low_factor, step.dtype, {normed, product(batch, size)});
    };
    gemm::Linear::forward_both(given, x, norm, {config_.q_b, q}, normed, DType::f32, batch);
  } else {
    gemm::Linear::forward(given, x, DType::f32, batch);
  }
  ops.round(q, batch * config_.heads * (config_.nope + config_.rope), step.dtype);
  ops.round(kv, batch * (config_.rank + config_.rope), step.dtype);
}

void LatentAttention::rotate(const float* from, const Step& step, int row, float* to) const {
  if (step.rotary == 0) {
    std::copy(from, from + config_.rope, to);
  } else if (config_.stays) {
    const runtime::Scratch tables(product(4, step.rotary));
    turn_in_place(gemm::step_ops(), from, config_.rope, step, row, true, tables, to);
  } else {
    turn(gemm::step_ops(), from, config_.rope, step, row, config_.neighbours, to);
    if (step.has_wide_rotation) gemm::step_ops().round(to, config_.rope, step.dtype);
  }
}

void LatentAttention::write(int row, const float* kv, const Step& step, const Places& places, float* latent,
                            const LayerCache& cache) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int rank = config_.rank, rope = config_.rope, wide = rank + rope;
  const float* from = kv + product(row, wide);
  ops.rms_norm(from, config_.kv_norm, step.dtype, latent);
  if (config_.latent_factor != 1.0f) multiply(config_.latent_factor, step.dtype, {latent, static_cast<size_t>(rank)});
  const float* key = from + rank;
  if (config_.k_norm.weight != nullptr) {
    ops.rms_norm(key, config_.k_norm, step.dtype, latent + wide);
    key = latent + wide;
  }
  rotate(key, step, row, latent + rank);
  const size_t slot = product(step.cache_row(row), places.capacity) + static_cast<size_t>(places.own);
  ops.store(latent, rank, step.dtype, at(cache.first.data, slot * static_cast<size_t>(rank), step));
  ops.store(latent + rank, rope, step.dtype, at(cache.second.data, slot * static_cast<size_t>(rope), step));
}

void LatentAttention::absorb(float* q, const Step& step, float* query) const {
  const runtime::Session session;
  const bool serial = product(step.batch, config_.heads, config_.nope * config_.rank) < kSerialProducts;
  each(*session, serial, config_.heads, [&](int h, int) { absorb_head(h, q, step, query); });
}

void LatentAttention::absorb_head(int h, float* q, const Step& step, float* query) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int heads = config_.heads, rank = config_.rank, nope = config_.nope, wide = rank + config_.rope;
  const void* w = at(const_cast<void*>(config_.expansion), product(h, nope + config_.value, rank), step);
  for (int row = 0; row < step.batch; ++row) {
    float* from = q + product(row * heads + h, nope + config_.rope);
    float* to = query + product(row * heads + h, wide);
    rotate(from + nope, step, row, to + rank);
    const auto position = static_cast<float>(step.own_position(row));
    for (auto [part, size] : {std::pair{from, nope}, {to + rank, config_.rope}}) {
      const std::span<float> values(part, static_cast<size_t>(size));
      if (config_.tuned) tune(config_.tuned, position, step.dtype, true, values);
      if (config_.growth) tune(config_.growth, h, position, step.dtype, values);
    }
    ops.times_rows(from, w, nope, rank, step.dtype, to);
  }
}

void LatentAttention::expand(const float* sum, const Step& step, float* head) const {
  const runtime::Session session;
  const bool serial = product(step.batch, config_.heads, config_.value * config_.rank) < kSerialProducts;
  each(*session, serial, config_.heads, [&](int h, int) { expand_head(h, sum, step, head); });
}

void LatentAttention::expand_head(int h, const float* sum, const Step& step, float* head) const {
  const int heads = config_.heads, rank = config_.rank, value = config_.value;
  for (int row = 0; row < step.batch; ++row)
    gemm::step_ops().rows_times(values_of(h, step).data(), sum + product(row * heads + h, rank), value, rank,
                                step.dtype, head + product(row * heads + h, value));
}

std::span<const std::byte> LatentAttention::values_of(int h, const Step& step) const {
  const size_t begin = product(h, config_.nope + config_.value, config_.rank) + product(config_.nope, config_.rank);
  return {static_cast<const std::byte*>(config_.expansion) + begin * step.width(),
          product(config_.value, config_.rank) * step.width()};
}

}  // namespace ktinject::attention
