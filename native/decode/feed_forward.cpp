// Dense and mixed feed-forward layers of a decode step.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "attention/recurrent.hpp"
#include "attention/tasks.hpp"
#include "attention/top.hpp"
#include "decode/decoder.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::decode {
namespace {

// Rows of a router's weight that a task multiplies: a µs or two, and of 128 experts a task for each of 16 workers.
constexpr int kExpertsOfTask = 8;

// out [rows, size] = norm of x, rounded; x itself where there is no norm.
const float* norm_rows(const attention::Norm& norm, const float* x, int rows, DType dtype, float* out) {
  if (norm.weight == nullptr) return x;
  const gemm::StepOps& ops = gemm::step_ops();
  for (int row = 0; row < rows; ++row) ops.rms_norm(x + row * norm.size, norm, dtype, out + row * norm.size);
  return out;
}

}  // namespace

GatedUnit::GatedUnit(const gemm::Linear& gate, const gemm::Linear* up, const gemm::Linear& down, Gating gating)
    : gate_(gate), up_(up), down_(down), gating_(gating) {
  if (gating.activation != gemm::ActivationKind::silu &&
      (gating.activation != gemm::ActivationKind::gelu_tanh || gating.alpha != 1.0f))
    throw std::invalid_argument("feed-forward: the activation must be silu, or gelu_tanh without alpha");
  if (gating.is_wide && !gating.is_plain())
    throw std::invalid_argument("feed-forward: an activation that is not rounded beside limits");
  if (gate.config().out_features != inner() * (up == nullptr ? 2 : 1) ||
      (up != nullptr && up->config().out_features != inner()))
    throw std::invalid_argument("feed-forward: gate, up and down do not fit together");
}

bool GatedUnit::fits(int hidden) const {
  return gate_.config().in_features == hidden && (up_ == nullptr || up_->config().in_features == hidden) &&
         down_.config().out_features == hidden;
}

void GatedUnit::forward(const float* x, DType dtype, int batch, const Rows& /*rows*/, float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int inner = this->inner(), count = batch * inner;
  runtime::Arrays arrays;
  const size_t gate_at = arrays.take(static_cast<size_t>(count)), up_at = arrays.take(static_cast<size_t>(count)),
               both_at = arrays.take(up_ == nullptr ? static_cast<size_t>(2 * count) : 0);
  const runtime::Scratch memory(arrays.count());
  float *gate = memory + gate_at, *up = memory + up_at, *both = memory + both_at;
  const gemm::Linear::Product products[] = {{&gate_, up_ == nullptr ? both : gate}, {up_, up}};
  auto activate = [&] {
    for (int row = 0; up_ == nullptr && row < batch; ++row) {
      const float* from = both + 2 * row * inner;
      std::copy(from, from + inner, gate + row * inner);
      std::copy(from + inner, from + 2 * inner, up + row * inner);
    }
    ops.round(gate, count, dtype);
    ops.round(up, count, dtype);
    if (gating_.is_plain()) ops.gate_up(gate, up, count, gating_.activation, gating_.is_wide ? DType::f32 : dtype);
    else multiply(gate, up, count, dtype);
    if (gating_.is_wide) ops.round(gate, count, dtype);
  };
  gemm::Linear::forward_both(std::span(products).first(up_ == nullptr ? 1 : 2), x, activate, {&down_, out}, gate,
                             DType::f32, batch);
  ops.round(out, batch * down_.config().out_features, dtype);
}

void GatedUnit::multiply(float* gate, float* up, int count, DType dtype) const {
  const gemm::StepOps& ops = gemm::step_ops();
  for (int i = 0; i < count; ++i) {  // NaN stays NaN
    gate[i] = gate[i] > gating_.gate_max ? gating_.gate_max : gate[i];
    float value = up[i] > gating_.up_limit ? gating_.up_limit : up[i];
    value = value < -gating_.up_limit ? -gating_.up_limit : value;
    up[i] = value + gating_.up_offset;
  }
  ops.round(up, count, dtype);
  if (gating_.alpha == 1.0f) return ops.gate_up(gate, up, count, gating_.activation, dtype);
  const runtime::Scratch factors(static_cast<size_t>(count));
  float* factor = factors;
  for (int i = 0; i < count; ++i) factor[i] = gate[i] * gating_.alpha;
  ops.round(factor, count, dtype);
  ops.sigmoid(factor, count);
  ops.round(factor, count, dtype);
  for (int i = 0; i < count; ++i) gate[i] *= factor[i];
  ops.round(gate, count, dtype);
  for (int i = 0; i < count; ++i) gate[i] *= up[i];
  ops.round(gate, count, dtype);
}

PlainUnit::PlainUnit(const gemm::Linear& up, const gemm::Linear& down) : up_(up), down_(down) {
  if (up.config().out_features != down.config().in_features)
    throw std::invalid_argument("feed-forward: up and down do not fit together");
}

bool PlainUnit::fits(int hidden) const {
  return up_.config().in_features == hidden && down_.config().out_features == hidden;
}

void PlainUnit::forward(const float* x, DType dtype, int batch, const Rows& /*rows*/, float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = batch * down_.config().in_features;
  runtime::Arrays arrays;
  const size_t inner_at = arrays.take(static_cast<size_t>(count));
  const runtime::Scratch memory(arrays.count());
  float* inner = memory + inner_at;
  const gemm::Linear::Product up{&up_, inner};
  auto activate = [&] {
    ops.round(inner, count, dtype);
    for (int i = 0; i < count; ++i) inner[i] = inner[i] < 0.0f ? 0.0f : inner[i] * inner[i];  // NaN stays NaN
    ops.round(inner, count, dtype);
  };
  gemm::Linear::forward_both(std::span(&up, 1), x, activate, {&down_, out}, inner, DType::f32, batch);
  ops.round(out, batch * down_.config().out_features, dtype);
}

Normed::Normed(const FeedForward& part, Between norms) : part_(part), norms_(norms) {
  if (norms.before.weight != nullptr && norms.behind.weight != nullptr && norms.before.size != norms.behind.size)
    throw std::invalid_argument("feed-forward: norms before and behind of different sizes");
  if (norms.before.weight == nullptr && norms.behind.weight == nullptr)
    throw std::invalid_argument("feed-forward: a norm before or behind is needed");
}

bool Normed::fits(int hidden) const {
  return part_.fits(hidden) && (norms_.before.weight == nullptr ? norms_.behind : norms_.before).size == hidden;
}

void Normed::forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const {
  const int hidden = (norms_.before.weight == nullptr ? norms_.behind : norms_.before).size;
  const runtime::Scratch normed(static_cast<size_t>(norms_.before.weight == nullptr ? 0 : batch * hidden));
  part_.forward(norm_rows(norms_.before, x, batch, dtype, normed + 0), dtype, batch, rows, out);
  norm_rows(norms_.behind, out, batch, dtype, out);
}

Mixture::Mixture(RouterConfig router, const moe::Experts& experts, const FeedForward* shared, const void* gate,
                 Narrow narrow, Factors factors, Between norms)
    : router_(router),
      experts_(experts),
      shared_(shared),
      gate_(gate),
      narrow_(narrow),
      factors_(factors),
      norms_(norms) {
  check_router();
  const int width = experts.config().hidden_size;
  if ((narrow.in == nullptr) != (narrow.out == nullptr) ||
      (narrow.in != nullptr &&
       (narrow.in->config().out_features != width || narrow.out->config().in_features != width)))
    throw std::invalid_argument("experts: what leads to them and back must have their " + std::to_string(width) +
                                " values");
  for (const attention::Norm& norm : {router.norm, norms.before, norms.behind})
    if (norm.weight != nullptr && norm.size != hidden())
      throw std::invalid_argument("experts: norms around them and their router must be of " + std::to_string(hidden()) +
                                  " values");
  if (router.scales_input && narrow.in != nullptr)
    throw std::invalid_argument("experts: inputs that are multiplied with weights, and made narrower");
}

void Mixture::check_router() const {
  const int count = experts_.config().experts;
  if ((router_.linear == nullptr) == (router_.weight == nullptr))
    throw std::invalid_argument("router: either a linear layer or a weight is needed");
  if (router_.linear != nullptr && router_.linear->config().out_features != count)
    throw std::invalid_argument("router: expected " + std::to_string(count) + " outputs");
  if (router_.top_k < 1 || router_.top_k > count)
    throw std::invalid_argument("router: top_k must be 1 to " + std::to_string(count));
  if (router_.groups < 1 || count % router_.groups != 0 || router_.top_groups < 1 ||
      router_.top_groups > router_.groups || count / router_.groups < (router_.groups > 1 ? 2 : 1) ||
      router_.top_k > count / router_.groups * router_.top_groups)
    throw std::invalid_argument("router: its groups do not fit its experts");
  if (router_.bias != nullptr && router_.weight == nullptr)
    throw std::invalid_argument("router: a bias belongs to a weight; a linear layer has its own");
  if (router_.by_logits && (router_.correction != nullptr || router_.groups > 1))
    throw std::invalid_argument("router: a choice by logits has no corrections and groups");
  if (router_.table != nullptr &&
      (router_.by_logits || router_.nearness != 0 || router_.groups > 1 || router_.vocabulary < 1))
    throw std::invalid_argument("router: experts that go by tokens are not chosen in another way, too");
  if (router_.nearness != 0 && (router_.nearness < 0 || router_.top_k != 2 || count < 2 || router_.by_logits ||
                                router_.correction != nullptr || router_.groups > 1 || router_.normed))
    throw std::invalid_argument("router: experts near the best ones are two, without corrections, groups and sums");
}

bool Mixture::fits(int hidden) const {
  return (router_.linear == nullptr || router_.linear->config().in_features == hidden) && this->hidden() == hidden &&
         (narrow_.out == nullptr || narrow_.out->config().out_features == hidden) &&
         (shared_ == nullptr || shared_->fits(hidden));
}

void Mixture::forward(const float* x, DType dtype, int batch, const Rows& rows, float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int hidden = this->hidden(), top_k = router_.top_k;
  runtime::Arrays arrays;
  const auto all = static_cast<size_t>(batch * hidden);
  const size_t weights_at = arrays.take(static_cast<size_t>(batch * top_k)),
               ids_at = arrays.take(static_cast<size_t>(batch * top_k)),
               given_at = arrays.take(norms_.before.weight == nullptr ? 0 : all),
               beside_at = arrays.take(shared_ == nullptr ? 0 : all);
  const runtime::Scratch memory(arrays.count());
  float *weights = memory + weights_at, *beside = memory + beside_at;
  auto* ids = reinterpret_cast<int32_t*>(memory + ids_at);
  route(x, dtype, batch, rows, ids, weights);
  const float* given = norm_rows(norms_.before, x, batch, dtype, memory + given_at);
  if (router_.scales_input) run_scaled(given, ids, weights, dtype, batch, out);
  else run_experts(given, ids, weights, dtype, batch, out);
  norm_rows(norms_.behind, out, batch, dtype, out);
  auto times = [&](float factor) {
    if (factor == 1.0f) return;
    for (int i = 0; i < batch * hidden; ++i) out[i] *= factor;
    ops.round(out, batch * hidden, dtype);
  };
  times(factors_.routed);
  if (shared_ == nullptr) return times(factors_.whole);
  shared_->forward(x, dtype, batch, {rows.live, rows.tokens}, beside);
  for (int row = 0; gate_ != nullptr && row < batch; ++row) {
    float factor;
    ops.rows_times(gate_, x + row * hidden, 1, hidden, dtype, &factor);
    ops.sigmoid(&factor, 1);
    ops.round(&factor, 1, dtype);
    float* one = beside + row * hidden;
    for (int i = 0; i < hidden; ++i) one[i] *= factor;
    ops.round(one, hidden, dtype);
  }
  ops.add(out, beside, batch * hidden, dtype);
  times(factors_.whole);
}

void Mixture::run_experts(const float* x, const int32_t* ids, const float* weights, DType dtype, int batch,
                          float* out) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int width = experts_.config().hidden_size, count = batch * width, top_k = router_.top_k;
  if (narrow_.in == nullptr) {
    experts_.forward(x, DType::f32, ids, weights, batch, top_k, out);
    return ops.round(out, count, dtype);
  }
  runtime::Arrays arrays;
  const size_t given_at = arrays.take(static_cast<size_t>(count)), found_at = arrays.take(static_cast<size_t>(count));
  const runtime::Scratch memory(arrays.count());
  float *given = memory + given_at, *found = memory + found_at;
  narrow_.in->forward(x, DType::f32, batch, given);
  ops.round(given, count, dtype);
  experts_.forward(given, DType::f32, ids, weights, batch, top_k, found);
  ops.round(found, count, dtype);
  narrow_.out->forward(found, DType::f32, batch, out);
  ops.round(out, batch * hidden(), dtype);
}

void Mixture::run_scaled(const float* x, const int32_t* ids, const float* weights, DType dtype, int batch,
                         float* out) const {
  using attention::product;
  const gemm::StepOps& ops = gemm::step_ops();
  const int hidden = this->hidden(), top_k = router_.top_k, rows = batch * top_k;
  runtime::Arrays arrays;
  const size_t given_at = arrays.take(product(rows, hidden)), found_at = arrays.take(product(rows, hidden)),
               ones_at = arrays.take(static_cast<size_t>(rows));
  const runtime::Scratch memory(arrays.count());
  float *given = memory + given_at, *found = memory + found_at, *ones = memory + ones_at;
  for (int row = 0; row < rows; ++row) {
    const float* from = x + product(row / top_k, hidden);
    float* to = given + product(row, hidden);
    for (int i = 0; i < hidden; ++i) to[i] = from[i] * weights[row];
    ops.round(to, hidden, dtype);
  }
  std::fill_n(ones, rows, 1.0f);
  experts_.forward(given, DType::f32, ids, ones, rows, 1, found);
  std::fill_n(out, product(batch, hidden), 0.0f);
  for (int row = 0; row < rows; ++row) {
    float *from = found + product(row, hidden), *to = out + product(row / top_k, hidden);
    ops.round(from, hidden, dtype);
    for (int i = 0; i < hidden; ++i) to[i] += from[i];
  }
  for (int row = 0; row < batch; ++row) ops.round(out + product(row, hidden), hidden, dtype);
}

void Mixture::route(const float* x, DType dtype, int batch, const Rows& rows, int32_t* ids, float* weights) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = experts_.config().experts, hidden = this->hidden(), top_k = router_.top_k;
  const bool changes = router_.norm.weight != nullptr || router_.input_factor != 1.0f;
  runtime::Arrays arrays;
  const size_t logits_at = arrays.take(attention::product(batch, count)),
               given_at = arrays.take(changes ? attention::product(batch, hidden) : 0);
  const runtime::Scratch memory(arrays.count());
  float *logits = memory + logits_at, *given = memory + given_at;
  if (changes) {
    const float* from = norm_rows(router_.norm, x, batch, dtype, given);
    for (int i = 0; i < batch * hidden; ++i) given[i] = from[i] * router_.input_factor;
    ops.round(given, batch * hidden, dtype);
    x = given;
  }
  if (rows.begun == nullptr) score(x, batch, logits);
  else std::copy(rows.begun, rows.begun + count, logits);
  for (int row = 0; router_.linear == nullptr && router_.bias != nullptr && row < batch; ++row)
    ops.add(logits + row * count, router_.bias, count, DType::f32);
  if (router_.table != nullptr && rows.tokens == nullptr)
    throw std::invalid_argument("router: experts go by tokens, whose numbers the step does not have");
  for (int row = 0; row < batch; ++row) {
    float *own = logits + row * count, *to = weights + row * top_k;
    int32_t* chosen = ids + row * top_k;
    if (router_.rounds_logits) ops.round(own, count, dtype);
    if (router_.nearness != 0) choose_near(own, chosen, to, dtype);
    else choose(own, router_.table == nullptr ? nullptr : rows.tokens + row, chosen, to, dtype);
    for (int i = 0; router_.expert_factors != nullptr && i < top_k; ++i) to[i] *= router_.expert_factors[chosen[i]];
    if (router_.rounds_weights) ops.round(to, top_k, dtype);
    if (rows.live != nullptr && rows.live[row] == 0) std::fill_n(chosen, top_k, -1);
  }
}

void Mixture::choose_near(const float* logits, int32_t* ids, float* weights, DType dtype) const {
  const int count = experts_.config().experts;
  const gemm::StepOps& ops = gemm::step_ops();
  const DType kept = router_.rounds_logits ? dtype : DType::f32;  // what all of it is computed in
  auto rounded = [&](float x) {
    ops.round(&x, 1, kept);
    return x;
  };
  const float most = rounded(router_.nearness);
  int first = -1;
  for (int i = 0; i < 2; ++i) {
    int best = -1;
    for (int e = 0; e < count; ++e)
      if (e != first && (best < 0 || logits[e] > logits[best])) best = e;
    const float top = logits[best];
    float sum = 0;
    for (int e = 0; e < count; ++e) {
      if (e == first) continue;
      const float away = rounded(rounded(top - logits[e]) / std::max(std::abs(logits[e]), top));
      if (!(away > most)) sum += std::exp(logits[e] - top);
    }
    weights[i] = rounded(1.0f / sum);
    ids[i] = first = best;
  }
}

void Mixture::score(const float* x, int batch, float* logits) const {
  if (router_.linear != nullptr) return router_.linear->forward(x, DType::f32, batch, logits);
  const int count = experts_.config().experts, hidden = this->hidden(), parts = parts_of_router();
  const runtime::Session session;
  const bool serial = attention::product(batch, count, hidden) < attention::kSerialProducts;
  attention::each(*session, serial, batch * parts, [&](int index, int) {
    const int row = index / parts;
    score_part(index % parts, x + row * hidden, logits + row * count);
  });
}

int Mixture::parts_of_router() const { return (experts_.config().experts + kExpertsOfTask - 1) / kExpertsOfTask; }

void Mixture::score_part(int part, const float* x, float* logits) const {
  const int count = experts_.config().experts, hidden = this->hidden(), first = part * kExpertsOfTask;
  gemm::step_ops().rows_times(router_.weight + attention::product(first, hidden), x,
                              std::min(kExpertsOfTask, count - first), hidden, DType::f32, logits + first);
}

FeedForward::Beginning Mixture::beginning() const {
  const int count = experts_.config().experts;
  if (router_.norm.weight != nullptr || router_.input_factor != 1.0f) return {};
  if (router_.linear != nullptr) return {count, router_.linear};
  if (attention::product(count, hidden()) < attention::kSerialProducts) return {};
  return {count, nullptr, parts_of_router()};
}

void Mixture::begin(int part, const float* x, float* logits) const { score_part(part, x, logits); }

std::span<const std::byte> Mixture::reads(int part) const {
  const int first = part * kExpertsOfTask, count = std::min(kExpertsOfTask, experts_.config().experts - first);
  return std::as_bytes(
      std::span(router_.weight + attention::product(first, hidden()), attention::product(count, hidden())));
}

int Mixture::expert_of(int64_t token, int i) const {
  const int64_t expert = token < 0 || token >= router_.vocabulary ? -1 : router_.table[token * router_.top_k + i];
  if (expert < 0 || expert >= experts_.config().experts)
    throw std::invalid_argument("router: token " + std::to_string(token) + " has no expert");
  return static_cast<int>(expert);
}

void Mixture::score_logits(float* logits, DType dtype) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = experts_.config().experts;
  if (router_.scores == Scores::softmax) ops.softmax(logits, count);
  else if (router_.scores == Scores::sigmoid) ops.sigmoid(logits, count);
  else
    for (int e = 0; e < count; ++e) logits[e] = std::sqrt(attention::softplus(logits[e]));
  if (router_.rounds_scores) ops.round(logits, count, dtype);
}

void Mixture::choose(float* logits, const int64_t* token, int32_t* ids, float* weights, DType dtype) const {
  const int count = experts_.config().experts, top_k = router_.top_k;
  const bool is_softmax = router_.scores == Scores::softmax;
  static thread_local std::vector<std::pair<float, int>> order, groups;
  order.resize(static_cast<size_t>(count));
  for (int e = 0; e < count; ++e) order[static_cast<size_t>(e)] = {logits[e], e};
  score_logits(logits, dtype);
  for (int e = 0; !router_.by_logits && e < count; ++e)
    order[static_cast<size_t>(e)] = {logits[e] + (router_.correction == nullptr ? 0.0f : router_.correction[e]), e};
  if (router_.top_groups < router_.groups) {
    const int size = count / router_.groups;
    groups.resize(static_cast<size_t>(router_.groups));
    for (int g = 0; g < router_.groups; ++g) {
      float first = -std::numeric_limits<float>::infinity(), second = first;
      for (int e = g * size; e < (g + 1) * size; ++e) {
        const float score = order[static_cast<size_t>(e)].first;
        second = std::max(second, std::min(first, score));
        first = std::max(first, score);
      }
      groups[static_cast<size_t>(g)] = {first + second, g};
    }
    attention::take_top(groups, router_.top_groups, false);
    for (int i = router_.top_groups; i < router_.groups; ++i) {
      const int g = groups[static_cast<size_t>(i)].second;
      for (int e = g * size; e < (g + 1) * size; ++e)
        order[static_cast<size_t>(e)].first = -std::numeric_limits<float>::infinity();
    }
  }
  if (token == nullptr) attention::take_top(order, top_k, is_softmax);
  else
    for (int i = 0; i < top_k; ++i) order[static_cast<size_t>(i)].second = expert_of(*token, i);
  float sum = is_softmax ? 0 : 1e-20f;  // as transformers does: weights that are all zero stay it
  for (int i = 0; i < top_k; ++i) {
    ids[i] = order[static_cast<size_t>(i)].second;
    weights[i] = logits[ids[i]];
    sum += weights[i];
  }
  for (int i = 0; i < top_k; ++i) weights[i] = (router_.normed ? weights[i] / sum : weights[i]) * router_.factor;
}

}  // namespace ktinject::decode
