// Attention of one token a row: projections on the pool; then, in one call, norms and rotation by heads, and tasks of
// (some heads of a row, some positions of the cache), whose results are put together by head.
#include <algorithm>
#include <cmath>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "attention/around.hpp"
#include "attention/attend_all.hpp"
#include "attention/attention.hpp"
#include "attention/block_index.hpp"
#include "attention/cached.hpp"
#include "attention/recurrent.hpp"
#include "attention/ring.hpp"
#include "attention/tasks.hpp"
#include "attention/turning.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

// gate [batch, gates] += bias [heads], each head's to all of its gates; both rounded.
void add_to_heads(float* gate, const float* bias, int heads, int gates, const Step& step) {
  const gemm::StepOps& ops = gemm::step_ops();
  ops.round(gate, step.batch * gates, step.dtype);
  for (int i = 0; i < step.batch * gates; ++i) gate[i] += bias[i % gates / (gates / heads)];
  ops.round(gate, step.batch * gates, step.dtype);
}

}  // namespace

std::vector<float> Undo::cut(int kept, std::initializer_list<int> parts) {
  std::vector<float> left;
  auto from = inputs.cbegin();
  for (const int part : parts) {
    left.insert(left.end(), from, from + static_cast<ptrdiff_t>(product(kept, part)));
    from += static_cast<ptrdiff_t>(product(rows, part));
  }
  rows = kept;
  inputs = left;
  return left;
}

GroupedAttention::GroupedAttention(GroupedAttentionConfig config) : config_(config) {
  if (config_.groups < 1 || config_.size < 1 || config_.heads < 1 || config_.heads % config_.groups != 0)
    throw std::invalid_argument("attention: heads must be a multiple of groups");
  expect(config_.q, config_.heads * config_.size * (config_.gated ? 2 : 1), "q_proj");
  expect(config_.k, config_.groups * config_.size, "k_proj");
  expect(config_.v == nullptr ? config_.k : config_.v, config_.groups * value(), "v_proj");
  if (config_.v_norm.weight != nullptr && config_.v_norm.size != value())
    throw std::invalid_argument("attention: a norm of values must be one of a head's " + std::to_string(value()));
  if (config_.chunked && config_.window == 0) throw std::invalid_argument("attention: chunks of how many tokens?");
  if (config_.keeps_prompt && (config_.window == 0 || config_.chunked || config_.index != nullptr))
    throw std::invalid_argument("attention: a prompt is kept beside a window, without chunks and an index");
  if (config_.tuned.every < 0) throw std::invalid_argument("attention: queries tuned by less than one position");
  if (config_.power.every < 0) throw std::invalid_argument("attention: queries grow by less than one position");
  if (config_.gate_bias != nullptr && config_.gate == nullptr)
    throw std::invalid_argument("attention: a bias of gates that there are none of");
  if (config_.gate != nullptr && config_.gate->config().out_features != config_.heads)
    expect(config_.gate, config_.heads * value(), "the projection to gates");
  if (config_.gated && (config_.gate != nullptr || value() != config_.size))
    throw std::invalid_argument("attention: gates from q_proj beside others, or beside values of another size");
  if (config_.index != nullptr && (config_.window > 0 || config_.groups % config_.index->heads() != 0))
    throw std::invalid_argument(
        "attention: an index of blocks beside a window, or of heads that its groups do not fit");
  for (const auto& [norm, count] : {std::pair{config_.q_norm, config_.heads}, {config_.k_norm, config_.groups}}) {
    if (norm.weight == nullptr || norm.size == config_.size) continue;
    if (norm.size != count * config_.size)
      throw std::invalid_argument("attention: a norm of queries or keys must be one of a head's " +
                                  std::to_string(config_.size) + " values, or of all " +
                                  std::to_string(count * config_.size));
    if (config_.norms_last) throw std::invalid_argument("attention: a norm of all heads at once behind the rotation");
    // Gates lie between the queries.
    if (config_.gated) throw std::invalid_argument("attention: a norm of all heads at once beside output gates");
  }
}

bool GroupedAttention::fits(int hidden) const {
  for (const gemm::Linear* linear : {config_.q, config_.k, config_.v, config_.gate})
    if (linear != nullptr && linear->config().in_features != hidden) return false;
  if (config_.index != nullptr && !config_.index->fits(hidden)) return false;
  return config_.o->config().in_features == config_.heads * value() && config_.o->config().out_features == hidden;
}

void GroupedAttention::forward(const float* x, const Step& step, const LayerCache& cache, float* out) const {
  const int heads = config_.heads, groups = config_.groups, size = config_.size, batch = step.batch;
  const int dv = value(), gates = config_.gate == nullptr ? 0 : config_.gate->config().out_features;
  const int prompt = config_.keeps_prompt ? step.prompt : 0, window = config_.window;
  if (config_.keeps_prompt && prompt < 1)
    throw std::invalid_argument("attention: a prompt is kept, of so many tokens as the step has to say");
  places_of(cache, step, batch - 1, groups, size, dv, window, prompt);
  const gemm::StepOps& ops = gemm::step_ops();
  if (step.rotary > size) throw std::invalid_argument("attention: more values are turned than a head has");
  const size_t wide = product(size, config_.gated ? 2 : 1);  // what q_proj gives a head
  const bool has_masks = (step.mask != nullptr || config_.chunked) && config_.window > 0;
  runtime::Arrays arrays;
  const size_t q_at = arrays.take(static_cast<size_t>(batch * heads) * wide),
               k_at = arrays.take(product(batch, groups, size)), v_at = arrays.take(product(batch, groups, dv)),
               query_at = arrays.take(config_.gated ? product(batch, heads, size) : 0),
               sum_at = arrays.take(product(batch, heads, dv)),
               gate_at = arrays.take(config_.gated ? product(batch, heads, size) : product(batch, gates)),
               mask_at = arrays.take(has_masks ? product(step.together(), prompt + window) / sizeof(float) + 1 : 0);
  const runtime::Scratch memory(arrays.count());
  float *q = memory + q_at, *k = memory + k_at, *v = memory + v_at, *sum = memory + sum_at;
  float* query = config_.gated ? memory + query_at : q;  // side by side, as gates lie between what q_proj gives
  float* gate = memory + gate_at;
  auto* masks = reinterpret_cast<uint8_t*>(memory + mask_at);

  gemm::Linear::Product products[4] = {{config_.q, q}, {config_.k, k}};
  size_t linears = 2;
  if (config_.v != nullptr) products[linears++] = {config_.v, v};
  if (gates != 0) products[linears++] = {config_.gate, gate};
  const std::span<const gemm::Linear::Product> given = std::span(products).first(linears);
  auto finish_values = [&] {
    prepare_values(v, k, step);
    if (config_.value_scale == 1.0f) return;
    ops.round(v, batch * groups * dv, step.dtype);
    for (int i = 0; i < batch * groups * dv; ++i) v[i] *= config_.value_scale;
  };
  auto norm_all = [&](float* values, const Norm& norm) {
    if (norm.weight == nullptr || norm.size == size) return;
    ops.round(values, norm.size, step.dtype);
    ops.rms_norm(values, norm, step.dtype, values);
  };
  // To head + size; head is scratch for six heads.
  auto norm_and_turn = [&](float* values, const Norm& norm, int row, float* head) {
    ops.round(values, size, step.dtype);
    const bool is_normed = norm.weight != nullptr && norm.size == size;
    const float* from = values;
    if (is_normed && !config_.norms_last) {
      ops.rms_norm(values, norm, step.dtype, head);
      from = head;
    }
    if (config_.neighbours || step.has_wide_rotation)
      turn_in_place(ops, from, size, step, row, config_.neighbours, head + 2 * size, head + size);
    else turn(ops, from, size, step, row, false, head + size);
    if (is_normed && config_.norms_last) ops.rms_norm(head + size, norm, step.dtype, head + size);
  };
  auto prepare_query = [&](int row, int h) {
    const runtime::Scratch head(product(6, size));
    float* one = q + static_cast<size_t>(row * heads + h) * wide;
    norm_and_turn(one, config_.q_norm, row, head);
    if (config_.gated) std::copy(one + size, one + 2 * size, gate + product(row * heads + h, size));
    float* to = query + product(row * heads + h, size);
    std::copy(head + size, head + 2 * size, to);
    if (config_.tuned)
      tune(config_.tuned, static_cast<float>(step.position_of(row)) + 1, step.dtype, false,
           {to, static_cast<size_t>(size)});
    if (config_.power)
      tune(config_.power, static_cast<float>(step.own_position(row)) + 1, step.dtype, {to, static_cast<size_t>(size)});
  };
  auto prepare_key = [&](int row, int g, const Places& places) {
    const runtime::Scratch head(product(6, size));
    norm_and_turn(k + product(row * groups + g, size), config_.k_norm, row, head);
    const size_t place = product(step.cache_row(row) * groups + g, places.capacity) + product(places.own, 1);
    ops.store(head + size, size, step.dtype, at(cache.first.data, place * product(size, 1), step));
    ops.store(v + product(row * groups + g, dv), dv, step.dtype, at(cache.second.data, place * product(dv, 1), step));
  };
  auto close_gates = [&] {
    if (config_.gated) {
      ops.round(gate, batch * heads * size, step.dtype);
      ops.gate_by_sigmoid(sum, gate, batch * heads * size, step.dtype);
    } else if (gates != 0) {
      if (config_.gate_bias != nullptr) add_to_heads(gate, config_.gate_bias, heads, gates, step);
      multiply_by_gate(sum, heads * dv, gate, gates, config_.has_softplus, step);
    }
  };
  const int shared = heads / groups;
  const bool is_one_call = batch == 1 && config_.index == nullptr;
  if (!is_one_call) {
    gemm::Linear::forward(given, x, DType::f32, batch);
    finish_values();
  }
  if (step.consecutive) remember_ring(step, cache, window, prompt);
  const int block = config_.index == nullptr ? 0 : config_.index->forward(x, step, cache);
  // A token's keys are written when those before it have attended: in a ring, they take the place of older ones.
  for (int first = 0; first < batch; first += step.together()) {
    const Places places = places_of(cache, step, first, groups, size, dv, window, prompt);
    const bool wraps = has_masks && step.position_of(first) >= places.count;
    auto prepare_rows = [&] {
      for (int row = first; row < first + step.together(); ++row) {
        norm_all(q + static_cast<size_t>(row * heads) * wide, config_.q_norm);
        norm_all(k + product(row * groups, size), config_.k_norm);
        uint8_t* mask = masks + product(row - first, places.count);
        if (wraps && prompt > 0) mask_behind_prompt(step.mask_of(row), step.position_of(row), window, prompt, mask);
        else if (wraps) mask_of_ring(step.mask_of(row), step.position_of(row), places.count, config_.chunked, mask);
      }
    };
    const int items = step.together() * (heads + groups);
    auto prepare = [&](int item) {
      const int row = first + item / (heads + groups), h = item % (heads + groups);
      if (h < groups) prepare_key(row, h, places);
      else prepare_query(row, h - groups);
    };
    const Over over{step.together(), groups, shared, places.count, size, dv, config_.scale, config_.sinks};
    auto of = [&](int index, int group) {
      const int row = first + index;
      const size_t begin = product(step.cache_row(row) * groups + group, places.capacity);
      gemm::Attend task;
      task.q = query + product((row * groups + group) * shared, size);
      task.k1 = at(cache.first.data, begin * product(size, 1), step);
      task.v = at(cache.second.data, begin * product(dv, 1), step);
      task.d1 = size;
      task.dv = dv;
      task.dtype = step.dtype;
      task.mask = wraps ? masks + product(index, places.count) : step.mask_of(row);
      return task;
    };
    if (is_one_call) {
      auto begin = [&] {
        finish_values();
        prepare_rows();
      };
      const Around around{given, x, {sum, {config_.o, out}, step.dtype, step.following}};
      return attend_in_one_call(around, ops, over, sum, of, items, prepare, begin, close_gates);
    }
    prepare_rows();
    if (block > 0) {
      const auto all = cache.choice->is_all.begin() + first;
      if (std::find(all, all + step.together(), false) != all + step.together()) {
        for (int item = 0; item < items; ++item) prepare(item);
        attend_blocks(query, step, cache, first, block, sum + product(first, heads, dv));
        continue;
      }
    }
    attend_all(ops, over, step.dtype, sum + product(first, heads, dv), of, items, prepare);
  }
  close_gates();
  config_.o->forward(sum, DType::f32, batch, out);
  ops.round(out, config_.o->config().out_features * batch, step.dtype);
}

void GroupedAttention::attend_blocks(const float* q, const Step& step, const LayerCache& cache, int first, int block,
                                     float* out) const {
  const int groups = config_.groups, size = config_.size, dv = value(), shared = config_.heads / groups;
  const int rows = step.together(), capacity = cache.first.shape[2], own_heads = config_.index->heads();
  const int sharing = groups / own_heads, held = step.position_of(first) + 1;
  auto chosen = [&](int pair) -> const std::vector<int>& {  // (row, group)
    return cache.choice
        ->places[product(first + pair / groups, own_heads) + static_cast<size_t>(pair % groups / sharing)];
  };
  size_t most = 1;
  for (int pair = 0; pair < rows * groups; ++pair) most = std::max(most, chosen(pair).size());
  const int slots = static_cast<int>(most), count = slots * block;
  // Side by side, with zeros behind the fewer ones of a row with padding.
  const size_t words = step.width() == sizeof(float) ? 1 : 2;
  runtime::Arrays arrays;
  const size_t key_at = arrays.take(product(rows * groups, count, size) / words + 1),
               value_at = arrays.take(product(rows * groups, count, dv) / words + 1),
               mask_at = arrays.take(product(rows * groups, count) / sizeof(float) + 1);
  const runtime::Scratch memory(arrays.count());
  auto* keys = reinterpret_cast<std::byte*>(memory + key_at);
  auto* values = reinterpret_cast<std::byte*>(memory + value_at);
  auto* masks = reinterpret_cast<uint8_t*>(memory + mask_at);
  auto gather = [&](int index, int) {
    const int pair = index / slots, slot = index % slots, row = first + pair / groups;
    const bool is_there = static_cast<size_t>(slot) < chosen(pair).size();
    const int begin = is_there ? chosen(pair)[static_cast<size_t>(slot)] * block : 0;
    const int there = is_there ? std::clamp(held - begin, 0, block) : 0;
    const uint8_t* mask = step.mask_of(row);
    uint8_t* seen = masks + product(index, block);
    for (int i = 0; i < block; ++i) seen[i] = i < there && (mask == nullptr || mask[begin + i] != 0);
    const size_t from = product(step.cache_row(row) * groups + pair % groups, capacity) + static_cast<size_t>(begin);
    for (auto [cached, to, width] : {std::tuple{&cache.first, keys, size}, std::tuple{&cache.second, values, dv}}) {
      const size_t bytes = static_cast<size_t>(width) * step.width();
      std::byte* here = to + product(index, block) * bytes;
      const auto* source = static_cast<const std::byte*>(cached->data) + from * bytes;
      std::copy(source, source + static_cast<size_t>(there) * bytes, here);
      std::fill(here + static_cast<size_t>(there) * bytes, here + static_cast<size_t>(block) * bytes, std::byte{0});
    }
  };
  {
    const runtime::Session session;
    each(*session, product(rows * groups, count, size + dv) < kSerialProducts, rows * groups * slots, gather);
  }
  const Over over{rows, groups, shared, count, size, dv, config_.scale, config_.sinks};
  attend_all(gemm::step_ops(), over, step.dtype, out, [&](int index, int group) {
    const int pair = index * groups + group;
    gemm::Attend task;
    task.q = q + product((first + index) * groups + group, shared, size);
    task.k1 = keys + product(pair, count, size) * step.width();
    task.v = values + product(pair, count, dv) * step.width();
    task.d1 = size;
    task.dv = dv;
    task.dtype = step.dtype;
    task.mask = masks + product(pair, count);
    return task;
  });
}

void GroupedAttention::prepare_values(float* v, const float* k, const Step& step) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int dv = value(), count = step.batch * config_.groups;
  if (config_.v == nullptr) std::copy(k, k + product(count, dv), v);
  if (config_.v_norm.weight == nullptr) return;
  ops.round(v, count * dv, step.dtype);
  for (int i = 0; i < count; ++i) ops.rms_norm(v + product(i, dv), config_.v_norm, step.dtype, v + product(i, dv));
}

void GroupedAttention::keep(const LayerCache& cache, int kept) const { restore_ring(cache, config_.window, kept); }

}  // namespace ktinject::attention
