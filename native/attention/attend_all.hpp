// Attention of some heads over stretches of a cache, on the pool: tasks of (some heads of a row, some positions), whose
// results are put together by head.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

#include "attention/tasks.hpp"
#include "gemm/step_ops.hpp"
#include "runtime/counters.hpp"
#include "runtime/scratch.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// Heads of a task; more, where the level wants it, over a cache that has enough stretches for all threads.
inline constexpr int kMostHeads = 32;
inline constexpr int kLongCache = 4096;
// Long caches are cut into so many stretches, and further where these would be longer than this. By the number of
// positions alone: so the order of sums does not depend on the number of threads.
inline constexpr int kStretches = 16;
inline constexpr int kMostStretch = 1024;

// Attention over the cache for `batch` rows of `groups` groups of `heads` heads. What `of` gives for (row, group) has
// all but heads, positions and memory filled in. out [batch, groups, heads, dv], rounded.
struct Over {
  int batch = 1, groups = 1, heads = 1, positions = 0;
  int d = 0, dv = 0;
  float scale = 1;
  const float* sinks = nullptr;  // [groups, heads]
};

// Of the thread that makes a call.
inline runtime::Counters& head_counters() {
  static thread_local runtime::Counters counters;
  return counters;
}

// The tasks of a call, which may have others before and behind them. of(row, group): see Over. Within a Session, which
// outlives this.
template <class Of>
class AttendTasks {
 public:
  AttendTasks(runtime::ThreadPool& workers, const gemm::StepOps& ops, const Over& over, DType dtype, float* out, Of of)
      : ops_(ops),
        over_(over),
        dtype_(dtype),
        out_(out),
        of_(std::move(of)),
        all_(static_cast<size_t>(over.batch * over.groups * over.heads)),
        is_small_(all_ * static_cast<size_t>(over.positions) * static_cast<size_t>(over.d + over.dv) < kSerialProducts),
        blocks_(blocks_of(ops, over)),
        most_((over.heads + blocks_ - 1) / blocks_),
        units_(over.batch * over.groups * blocks_),
        length_(std::min(gemm::round_up((over.positions + kStretches - 1) / kStretches, 4 * gemm::kAttendPositions),
                         kMostStretch)),
        splits_((over.positions + length_ - 1) / length_),
        part_(2 + static_cast<size_t>(over.dv)),
        wide_(scratch_of(ops, over, most_)),
        parts_count_((all_ * static_cast<size_t>(splits_) * part_ + 15) / 16 * 16),
        parts_(parts_count_ + wide_ * static_cast<size_t>(is_small_ ? 1 : workers.threads())) {
    head_counters().begin(0, static_cast<size_t>(units_), splits_);
  }

  // So little that waking workers would cost more.
  bool is_small() const { return is_small_; }
  int count() const { return units_ * splits_; }
  auto stage() {
    return runtime::Stage{count(), [] {}, [this](int index, int worker) { run(index, worker); },
                          runtime::kReadsNothing};
  }
  // Parts of a split lie together: [splits, batch, groups, heads]. Neighbouring tasks read the same stretch. Who is the
  // last with a unit's heads puts them together, if tasks_merge().
  void run(int index, int worker) {
    const int split = index / units_, unit = index % units_, block = unit % blocks_, pair = unit / blocks_;
    gemm::Attend task = of_(pair / over_.groups, pair % over_.groups);
    task.scale = over_.scale;
    const int first = block * most_;
    task.heads = std::min(most_, over_.heads - first);
    task.q += static_cast<size_t>(first) * static_cast<size_t>(over_.d);
    task.first = split * length_;
    task.last = std::min(over_.positions, task.first + length_);
    task.scratch = parts_ + parts_count_ + static_cast<size_t>(worker) * wide_;
    task.out = parts_ + (static_cast<size_t>(split) * all_ + static_cast<size_t>(pair * over_.heads + first)) * part_;
    ops_.attend(task);
    std::atomic<int>& left = units_left_[1 + static_cast<size_t>(unit)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1 || !tasks_merge()) return;
    const int head = pair * over_.heads + first;
    for (int i = head; i < head + task.heads; ++i) merge(i);
  }
  // Else, as it is much work, merge(head) is for head < heads() once all tasks have ended.
  bool tasks_merge() const { return all_ * static_cast<size_t>(splits_) * part_ < kSerialProducts; }
  int heads() const { return static_cast<int>(all_); }
  void merge(int head) {
    ops_.merge(parts_ + static_cast<size_t>(head) * part_, splits_, all_ * part_, over_.dv,
               over_.sinks == nullptr ? nullptr : over_.sinks + head % (over_.groups * over_.heads), dtype_,
               out_ + static_cast<size_t>(head) * static_cast<size_t>(over_.dv));
  }

 private:
  static int blocks_of(const gemm::StepOps& ops, const Over& over) {
    const int wanted = over.positions < kLongCache ? kMostHeads : ops.attend_heads;
    return (over.heads + wanted - 1) / wanted;
  }
  static size_t scratch_of(const gemm::StepOps& ops, const Over& over, int heads) {
    gemm::Attend shape;
    shape.heads = heads;
    shape.d1 = over.d;
    shape.dv = over.dv;
    return (ops.attend_scratch(shape) + 15) / 16 * 16;
  }

  const gemm::StepOps& ops_;
  const Over over_;
  const DType dtype_;
  float* const out_;
  Of of_;
  const size_t all_;  // heads
  const bool is_small_;
  const int blocks_, most_, units_, length_, splits_;
  const size_t part_, wide_, parts_count_;
  const runtime::Scratch parts_;
  runtime::Counters& units_left_ = head_counters();
};

// before(index) for index < items comes first, in the same call: what queries and the cache are made of.
template <class Of, class Before>
void attend_all(const gemm::StepOps& ops, const Over& over, DType dtype, float* out, Of&& of, int items,
                Before&& before) {
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  AttendTasks tasks(workers, ops, over, dtype, out, std::forward<Of>(of));
  const bool serial = tasks.is_small() || workers.threads() == 1;
  auto run = [&](int index, int worker) { tasks.run(index, worker); };
  if (serial || items == 0) {
    for (int index = 0; index < items; ++index) before(index);
    each(workers, serial, tasks.count(), run);
  } else {
    runtime::run_stages(workers, in_parts(workers, items, before, [] {}), tasks.stage());
  }
  if (!tasks.tasks_merge()) each(workers, serial, tasks.heads(), [&](int head, int) { tasks.merge(head); });
}

template <class Of>
void attend_all(const gemm::StepOps& ops, const Over& over, DType dtype, float* out, Of&& of) {
  attend_all(ops, over, dtype, out, of, 0, [](int) {});
}

}  // namespace ktinject::attention
