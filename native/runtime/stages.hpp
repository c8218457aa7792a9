// Work of several stages as one call of the pool, which spares the end of a call and the start of the next between two
// of them: some microseconds, in which a token's weights could be read. And who waits for a stage may ask for the
// memory that the next one reads.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "runtime/counters.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::runtime {

// Asks for memory a piece at a time; false once all has been asked for.
struct Fetch {
  static constexpr size_t kPiece = 2048;
  std::span<const std::byte> memory;

  bool operator()() {
    if (memory.empty()) return false;
    const size_t bytes = std::min(kPiece, memory.size());
    for (size_t at = 0; at < bytes; at += 64)
      _mm_prefetch(reinterpret_cast<const char*>(memory.data() + at), _MM_HINT_T1);
    memory = memory.subspan(bytes);
    return true;
  }
};

// begin() runs once, when all tasks of the stage before have ended, on the thread that ended the last; then, on any,
// run(index, worker) for index < count. reads(index): memory that a task reads and that nothing changes before.
template <class Begin, class Run, class Reads>
struct Stage {
  int count;  // at least one
  Begin begin;
  Run run;
  Reads reads;
};
template <class Begin, class Run, class Reads>
Stage(int, Begin, Run, Reads) -> Stage<Begin, Run, Reads>;

inline constexpr auto kReadsNothing = [](int) { return std::span<const std::byte>(); };

// Two stages as one: tasks of both in any order, behind both begin().
template <class First, class Second>
auto beside(First first, Second second) {
  return Stage{first.count + second.count,
               [first, second] {
                 first.begin();
                 second.begin();
               },
               [first, second](int index, int worker) {
                 if (index < first.count) first.run(index, worker);
                 else second.run(index - first.count, worker);
               },
               [first, second](int index) {
                 return index < first.count ? first.reads(index) : second.reads(index - first.count);
               }};
}

// Runs the stages, one after the other; the first begins at once, on the caller. Throws std::invalid_argument for a
// stage without a task, before anything begins.
template <class... Stages>
void run_stages(ThreadPool& workers, Stages&&... stages) {
  static thread_local Counters counters;
  Counters& left = counters;  // the caller's, for all
  constexpr size_t kStages = sizeof...(Stages);
  // No task would end such a stage, and the next one would be waited for for ever.
  if (((stages.count < 1) || ...)) throw std::invalid_argument("run_stages: a stage has no task");
  auto all = std::forward_as_tuple(stages...);
  std::get<0>(all).begin();
  std::array<int, kStages + 1> starts{};
  size_t at = 0;
  ((starts[at + 1] = starts[at] + stages.count, ++at), ...);
  // Of a stage, its tasks that have not ended, and whether it has begun.
  std::array<int, 2 * kStages> signals;
  for (size_t i = 0; i < kStages; ++i) signals[2 * i] = starts[i + 1] - starts[i], signals[2 * i + 1] = i > 0;
  left.begin(signals);
  auto run = [&]<size_t i>(std::integral_constant<size_t, i>, int index, int worker) {
    auto& stage = std::get<i>(all);
    if constexpr (i > 0) {
      const std::atomic<int>& waits = left[2 * i + 1];
      const bool is_ready = workers.await([&] { return waits.load(std::memory_order_acquire) == 0; },
                                          std::span(&starts[i], 1), worker, Fetch{stage.reads(index)});
      if (!is_ready) return;  // the call is ending without this
    }
    stage.run(index, worker);
    if constexpr (i + 1 < kStages) {
      if (left[2 * i].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      std::get<i + 1>(all).begin();
      left[2 * i + 3].store(0, std::memory_order_release);
    }
  };
  workers.parallel_for(starts[kStages], [&](int index, int worker) {
    [&]<size_t... i>(std::index_sequence<i...>) {
      ((index >= starts[i] && index < starts[i + 1]
            ? run(std::integral_constant<size_t, i>{}, index - starts[i], worker)
            : void()),
       ...);
    }(std::make_index_sequence<kStages>{});
  });
}

}  // namespace ktinject::runtime
