// The forward pass: what is refused, and how long prompts are cut into passes. moe/plan.hpp says what a pass does.
#include <algorithm>
#include <stdexcept>

#include "moe/executor.hpp"
#include "moe/experts.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"

namespace ktinject::moe {
namespace {

// Long prompts are cut so that the working memory stays below this; the result is the same.
constexpr size_t kMostWorkspaceBytes = size_t{512} << 20;

}  // namespace

template <class Id>
void Experts::forward(const void* x, DType dtype, const Id* ids, const float* weights, int tokens, int top_k,
                      void* out) const {
  if (top_k < 1 || top_k > kMostSlots)
    throw std::invalid_argument("experts a token: found " + std::to_string(top_k) + "; allowed: 1 to " +
                                std::to_string(kMostSlots));
  for (size_t i = 0; i < static_cast<size_t>(tokens) * static_cast<size_t>(top_k); ++i)
    if (ids[i] < -1 || ids[i] > config_.experts)
      throw std::out_of_range("token " + std::to_string(i / static_cast<size_t>(top_k)) + " is routed to expert " +
                              std::to_string(ids[i]) + "; allowed: 0 to " + std::to_string(config_.experts - 1) +
                              ", or -1 or " + std::to_string(config_.experts) + " for none");

  const size_t row_bytes =
      gate_up_.row_bytes() +
      static_cast<size_t>(top_k) *
          (gate_up_.row_bytes() + static_cast<size_t>(down_.panels) * gemm::kPanel * sizeof(float) +
           static_cast<size_t>(config_.intermediate_size) * 3);
  const int most = std::max(64, static_cast<int>(std::min<size_t>(kMostWorkspaceBytes / row_bytes, 1u << 20)));
  // As even as possible: each pass reads the weights, and a few tokens at the end would do so for little.
  const auto passes = static_cast<int>((int64_t{tokens} + most - 1) / most);
  static thread_local Workspace space;
  for (int pass = 0; pass < passes; ++pass) {
    const runtime::Session workers;  // given back in between: others wait for a pass, not for a whole prompt
    if (!allocated_) throw std::invalid_argument("forward before allocate()");
    const int first = static_cast<int>(int64_t{tokens} * pass / passes);
    const int take = static_cast<int>(int64_t{tokens} * (pass + 1) / passes) - first;
    const runtime::TraceSpan span(this, take);
    const size_t slots = static_cast<size_t>(first) * static_cast<size_t>(top_k);
    space.routing.sort(ids + slots, take, top_k, config_.experts);
    const size_t offset = static_cast<size_t>(first) * static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype);
    const Tokens some{static_cast<const std::byte*>(x) + offset, dtype, weights + slots, take, top_k,
                      static_cast<std::byte*>(out) + offset};
    MoeExecutor(*this, space, *workers, some).run();
  }
}

template void Experts::forward(const void*, DType, const int32_t*, const float*, int, int, void*) const;
template void Experts::forward(const void*, DType, const int64_t*, const float*, int, int, void*) const;

}  // namespace ktinject::moe
