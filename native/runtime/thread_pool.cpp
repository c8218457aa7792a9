#include "runtime/thread_pool.hpp"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktinject {
namespace {

// About 20 microseconds: long enough to bridge the stages of one layer, short enough that idle workers do not steal
// cores from the attention that follows.
constexpr int kSpinsBeforeSleep = 2000;
// A waiting caller gives its core away now and then, for a worker that holds the last task on the same core.
constexpr int kSpinsBeforeYield = 4000;

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  return cpus;
}

// The first line of a small file, without its end; empty if there is none. By C streams: those of C++ keep their locale
// in a global that a second copy of libstdc++ in the process can spoil.
std::string first_line(const std::string& path, const char* prefix = "") {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char line[4096];
  std::string found;
  while (found.empty() && std::fgets(line, sizeof line, file) != nullptr)
    if (std::strncmp(line, prefix, std::strlen(prefix)) == 0) found = line;
  std::fclose(file);
  if (!found.empty() && found.back() == '\n') found.pop_back();
  return found;
}

// CPUs' worth of run time this cgroup may use; infinity where nothing limits it.
double quota_cpus() {
  double quota = INFINITY, maximum = 0, period = 0;
  std::string path = first_line("/proc/self/cgroup", "0::");
  path.erase(0, 3);
  for (;;) {  // a parent's limit binds its children
    const std::string line = first_line("/sys/fs/cgroup" + path + "/cpu.max");
    if (std::sscanf(line.c_str(), "%lf %lf", &maximum, &period) == 2 && period > 0)
      quota = std::min(quota, maximum / period);
    if (path.empty() || path == "/") break;
    path.erase(path.rfind('/'));
  }
  const std::string v1 = "/sys/fs/cgroup/cpu/cpu.cfs_";
  if (std::sscanf(first_line(v1 + "quota_us").c_str(), "%lf", &maximum) == 1 && maximum > 0 &&
      std::sscanf(first_line(v1 + "period_us").c_str(), "%lf", &period) == 1 && period > 0)
    quota = std::min(quota, maximum / period);
  return quota;
}

struct Global {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
  int requested = 0;
};

Global* global = nullptr;
std::once_flag global_once;

Global& state() {
  std::call_once(global_once, [] {
    global = new Global;
    // The child has none of the parent's threads, and perhaps a locked mutex: it starts afresh. The parent's object is
    // left alone on purpose, since joining threads that do not exist would hang.
    pthread_atfork(nullptr, nullptr, [] {
      const int requested = global->requested;
      global = new Global;
      global->requested = requested;
    });
  });
  return *global;
}

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  const std::vector<int> cpus = allowed_cpus();
  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
  } catch (...) {
    stop_ = true;
    wake_.fetch_add(1);
    wake_.notify_all();
    for (auto& thread : workers_) thread.join();
    throw std::runtime_error("could not start " + std::to_string(threads) +
                             " worker threads; set KTINJECT_THREADS lower");
  }
  if (threads > static_cast<int>(cpus.size())) return;  // more threads than CPUs: the system places them better
  for (int worker = 1; worker < threads; ++worker) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpus[static_cast<size_t>(worker)]), &set);
    pthread_setaffinity_np(workers_[static_cast<size_t>(worker - 1)].native_handle(), sizeof set, &set);
  }
}

ThreadPool::~ThreadPool() {
  stop_ = true;
  wake_.fetch_add(1);
  wake_.notify_all();
  for (auto& thread : workers_) thread.join();
}

void ThreadPool::drain(uint32_t generation, int worker) {
  int finished = 0;
  uint64_t seen = word_.load(std::memory_order_acquire);
  for (;;) {
    const auto left = static_cast<uint32_t>(seen);
    if (static_cast<uint32_t>(seen >> 32) != generation || left == 0) break;
    if (!word_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    try {
      if (!failed_.load(std::memory_order_relaxed)) function_(context_, tasks_ - static_cast<int>(left), worker);
    } catch (...) {
      if (!failed_.exchange(true)) failure_ = std::current_exception();
    }
    ++finished;
    seen = word_.load(std::memory_order_acquire);
  }
  // One decrement for all of a worker's tasks: its own unreported tasks keep the job alive meanwhile.
  if (finished > 0) unfinished_.fetch_sub(finished, std::memory_order_acq_rel);
}

void ThreadPool::work(int worker) {
  uint32_t done_generation = 0;
  for (;;) {
    int spins = 0;
    for (;;) {
      const uint64_t word = word_.load(std::memory_order_acquire);
      const auto generation = static_cast<uint32_t>(word >> 32);
      if (generation != done_generation && static_cast<uint32_t>(word) != 0) {
        drain(generation, worker);
        done_generation = generation;
        spins = 0;
        continue;
      }
      if (stop_.load(std::memory_order_relaxed)) return;
      if (++spins < kSpinsBeforeSleep) {
        _mm_pause();
        continue;
      }
      const uint32_t ticket = wake_.load();
      sleepers_.fetch_add(1);
      // Looked at again after announcing the sleep: a job published in between has either been seen here or sees the
      // sleeper.
      const uint64_t again = word_.load();
      const bool idle = static_cast<uint32_t>(again) == 0 || static_cast<uint32_t>(again >> 32) == done_generation;
      if (idle && !stop_.load()) wake_.wait(ticket);
      sleepers_.fetch_sub(1);
      spins = 0;
    }
  }
}

void ThreadPool::run(int tasks, Function function, void* context) {
  if (tasks <= 0) return;
  if (tasks == 1 || threads_ == 1) {
    for (int index = 0; index < tasks; ++index) function(context, index, 0);
    return;
  }
  tasks_ = tasks;
  function_ = function;
  context_ = context;
  failed_.store(false, std::memory_order_relaxed);
  unfinished_.store(tasks, std::memory_order_relaxed);
  uint32_t generation = static_cast<uint32_t>(word_.load(std::memory_order_relaxed) >> 32) + 1;
  if (generation == 0) generation = 1;
  word_.store((uint64_t{generation} << 32) | static_cast<uint32_t>(tasks));
  if (sleepers_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  drain(generation, 0);
  for (int spins = 0; unfinished_.load(std::memory_order_acquire) != 0;) {
    _mm_pause();
    if (++spins == kSpinsBeforeYield) {
      spins = 0;
      sched_yield();
    }
  }
  if (failed_.load()) {
    std::exception_ptr failure;
    std::swap(failure, failure_);
    std::rethrow_exception(failure);
  }
}

std::byte* ThreadPool::buffer(size_t slot, size_t bytes) {
  if (slot >= buffers_.size()) buffers_.resize(slot + 1);
  Block& block = buffers_[slot];
  if (block.size() < bytes) {
    block = Block();  // the old one is freed first: both at once may not fit
    block = Block(bytes + bytes / 4);
  }
  return block.data();
}

int default_threads() {
  const auto cpus = static_cast<int>(allowed_cpus().size());
  const double quota = std::ceil(quota_cpus());
  return std::max(1, quota < cpus ? static_cast<int>(quota) : cpus);
}

std::shared_ptr<ThreadPool> pool() {
  Global& here = state();
  std::lock_guard lock(here.mutex);
  if (!here.pool) here.pool = std::make_shared<ThreadPool>(here.requested > 0 ? here.requested : default_threads());
  return here.pool;
}

void set_threads(int threads) {
  if (threads < 0 || threads > 4096)
    throw std::invalid_argument("threads: found " + std::to_string(threads) + "; allowed: 0 (automatic) to 4096");
  Global& here = state();
  std::lock_guard lock(here.mutex);
  here.requested = threads;
  here.pool.reset();
}

}  // namespace ktinject
