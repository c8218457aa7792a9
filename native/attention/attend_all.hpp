// Attention of some heads over stretches of a cache, on the pool: tasks of (some heads of a row, some positions), whose
// results are put together by head.
#pragma once

#include <algorithm>
#include <cstddef>

#include "attention/tasks.hpp"
#include "gemm/step_ops.hpp"
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

template <class Of>
void attend_all(const gemm::StepOps& ops, const Over& over, DType dtype, float* out, Of&& of) {
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
  each(workers, serial, units * splits, [&](int index, int worker) {
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
  });
  const bool few = serial || all * static_cast<size_t>(splits) * part < kSerialProducts;
  each(workers, few, static_cast<int>(all), [&](int head, int) {
    ops.merge(parts + static_cast<size_t>(head) * part, splits, all * part, over.dv,
              over.sinks == nullptr ? nullptr : over.sinks + head % heads_of_row, dtype,
              out + static_cast<size_t>(head) * static_cast<size_t>(over.dv));
  });
}

}  // namespace ktinject::attention
