// The forward pass: what is refused, and how long prompts are cut into passes. moe/plan.hpp says what a pass does.
#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "moe/executor.hpp"
#include "moe/experts.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"
#include "runtime/uses.hpp"

namespace ktinject::moe {
namespace {

// Long prompts are cut into passes whose working memory stays below this; the result is the same.
std::atomic<size_t> most_workspace{size_t{512} << 20};
// Tokens that a pass may always have.
constexpr size_t kLeastTokens = 64;

// Guesses are judged after so many; if fewer than the share of experts was right, the next ones are not followed. A
// guess that is wrong costs less than one that is right gains.
constexpr int kJudgedGuesses = 64, kPausedGuesses = 4096;
constexpr double kLeastRight = 0.3;

Workspace& workspace() {
  static thread_local Workspace space;
  return space;
}

// A worker has fetched what the task of a place reads. So experts that were foreseen keep their places.
void follow_guess(Workspace& space, Guesses& guesses) {
  space.routing.keep_places(space.foreseen);
  size_t right = 0;
  for (const int expert : space.routing.active)
    right += std::find(space.foreseen.begin(), space.foreseen.end(), expert) != space.foreseen.end();
  guesses.count(right, space.routing.active.size());
}

}  // namespace

void allow_workspace(size_t bytes) {
  size_t before = most_workspace.load();
  while (before < bytes && !most_workspace.compare_exchange_weak(before, bytes)) {
  }
}

size_t Experts::workspace_bytes(size_t tokens, int top_k) const {
  const size_t rows = tokens * static_cast<size_t>(top_k);
  const size_t results = rows * static_cast<size_t>(down_.panels) * gemm::kPanel * sizeof(float);
  // What belongs to a row besides its values.
  const size_t apart = gemm::has_outliers(config_.format) ? sizeof(gemm::Outliers) : 0;
  // Rows of the input, and of each expert; the intermediate as it is computed, and as the next product takes it.
  return (tokens + rows) * (gate_up_.row_bytes() + apart) + rows * apart +
         rows * (static_cast<size_t>(config_.intermediate_size) * sizeof(uint16_t) + down_.row_bytes()) +
         std::min(results, MoePlan::kMostRoundBytes);
}

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
  for (size_t i = 0; i < static_cast<size_t>(tokens) * static_cast<size_t>(top_k); ++i)
    if (ids[i] >= 0 && ids[i] < config_.experts && is_released(static_cast<int>(ids[i])))
      throw std::invalid_argument("token " + std::to_string(i / static_cast<size_t>(top_k)) + " is routed to expert " +
                                  std::to_string(ids[i]) + ", which is not in RAM");

  runtime::count_uses(this, config_.experts, ids, static_cast<size_t>(tokens) * static_cast<size_t>(top_k));

  const size_t room = most_workspace.load(std::memory_order_relaxed);
  size_t most = kLeastTokens;
  while (most < static_cast<size_t>(tokens) && workspace_bytes(2 * most, top_k) <= room) most *= 2;
  most += (room - std::min(room, workspace_bytes(most, top_k))) /
          (workspace_bytes(most + 1, top_k) - workspace_bytes(most, top_k));
  // As even as possible: each pass reads the weights, and a few tokens at the end would do so for little.
  const auto passes = static_cast<int>((static_cast<size_t>(tokens) + most - 1) / most);
  Workspace& space = workspace();
  for (int pass = 0; pass < passes; ++pass) {
    const runtime::Session workers;  // given back in between: others wait for a pass, not for a whole prompt
    if (!allocated_) throw std::invalid_argument("forward before allocate()");
    if (absent_ > 0) refuse_unloaded(ids, static_cast<size_t>(tokens) * static_cast<size_t>(top_k));
    const int first = static_cast<int>(int64_t{tokens} * pass / passes);
    const int take = static_cast<int>(int64_t{tokens} * (pass + 1) / passes) - first;
    const runtime::TraceSpan span(this, take);
    const size_t slots = static_cast<size_t>(first) * static_cast<size_t>(top_k);
    space.routing.sort(ids + slots, take, top_k, config_.experts);
    if (tokens == 1 && space.foreseen_of == this) follow_guess(space, guesses_);
    space.foreseen_of = nullptr;
    const size_t offset = static_cast<size_t>(first) * static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype);
    const Tokens some{static_cast<const std::byte*>(x) + offset, dtype, weights + slots, take, top_k,
                      static_cast<std::byte*>(out) + offset};
    MoeExecutor(*this, space, *workers, some).run();
  }
}

bool Guesses::pay() {
  if (pause_ == 0) return true;
  --pause_;
  return false;
}

void Guesses::count(size_t right, size_t asked) {
  right_.fetch_add(right, std::memory_order_relaxed);
  asked_.fetch_add(asked, std::memory_order_relaxed);
  lately_right_ += right, lately_asked_ += asked;
  if (++followed_ < kJudgedGuesses) return;
  if (static_cast<double>(lately_right_) < kLeastRight * static_cast<double>(lately_asked_)) pause_ = kPausedGuesses;
  followed_ = 0, lately_right_ = lately_asked_ = 0;
}

void Experts::fetch_ahead(const int32_t* ids, int top_k) const {
  const runtime::Session workers;
  Workspace& space = workspace();
  space.foreseen_of = nullptr;
  if (!allocated_ || top_k < 1 || top_k > kMostSlots || !guesses_.pay()) return;
  space.routing.sort(ids, 1, top_k, config_.experts);
  if (std::ranges::any_of(space.routing.active, [&](int expert) { return is_released(expert); })) return;
  if (space.routing.active.empty() || space.routing.rows() != space.routing.active.size()) return;
  count_workers(*workers, space);
  MoePlan& plan = space.plan;
  plan.make(space.routing, {gate_up_, down_, shards_, space.workers, workers->threads()}, 1);
  if (wake_for(plan) != runtime::ThreadPool::Wake::most) return;
  space.routing.keep_places({ids, static_cast<size_t>(top_k)});
  space.foreseen = space.routing.active;
  space.foreseen_of = this;
  workers->fetch(plan.sizes, [&](int list, int index) -> std::span<const std::byte> {
    const Stage stage = plan.stage_of(list, index);
    if (stage != kGateUp && stage != kDown) return {};
    const MoeTask& task = plan.lists[static_cast<size_t>(list)][static_cast<size_t>(index)];
    const Projection projection = stage == kDown ? Projection::down : Projection::up;
    return {panel(projection, space.routing.active_at(task.of), task.first),
            static_cast<size_t>(task.count) * matrix_of(projection).panel_bytes()};
  });
}

template <class Id>
void Experts::refuse_unloaded(const Id* ids, size_t slots) const {
  for (size_t i = 0; i < slots; ++i)
    if (const auto id = static_cast<int>(ids[i]); id >= 0 && id < config_.experts)
      for (const std::string& name : absent_of(id)) throw std::invalid_argument("forward: never loaded: " + name);
}

template void Experts::forward(const void*, DType, const int32_t*, const float*, int, int, void*) const;
template void Experts::forward(const void*, DType, const int64_t*, const float*, int, int, void*) const;

}  // namespace ktinject::moe
