// How the parts of attention are handed to the pool.
#pragma once

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

inline size_t product(int a, int b, int c = 1) {
  return static_cast<size_t>(a) * static_cast<size_t>(b) * static_cast<size_t>(c);
}

}  // namespace ktinject::attention
