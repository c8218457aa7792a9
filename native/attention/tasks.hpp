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

// The same where the tasks of each row read a weight of `bytes`, so many each: of one row, idle workers bring nearer
// what is read behind it.
template <class Task>
void each_reading(runtime::ThreadPool& workers, bool serial, int rows, const void* weight, size_t bytes,
                  size_t bytes_of_task, Task&& task) {
  const int tasks = rows * static_cast<int>((bytes + bytes_of_task - 1) / bytes_of_task);
  if (serial || rows > 1) return each(workers, serial, tasks, task);
  runtime::Reads reads;
  reads.add(weight, bytes, bytes_of_task);
  workers.parallel_reads(reads, task);
}

inline size_t product(int a, int b, int c = 1) {
  return static_cast<size_t>(a) * static_cast<size_t>(b) * static_cast<size_t>(c);
}

}  // namespace ktinject::attention
