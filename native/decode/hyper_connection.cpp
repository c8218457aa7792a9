#include "decode/hyper_connection.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "attention/tasks.hpp"
#include "gemm/backends.hpp"
#include "gemm/step_ops.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::decode {

namespace {

using attention::each;
using attention::product;

constexpr int kOutputsOfTask = 2;    // of fn, whose rows are long
constexpr int kColumnsOfTask = 512;  // of streams

}  // namespace

HyperConnection::HyperConnection(HyperConnectionConfig config) : config_(config) {
  if (config_.streams < 2 || config_.streams > HyperConnectionConfig::kMostStreams || config_.hidden < 1)
    throw std::invalid_argument("streams: found " + std::to_string(config_.streams) + "; served are 2 to " +
                                std::to_string(HyperConnectionConfig::kMostStreams));
  if (config_.iterations < 0 || (config_.is_head && config_.iterations > 0))
    throw std::invalid_argument("streams: iterations must not be negative, and a head has none");
  if (config_.fn == nullptr && !config_.is_head)
    throw std::invalid_argument("streams: only a head goes without a weight");
  if ((config_.fn == nullptr) != (config_.base == nullptr) || (config_.fn == nullptr) != (config_.scale == nullptr))
    throw std::invalid_argument("streams: weight, base and scale belong together");
}

void HyperConnection::collapse(const float* streams, int batch, DType dtype, float* collapsed, float* mixing) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = config_.streams, n = config_.hidden, wide = count * n, outputs = config_.outputs();
  runtime::Arrays arrays;
  const size_t logits_at = arrays.take(product(batch, outputs)), pre_at = arrays.take(static_cast<size_t>(count));
  const runtime::Scratch memory(arrays.count());
  float *logits = memory + logits_at, *pre = memory + pre_at;
  std::fill_n(pre, count, 1.0f / static_cast<float>(count));
  if (config_.fn != nullptr) {
    const runtime::Session session;
    const int blocks = (outputs + kOutputsOfTask - 1) / kOutputsOfTask;
    const bool serial = product(batch, outputs, wide) < attention::kSerialProducts;
    each(*session, serial, batch * blocks, [&](int index, int) {
      const int row = index / blocks, first = index % blocks * kOutputsOfTask;
      ops.rows_times(config_.fn + product(first, wide), streams + product(row, wide),
                     std::min(kOutputsOfTask, outputs - first), wide, DType::f32, logits + row * outputs + first);
    });
  }
  for (int row = 0; row < batch; ++row) {
    const float* x = streams + product(row, wide);
    if (config_.fn != nullptr) {
      float squares = 0;
      ops.rows_times(x, x, 1, wide, DType::f32, &squares);
      const float inverse = 1.0f / std::sqrt(squares / static_cast<float>(wide) + config_.norm_eps);
      float* own = logits + row * outputs;
      for (int i = 0; i < outputs; ++i) own[i] *= inverse;
      weigh(own, dtype, pre, config_.is_head ? nullptr : mixing + product(row, this->mixing()));
    }
    float* out = collapsed + product(row, n);
    for (int i = 0; i < n; ++i) out[i] = pre[0] * x[i];
    for (int s = 1; s < count; ++s)
      for (int i = 0; i < n; ++i) out[i] += pre[s] * x[s * n + i];
    ops.round(out, n, dtype);
  }
}

void HyperConnection::weigh(float* logits, DType dtype, float* pre, float* mixing) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = config_.streams;
  for (int i = 0; i < count; ++i) pre[i] = logits[i] * config_.scale[0] + config_.base[i];
  ops.sigmoid(pre, count);
  for (int i = 0; i < count; ++i) pre[i] += config_.eps;
  if (config_.is_head) return;
  float *post = mixing, *comb = mixing + count;
  for (int i = 0; i < count; ++i) post[i] = logits[count + i] * config_.scale[1] + config_.base[count + i];
  ops.sigmoid(post, count);
  for (int i = 0; i < count; ++i) post[i] = config_.post_factor * post[i] + config_.post_eps;
  if (config_.iterations > 0) {
    const float *given = logits + 2 * count, *base = config_.base + 2 * count;
    for (int i = 0; i < count * count; ++i) comb[i] = given[i] * config_.scale[2] + base[i];
    for (int row = 0; row < count; ++row) ops.softmax(comb + row * count, count);
    for (int i = 0; i < count * count; ++i) comb[i] += config_.eps;
    normalise(comb);
  }
  if (config_.rounds) ops.round(mixing, count + (config_.iterations > 0 ? count * count : 0), dtype);
}

void HyperConnection::normalise(float* comb) const {
  const int count = config_.streams;
  // Numbers that lie `step` apart, of each line of the other direction.
  auto divide = [&](int line, int step) {
    for (int i = 0; i < count; ++i) {
      float sum = 0;
      for (int j = 0; j < count; ++j) sum += comb[i * line + j * step];
      sum += config_.eps;
      for (int j = 0; j < count; ++j) comb[i * line + j * step] /= sum;
    }
  };
  divide(1, count);
  for (int i = 1; i < config_.iterations; ++i) {
    divide(count, 1);
    divide(1, count);
  }
}

void HyperConnection::add(const float* y, const float* mixing, int batch, DType dtype, float* streams) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const int count = config_.streams, n = config_.hidden, blocks = (n + kColumnsOfTask - 1) / kColumnsOfTask;
  const runtime::Session session;
  const bool serial = product(batch, this->mixing(), n) < attention::kSerialProducts;
  each(*session, serial, batch * blocks, [&](int index, int) {
    const int row = index / blocks, first = index % blocks * kColumnsOfTask, size = std::min(kColumnsOfTask, n - first);
    const float *post = mixing + product(row, this->mixing()), *comb = post + count,
                *given = y + product(row, n) + first;
    float* x = streams + product(row, count, n) + first;
    const runtime::Scratch memory(product(count + 1, kColumnsOfTask));
    float *mixed = memory, *part = memory + product(count, kColumnsOfTask);
    for (int s = 0; s < count; ++s) {
      float* to = mixed + product(s, size);
      if (config_.iterations == 0) {
        std::copy_n(x + product(s, n), size, to);
      } else {
        std::fill_n(to, size, 0.0f);
        for (int from = 0; from < count; ++from)
          for (int i = 0; i < size; ++i) to[i] += comb[from * count + s] * x[from * n + i];
      }
      for (int i = 0; i < size; ++i) part[i] = post[s] * given[i];
      if (config_.rounds) {
        ops.round(to, size, dtype);
        ops.round(part, size, dtype);
      }
      ops.add(to, part, size, dtype);
    }
    for (int s = 0; s < count; ++s) std::copy_n(mixed + product(s, size), size, x + product(s, n));
  });
}

}  // namespace ktinject::decode
