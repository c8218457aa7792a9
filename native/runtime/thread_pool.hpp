// The CPU workers. One call publishes tasks, the caller works on them too, and returns when all are done.
//
// There is no barrier that a thread has to reach. All progress is counted in tasks: a worker that the operating system
// does not schedule in time simply claims nothing, and the others do its share. So threads >= cores, a busy neighbour
// or another library's spinning threads cost throughput but no scheduler tick.
//
// One 64-bit word holds (generation, tasks left). A claim is a compare-and-swap on it, so a late worker can never claim
// from a later call by mistake, and touches a job's data only while one of its own tasks keeps that job alive.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/memory.hpp"

namespace ktinject {

class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Runs task(index, worker) for every index in [0, tasks), worker in [0, threads()); the caller is worker 0. The first
  // exception of a task is rethrown here once all tasks have ended. Calls are made by one thread at a time (see
  // `session`).
  template <class Task>
  void parallel_for(int tasks, Task&& task) {
    run(
        tasks,
        [](void* context, int index, int worker) {
          (*static_cast<std::remove_reference_t<Task>*>(context))(index, worker);
        },
        &task);
  }

  // Held for a whole layer: serialises callers from several Python threads, who share the workers and the buffers.
  std::unique_lock<std::mutex> session() { return std::unique_lock<std::mutex>(session_); }

  // Working memory of the layer that runs, at least `bytes` long, 64-byte aligned, contents undefined. It only ever
  // grows, so a warmed-up layer allocates nothing. Call inside a session.
  std::byte* buffer(size_t slot, size_t bytes);

 private:
  using Function = void (*)(void* context, int index, int worker);
  void run(int tasks, Function function, void* context);
  void work(int worker);
  void drain(uint32_t generation, int worker);

  const int threads_;
  std::mutex session_;
  std::vector<std::thread> workers_;
  std::vector<Block> buffers_;

  alignas(64) std::atomic<uint64_t> word_{0};  // generation << 32 | tasks left
  alignas(64) std::atomic<int> unfinished_{0};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  // Written by the caller before it publishes a generation, read by a worker only after a successful claim from it.
  int tasks_ = 0;
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

// min(affinity, cgroup quota), or what set_threads() asked for.
int default_threads();

// The process's pool, made on first use; made anew in a forked child, where the parent's workers do not exist.
std::shared_ptr<ThreadPool> pool();

// 0 means default_threads(). Holds from the next call on; a running one keeps the pool it has.
void set_threads(int threads);

}  // namespace ktinject
