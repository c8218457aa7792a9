// Attention of some heads over stretches of a cache, on the pool: tasks of (some heads of a row, some positions), whose
// results are put together by head.
#pragma once

#include <algorithm>
#include <cstddef>

#include "attention/tasks.hpp"
#include "gemm/step_ops.hpp"
#include "runtime/counters.hpp"
#include "runtime/scratch.hpp"
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
inline runtime::Counters& attend_counters() {
  static thread_local runtime::Counters counters;
  return counters;
}

// before(index) for index < items comes first, in the same call: what queries and the cache are made of.
template <class Of, class Before>
void attend_all(const gemm::StepOps& ops, const Over& over, DType dtype, float* out, Of&& of, int items,
                Before&& before) {
  const int heads_of_row = over.groups * over.heads;
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const auto all = static_cast<size_t>(over.batch * over.groups * over.heads);
  const size_t products = all * static_cast<size_t>(over.positions) * static_cast<size_t>(over.d + over.dv);
  const bool serial = products < kSerialProducts || workers.threads() == 1;
  const int wanted = over.positions < kLongCache ? kMostHeads : ops.attend_heads;
  const int blocks = (over.heads + wanted - 1) / wanted, most = (over.heads + blocks - 1) / blocks;
  const int units = over.batch * over.groups * blocks;
  const int length = std::min(
      gemm::round_up((over.positions + kStretches - 1) / kStretches, 4 * gemm::kAttendPositions), kMostStretch);
  const int splits = (over.positions + length - 1) / length;

  const size_t part = 2 + static_cast<size_t>(over.dv);
  gemm::Attend shape;
  shape.heads = most;
  shape.d1 = over.d;
  shape.dv = over.dv;
  const size_t wide = (ops.attend_scratch(shape) + 15) / 16 * 16;
  const size_t parts_count = (all * static_cast<size_t>(splits) * part + 15) / 16 * 16;
  const runtime::Scratch parts(parts_count + wide * static_cast<size_t>(serial ? 1 : workers.threads()));
  float* own = parts + parts_count;
  // Parts of a split lie together: [splits, batch, groups, heads]. Neighbouring tasks read the same stretch.
  auto attend = [&](int index, int worker) {
    const int split = index / units, unit = index % units, block = unit % blocks, pair = unit / blocks;
    gemm::Attend task = of(pair / over.groups, pair % over.groups);
    task.scale = over.scale;
    const int first = block * most;
    task.heads = std::min(most, over.heads - first);
    task.q += static_cast<size_t>(first) * static_cast<size_t>(over.d);
    task.first = split * length;
    task.last = std::min(over.positions, task.first + length);
    task.scratch = own + static_cast<size_t>(worker) * wide;
    task.out = parts + (static_cast<size_t>(split) * all + static_cast<size_t>(pair * over.heads + first)) * part;
    ops.attend(task);
  };
  auto merge = [&](int head) {
    ops.merge(parts + static_cast<size_t>(head) * part, splits, all * part, over.dv,
              over.sinks == nullptr ? nullptr : over.sinks + head % heads_of_row, dtype,
              out + static_cast<size_t>(head) * static_cast<size_t>(over.dv));
  };
  const bool few = all * static_cast<size_t>(splits) * part < kSerialProducts;
  if (serial) {
    for (int index = 0; index < items; ++index) before(index);
    for (int index = 0; index < units * splits; ++index) attend(index, 0);
    for (int head = 0; head < static_cast<int>(all); ++head) merge(head);
    return;
  }
  const int together = std::max(1, (items + workers.threads() - 1) / workers.threads());
  const int early[] = {(items + together - 1) / together};  // tasks that attention waits for
  runtime::Counters& left = attend_counters();
  left.begin(early[0], static_cast<size_t>(units), splits);
  each(workers, false, early[0] + units * splits, [&](int index, int worker) {
    if (index < early[0]) {
      for (int i = index * together; i < std::min(items, (index + 1) * together); ++i) before(i);
      left[0].fetch_sub(1, std::memory_order_acq_rel);
      return;
    }
    index -= early[0];
    const bool is_ready = workers.await([&] { return left[0].load(std::memory_order_acquire) == 0; }, early, worker,
                                        [] { return false; });
    if (!is_ready) return;  // the call is ending without this
    attend(index, worker);
    // Who is the last with a unit's heads puts them together, where this is little work.
    const int unit = index % units;
    if (left[1 + static_cast<size_t>(unit)].fetch_sub(1, std::memory_order_acq_rel) != 1 || !few) return;
    const int first = unit / blocks * over.heads + unit % blocks * most;
    for (int head = first; head < std::min(first + most, (unit / blocks + 1) * over.heads); ++head) merge(head);
  });
  if (!few) each(workers, false, static_cast<int>(all), [&](int head, int) { merge(head); });
}

template <class Of>
void attend_all(const gemm::StepOps& ops, const Over& over, DType dtype, float* out, Of&& of) {
  attend_all(ops, over, dtype, out, of, 0, [](int) {});
}

}  // namespace ktinject::attention
