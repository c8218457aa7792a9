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
#include "attention/indexer.hpp"
#include "attention/recurrent.hpp"
#include "attention/ring.hpp"
#include "attention/tasks.hpp"
#include "attention/turning.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

void* at(void* base, size_t element, const Step& step) {
  return static_cast<std::byte*>(base) + element * step.width();
}

void expect(const gemm::Linear* linear, int out, const char* name) {
  if (linear == nullptr || linear->config().out_features != out)
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(out) + " outputs");
}

std::string shown(const std::vector<int>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

// Places of the rows of a step that are computed with this one. prompt: the tokens before a ring; 0: there are none.
Places places_of(const LayerCache& cache, const Step& step, int row, int heads, int key_size, int value_size,
                 int window, int prompt = 0) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument("cache: " + what); };
  auto is = [&](const Cached& one, int width) {
    return one.dtype == step.dtype && one.shape.size() == 4 && one.shape[0] == step.together() &&
           one.shape[1] == heads && one.shape[2] == cache.first.shape[2] && one.shape[3] == width;
  };
  if (!is(cache.first, key_size) || !is(cache.second, value_size)) {
    const std::string rows = "[" + std::to_string(step.together()) + ", " + std::to_string(heads) + ", n, ";
    refuse("found " + shown(cache.first.shape) + " and " + shown(cache.second.shape) + "; expected " + rows +
           std::to_string(key_size) + "] and " + rows + std::to_string(value_size) + "] of the model's dtype");
  }
  const int capacity = cache.first.shape[2];
  if (window > 0 && prompt == 0 && capacity > window)
    refuse("found " + std::to_string(capacity) + " places for a window of " + std::to_string(window));
  const int position = step.position_of(row);
  if (position >= capacity && (window == 0 || capacity < prompt + window))
    refuse("position " + std::to_string(position) + " of a cache of " + std::to_string(capacity));
  if (window == 0 || position < prompt) return {capacity, position, position + 1};
  return {capacity, prompt + (position - prompt) % window, std::min(position + 1, prompt + window)};
}

// sum [batch, heads, value] times what a gate [batch, gates] says, of a head or of each of its values.
void multiply_by_gate(float* sum, int values, float* gate, int gates, bool has_softplus, const Step& step) {
  const gemm::StepOps& ops = gemm::step_ops();
  const int all = step.batch * gates, share = values / gates, count = all * share;  // values that a gate is of
  ops.round(gate, all, step.dtype);
  if (has_softplus) {
    for (int i = 0; i < all; ++i) gate[i] = softplus(gate[i]);
  } else {
    ops.sigmoid(gate, all);
  }
  ops.round(gate, all, step.dtype);
  for (int i = 0; i < count; ++i) sum[i] *= gate[i / share];
  ops.round(sum, count, step.dtype);
}

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
