// How the parts of attention are handed to the pool.
#pragma once

#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// Multiplications that are left to the caller: waking workers would cost more.
inline constexpr size_t kSerialProducts = 100'000;

using Wake = runtime::ThreadPool::Wake;

template <class Task>
void each(runtime::ThreadPool& workers, Wake wake, int tasks, Task&& task) {
  if (wake == Wake::none)
    for (int index = 0; index < tasks; ++index) task(index, 0);
  else workers.parallel_for(tasks, task, wake);
}

// Of a decode step: microseconds, in which workers do not take turns at one queue.
template <class Task>
void each(runtime::ThreadPool& workers, bool serial, int tasks, Task&& task) {
  each(workers, serial ? Wake::none : Wake::most, tasks, task);
}

inline size_t product(int a, int b, int c = 1) {
  return static_cast<size_t>(a) * static_cast<size_t>(b) * static_cast<size_t>(c);
}

}  // namespace ktinject::attention
