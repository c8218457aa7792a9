// How the parts of attention are handed to the pool.
#pragma once

#include <algorithm>
#include <cstddef>

#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// Multiplications that are left to the caller: waking workers would cost more.
inline constexpr size_t kSerialProducts = 100'000;

template <class Task>
void each(runtime::ThreadPool& workers, bool serial, int tasks, Task&& task) {
  if (serial)
    for (int index = 0; index < tasks; ++index) task(index, 0);
  else workers.parallel_for(tasks, task);
}

// A stage of a call: item(index) for index < items, at least one, some of them a task.
template <class Begin, class Item>
auto in_parts(const runtime::ThreadPool& workers, int items, Item&& item, Begin begin) {
  const int together = (items + workers.threads() - 1) / workers.threads();
  return runtime::Stage{(items + together - 1) / together, begin,
                        [&item, items, together](int index, int) {
                          for (int i = index * together; i < std::min(items, (index + 1) * together); ++i) item(i);
                        },
                        runtime::kReadsNothing};
}

inline size_t product(int a, int b, int c = 1) {
  return static_cast<size_t>(a) * static_cast<size_t>(b) * static_cast<size_t>(c);
}

}  // namespace ktinject::attention
