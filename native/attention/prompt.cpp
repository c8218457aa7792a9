// Tasks of (some tokens, the heads that share keys), those with the most keys first.
#include "attention/prompt.hpp"

#include <algorithm>
#include <atomic>

#include "attention/tasks.hpp"
#include "gemm/backends.hpp"
#include "runtime/scratch.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

// Rows of a task, tokens times heads: so many that converting keys and values costs little beside the products, and so
// few that their queries, scores and results stay in the second cache. Of tokens no fewer than this.
constexpr int kRows = 256;
constexpr int kLeastTokens = 16;

const void* at(const void* data, ptrdiff_t values, size_t width) {
  return static_cast<const std::byte*>(data) + values * static_cast<ptrdiff_t>(width);
}

}  // namespace

bool attend_prompt(const PromptAttention& prompt) {
  const gemm::StepOps& ops = gemm::step_ops();
  const int shared = prompt.heads / prompt.groups;
  const int most = std::min(prompt.tokens, std::max(kLeastTokens, kRows / shared));
  const int blocks = (prompt.tokens + most - 1) / most, units = prompt.batch * prompt.groups;
  gemm::AttendPrompt all;
  all.heads = shared;
  all.tokens = most;
  all.keys = prompt.keys;
  all.d = prompt.key_size;
  all.dv = prompt.value_size;
  all.scale = prompt.scale;
  all.dtype = prompt.dtype;
  all.q_stride = prompt.q.token_stride;
  all.q_head_stride = prompt.q.head_stride;
  all.k_stride = prompt.k.token_stride;
  all.v_stride = prompt.v.token_stride;
  all.mask_stride = prompt.mask.token_stride;
  all.mask_is_bool = prompt.mask.is_bool;
  all.lowest = prompt.mask.lowest;
  all.out_stride = static_cast<ptrdiff_t>(product(prompt.heads, prompt.value_size));
  const size_t width = dtype_bytes(prompt.dtype);
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const bool serial =
      product(prompt.batch * prompt.tokens, prompt.keys, prompt.heads * prompt.key_size) < kSerialProducts;
  const size_t own = (ops.attend_prompt_scratch(all) + 15) / 16 * 16;
  const runtime::Scratch memory(own * static_cast<size_t>(serial ? 1 : workers.threads()));
  std::atomic<bool> is_whole{true};
  each(workers, serial, units * blocks, [&](int index, int worker) {
    const int block = blocks - 1 - index / units, unit = index % units;
    const int row = unit / prompt.groups, group = unit % prompt.groups, first = block * most;
    gemm::AttendPrompt task = all;
    task.tokens = std::min(most, prompt.tokens - first);
    task.seen = prompt.keys - prompt.tokens + first;
    task.q =
        at(prompt.q.data,
           row * prompt.q.batch_stride + first * prompt.q.token_stride + group * shared * prompt.q.head_stride, width);
    task.k = at(prompt.k.data, row * prompt.k.batch_stride + group * prompt.k.head_stride, width);
    task.v = at(prompt.v.data, row * prompt.v.batch_stride + group * prompt.v.head_stride, width);
    if (prompt.mask.data != nullptr)
      task.mask = at(prompt.mask.data, row * prompt.mask.batch_stride + first * prompt.mask.token_stride,
                     prompt.mask.is_bool ? 1 : width);
    task.sinks = prompt.sinks == nullptr ? nullptr : prompt.sinks + group * shared;
    task.scratch = memory + own * static_cast<size_t>(worker);
    const ptrdiff_t begin =
        static_cast<ptrdiff_t>(product(row, prompt.tokens) + static_cast<size_t>(first)) * all.out_stride;
    task.out = const_cast<void*>(at(prompt.out, begin + group * shared * prompt.value_size, width));
    if (!ops.attend_prompt(task)) is_whole.store(false, std::memory_order_relaxed);
  });
  return is_whole.load(std::memory_order_relaxed);
}

}  // namespace ktinject::attention
