#include "attention/linear_prompt.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/gated_delta.hpp"
#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

// Tokens that a task takes: their queries and keys in fp32 stay in the second cache.
constexpr int kTokens = 128;
// Columns of a state that a task takes: 32 KiB of one with 128 keys.
constexpr int kColumns = 64;

const void* at(const void* data, ptrdiff_t values, DType dtype) {
  return static_cast<const std::byte*>(data) + values * static_cast<ptrdiff_t>(dtype == DType::f32 ? 4 : 2);
}

}  // namespace

void convolve_prompt(const PromptConvolution& prompt) {
  const gemm::StepOps& ops = gemm::step_ops();
  const int blocks = (prompt.tokens + kTokens - 1) / kTokens;
  const runtime::Session session;
  const bool serial = product(prompt.tokens, prompt.channels, prompt.taps * prompt.batch) < kSerialProducts;
  each(*session, serial, prompt.batch * blocks, [&](int index, int) {
    const int row = index / blocks, first = index % blocks * kTokens;
    for (int token = first; token < std::min(first + kTokens, prompt.tokens); ++token) {
      const int taps = std::min(prompt.taps, token + 1);
      gemm::Convolution one;
      one.newest = at(prompt.x, row * prompt.batch_stride + token * prompt.token_stride, prompt.dtype);
      one.stride = prompt.token_stride;
      one.weight = prompt.weight + product(prompt.taps - 1, prompt.channels);
      one.bias = prompt.bias;
      one.has_silu = prompt.has_silu;
      one.channels = prompt.channels;
      one.taps = taps;
      one.dtype = prompt.dtype;
      one.out = const_cast<void*>(
          at(prompt.out, (static_cast<ptrdiff_t>(row) * prompt.tokens + token) * prompt.channels, prompt.dtype));
      ops.convolve_token(one);
    }
  });
}

void delta_prompt(const PromptDelta& prompt) {
  const gemm::StepOps& ops = gemm::step_ops();
  const int keys = prompt.key_size, values = prompt.value_size, heads = prompt.value_heads;
  const int shared = heads / prompt.key_heads, columns = (values + kColumns - 1) / kColumns;
  const int most = std::min(kTokens, prompt.tokens);
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  // Of some tokens: q and k of all heads, side by side; and what each task needs for itself.
  const size_t width = 2 * product(prompt.key_heads, keys);
  const runtime::Scratch wide(product(prompt.batch, most) * width);
  const runtime::Scratch own(product(workers.threads(), 2 * kColumns));
  for (int first = 0; first < prompt.tokens; first += most) {
    const int count = std::min(most, prompt.tokens - first);
    each(workers, false, prompt.batch * count, [&](int index, int) {
      const int row = index / count, token = index % count;
      float* to = wide + static_cast<size_t>(index) * width;
      for (const auto& [from, scale] : {std::pair{&prompt.q, prompt.scale}, std::pair{&prompt.k, 1.0f}}) {
        for (int h = 0; h < prompt.key_heads; ++h, to += keys) {
          const ptrdiff_t begin =
              row * from->batch_stride + (first + token) * from->token_stride + h * from->head_stride;
          ops.widen(at(from->data, begin, prompt.dtype), keys, prompt.dtype, to);
          const float factor = prompt.has_unit_length ? length_factor(to, keys, scale) : scale;
          for (int i = 0; i < keys; ++i) to[i] *= factor;
        }
      }
    });
    each(workers, false, prompt.batch * heads * columns, [&](int index, int worker) {
      const int row = index / (heads * columns), h = index / columns % heads, column = index % columns * kColumns;
      float *v = own + product(worker, 2 * kColumns), *out = v + kColumns;
      gemm::DeltaRule rule;
      rule.keys = keys;
      rule.values = std::min(kColumns, values - column);
      rule.stride = values;
      rule.state = prompt.states + product(row * heads + h, keys) * static_cast<size_t>(values) + column;
      rule.v = v;
      rule.out = out;
      for (int token = 0; token < count; ++token) {
        const float* both = wide + (product(row, count) + static_cast<size_t>(token)) * width;
        rule.q = both + product(h / shared, keys);
        rule.k = rule.q + width / 2;
        const size_t gate = product(row, prompt.tokens, heads) + product(first + token, heads) + static_cast<size_t>(h);
        rule.decay = std::exp(prompt.g[gate]);
        rule.beta = prompt.beta[gate];
        const ptrdiff_t begin =
            row * prompt.v.batch_stride + (first + token) * prompt.v.token_stride + h * prompt.v.head_stride + column;
        ops.widen(at(prompt.v.data, begin, prompt.dtype), rule.values, prompt.dtype, v);
        ops.delta_rule(rule);
        ops.store(out, rule.values, prompt.dtype,
                  const_cast<void*>(at(prompt.out, static_cast<ptrdiff_t>(gate) * values + column, prompt.dtype)));
      }
    });
  }
}

}  // namespace ktinject::attention
