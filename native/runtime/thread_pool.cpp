#include "runtime/thread_pool.hpp"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <stdexcept>
#include <string>
#include <system_error>

#include "runtime/alone.hpp"
#include "runtime/cpu_features.hpp"
#include "runtime/denormals.hpp"
#include "runtime/pool_queue.hpp"

namespace ktinject::runtime {
namespace {

// Long enough to bridge what a model does between two layers' experts on one token (40 to 60 µs on a GPU, more with a
// long cache; woken workers are 13 µs late), short enough that idle ones do not steal cores from whoever has work.
constexpr double kPatienceMicroseconds = 100;
// Workers for each spare one.
constexpr int kWorkersForSpare = 8;

thread_local double patience_us = kPatienceMicroseconds;
thread_local Room left_room = Room::none;

// A waiting thread gives its core away now and then, for a worker that holds the last task on the same core.
constexpr double kYieldMicroseconds = 10;
constexpr int kPausesBetweenClocks = 64;
constexpr double kCheckMicroseconds = 100e3;
// Workers that claim from one word.
constexpr int kGroup = 16;
// Sleepers that each woken thread wakes in turn: a tree is faster than one thread waking all.
constexpr int kWakeFan = 3;

// How fast this machine counts and pauses, measured once: the clock is read seldom in a spin.
struct Pace {
  double ticks_per_us;
  double pauses_per_us;
};

const Pace& pace() {
  static const Pace measured = [] {
    using Clock = std::chrono::steady_clock;
    double ticks = 0, pauses = 1e9;
    for (int round = 0; round < 3; ++round) {  // the fastest: an interrupt makes a round longer
      constexpr int kPauses = 500;
      const auto start = Clock::now();
      const uint64_t first = __rdtsc();
      for (int i = 0; i < kPauses; ++i) _mm_pause();
      const auto span = static_cast<double>(__rdtsc() - first);
      const double us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      if (us / kPauses < pauses) {
        pauses = us / kPauses;
        ticks = span / us;
      }
    }
    return Pace{ticks, 1 / pauses};
  }();
  return measured;
}

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

#pragma GCC push_options
#pragma GCC target("waitpkg")
// Sleeps lightly until the cache line of `word` is written or the time-stamp counter reaches `deadline`.
void wait_for_write(const std::atomic<uint32_t>& word, uint32_t seen, uint64_t deadline) {
  _umonitor(const_cast<std::atomic<uint32_t>*>(&word));
  if (word.load(std::memory_order_acquire) == seen) _umwait(1, deadline);
}
#pragma GCC pop_options

struct Global {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
  int threads = 0;
  bool crowded = false;
  int virtual_nodes = 0;
  // The machine's nodes for these CPUs: to find them takes some files of each CPU.
  std::vector<int> cpus;
  std::vector<Node> usable;
};

constinit Turns turns;
thread_local std::shared_ptr<ThreadPool> own_pool;  // of a thread that computes alone
std::atomic<uint64_t> sessions{0};

Global* global = nullptr;
std::once_flag global_once;

Global& state() {
  std::call_once(global_once, [] {
    global = new Global;
    // The child has none of the parent's threads, and perhaps a locked mutex: it starts afresh. The parent's object is
    // left alone on purpose, since joining threads that do not exist would hang.
    pthread_atfork(nullptr, nullptr, [] {
      auto* fresh = new Global;
      fresh->threads = global->threads;
      fresh->crowded = global->crowded;
      fresh->virtual_nodes = global->virtual_nodes;
      global = fresh;
    });
  });
  return *global;
}

std::vector<Node> nodes_of(Global& here) {
  const std::vector<int> cpus = allowed_cpus();
  if (here.virtual_nodes > 1) return virtual_nodes(here.virtual_nodes, cpus);
  if (here.cpus != cpus) {
    here.usable = usable_nodes(cpus);
    here.cpus = cpus;
  }
  return here.usable;
}

// Places among a node's CPUs: the first `count`, those of a core side by side.
std::vector<size_t> places_by_core(const Node& node, size_t count) {
  std::vector<size_t> places;
  for (size_t first = 0; first < count; ++first)
    for (size_t i = first; i < count; ++i) {
      const bool is_same = i == first || (!node.cores.empty() && node.cores[i] == node.cores[first]);
      if (is_same && std::find(places.begin(), places.end(), i) == places.end()) places.push_back(i);
    }
  return places;
}

}  // namespace

ThreadPool::ThreadPool(int threads, std::vector<Node> nodes) : threads_(threads), nodes_(std::move(nodes)) {
  pace();
  const size_t parts = nodes_.size();
  size_t cpus = 0;
  for (const Node& node : nodes_) cpus += node.cpus.size();
  // Threads by CPUs; evenly over virtual nodes, of which some may have none.
  const bool by_cpus = nodes_[0].id >= 0 && cpus > 0;
  size_t before = 0;
  int placed = 0;
  for (size_t n = 0; n < parts; ++n) {
    before += by_cpus ? nodes_[n].cpus.size() : 1;
    const size_t all = by_cpus ? cpus : parts;
    const int until = static_cast<int>((static_cast<size_t>(threads) * before + all / 2) / all);
    const int here = until - placed, groups = std::max(1, (here + kGroup - 1) / kGroup);
    const int queues = groups == 1 ? std::max(1, here) : groups;
    spans_.push_back({queue_count_, queues, groups});
    // With more threads than CPUs the system places them better, within their node.
    const bool has_own = static_cast<size_t>(threads) <= cpus;
    const std::vector<size_t> own =
        places_by_core(nodes_[n], has_own ? std::min(static_cast<size_t>(here), nodes_[n].cpus.size()) : 0);
    for (int i = 0; i < here; ++i) {
      const auto at = static_cast<size_t>(i);
      const bool is_placed = at < own.size();
      seats_.push_back({is_placed ? nodes_[n].cpus[own[at]] : -1,
                        is_placed && !nodes_[n].cores.empty() ? nodes_[n].cores[own[at]] : -1, static_cast<int>(n),
                        queue_count_ + i * queues / here, i});
    }
    queue_count_ += queues;
    placed = until;
  }
  // A whole core, of which one or two threads are workers.
  const Seat& last = seats_.back();
  const auto of_last_core =
      static_cast<int>(std::count_if(seats_.begin(), seats_.end(), [&](const Seat& s) { return s.core == last.core; }));
  spare_ = std::min({threads / kWorkersForSpare, kMostSpare, last.core < 0 ? kMostSpare : of_last_core});
  for (const Node& node : nodes_)
    for (size_t i = 0; i < node.cores.size(); ++i) {
      const auto cpu = static_cast<size_t>(node.cpus[i]);
      if (cpu >= core_of_.size()) core_of_.resize(cpu + 1, -1);
      core_of_[cpu] = node.cores[i];
    }
  queues_ = std::make_unique<Queue[]>(static_cast<size_t>(queue_count_));
  for (const Seat& seat : seats_) ++queues_[static_cast<size_t>(seat.queue)].workers;
  for (size_t n = 0; n < parts; ++n)
    for (int i = 0; i < spans_[n].queues; ++i)
      queues_[static_cast<size_t>(spans_[n].first + i)].node = static_cast<int>(n);
  seat_ = std::make_unique<std::atomic<int>[]>(seats_.size());
  for (size_t i = 0; i < seats_.size(); ++i) seat_[i] = static_cast<int>(i);
  for (const auto& [first, count, groups] : spans_)
    for (int own = first; own < first + count; ++own) {
      std::vector<int> order;
      for (int i = 0; i < count; ++i) order.push_back(first + (own - first + i) % count);
      for (int i = 0; i < queue_count_ - count; ++i) order.push_back((first + count + i) % queue_count_);
      order_.push_back(std::move(order));
    }
  // All that calls need: a call that had begun and then found no memory would leave tasks counted that nobody ends.
  shares_.resize(static_cast<size_t>(queue_count_));
  dealt_.reserve(static_cast<size_t>(queue_count_));

  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int worker = 1; worker < threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
    for (int worker = 1; worker < threads; ++worker) pin(worker);
  } catch (const std::system_error&) {
    join_all();
    throw std::runtime_error("could not start " + std::to_string(threads) +
                             " worker threads; set KTINJECT_THREADS lower");
  } catch (...) {
    join_all();
    throw;
  }
}

// A new thread has the CPUs of the one that made it, which may be fewer than the pool's: so all are set.
void ThreadPool::pin(int worker) {
  const Seat& seat = seat_of(worker);
  std::vector<int> cpus;
  if (seat.cpu >= 0) cpus = {seat.cpu};
  else
    for (size_t n = 0; n < nodes_.size(); ++n)
      if (nodes_[n].id < 0 || static_cast<int>(n) == seat.node)
        cpus.insert(cpus.end(), nodes_[n].cpus.begin(), nodes_[n].cpus.end());
  const CpuMask mask(cpus);
  pthread_setaffinity_np(workers_[static_cast<size_t>(worker - 1)].native_handle(), mask.bytes(), mask.get());
}

void ThreadPool::take_seat() {
  if (seat_of(0).cpu < 0) return;
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu == seat_of(0).cpu) return;
  const auto at = static_cast<size_t>(cpu);
  const int core = at < core_of_.size() ? core_of_[at] : -1;
  const bool is_mine = core >= 0 && core == seat_of(0).core;
  int there = 0;  // the worker on this CPU, else one on this core, where it is not the caller's already
  for (int worker = 1; worker < threads_; ++worker) {
    const Seat& seat = seat_of(worker);
    if (seat.cpu == cpu) {
      there = worker;
      break;
    }
    if (core >= 0 && seat.core == core && !is_mine) there = worker;
  }
  if (there == 0) return;
  const int mine = seat_[0].load(std::memory_order_relaxed);
  seat_[0].store(seat_[static_cast<size_t>(there)].load(std::memory_order_relaxed), std::memory_order_relaxed);
  seat_[static_cast<size_t>(there)].store(mine, std::memory_order_relaxed);
  pin(there);
}

ThreadPool::~ThreadPool() { join_all(); }

void ThreadPool::join_all() {
  stop_ = true;
  const auto wake_all = [](News& news) {
    news.generation.fetch_add(1);
    futex(news.generation, FUTEX_WAKE_PRIVATE, INT_MAX);
  };
  wake_all(news_);
  for (News& news : spare_news_) wake_all(news);
  for (auto& thread : workers_) thread.join();
}

int ThreadPool::workers_of(int node) const {
  return static_cast<int>(std::count_if(seats_.begin(), seats_.end(), [&](const Seat& s) { return s.node == node; }));
}

void ThreadPool::fail() {
  // `run` reads the exception only after all tasks have been counted, this one too.
  if (!failed_.exchange(true)) failure_ = std::current_exception();
}

void ThreadPool::execute(Queue& queue, uint32_t left, int worker) {
  if (stopped()) return;
  try {
    function_(context_, queue.share.list, queue.share.at(queue.share.total - static_cast<int>(left)), worker);
  } catch (...) {
    fail();
  }
}

void ThreadPool::drain(uint32_t generation, int worker) {
  const int own = seat_of(worker).queue, node = seat_of(worker).node;
  for (const int index : order_[static_cast<size_t>(own)]) {
    Queue& queue = queues_[static_cast<size_t>(index)];
    if (queue.node != node && !steal_.load(std::memory_order_relaxed) && queue.workers > 0) continue;
    uint64_t seen = queue.word.load(std::memory_order_acquire);
    uint32_t done = 0;
    for (;;) {
      const auto left = static_cast<uint32_t>(seen);
      if (static_cast<uint32_t>(seen >> 32) != generation || left == 0) break;
      if (!queue.word.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
        continue;
      execute(queue, left, worker);
      ++done;
      look_for_interrupt();
      seen = queue.word.load(std::memory_order_acquire);
    }
    // Before others' queues are looked at, for the caller may wait for these tasks only. From then on the job may end,
    // and what is claimed from another queue keeps it alive.
    if (done > 0) queues_[static_cast<size_t>(own)].finished.fetch_add(done, std::memory_order_acq_rel);
  }
}

// Workers have no check.
void ThreadPool::look_for_interrupt() {
  auto& [check, due] = interruption();
  if (check == nullptr) return;
  const uint64_t now = __rdtsc();
  if (now < due) return;
  const bool is_first = due == 0;
  due = now + static_cast<uint64_t>(kCheckMicroseconds * pace().ticks_per_us);
  if (is_first) return;
  try {
    check();
    if (forks() != forks_)
      throw std::runtime_error("this process was forked off within a computation, whose threads it does not have");
  } catch (...) {
    interrupted_ = std::current_exception();
    failed_.store(true);
  }
}

// How many workers, the last ones, a call leaves out.
int ThreadPool::spared(Steal steal, Wake wake) const {
  // Without stealing, a spare worker may be the only one that has the tasks of its node.
  if (steal == Steal::no || left_room == Room::none) return 0;
  if (wake == Wake::most) return spare_;
  return wake == Wake::all && left_room == Room::always ? std::min(1, spare_) : 0;
}

// One list is for all nodes; of several, each is for a node. The vectors have their memory.
void ThreadPool::deal(std::span<const int> tasks, Steal steal, Wake wake) noexcept {
  const bool has_own = wake == Wake::most && steal == Steal::yes;
  std::fill(shares_.begin(), shares_.end(), Share{});
  dealt_.clear();
  const auto share_out = [&](size_t list) {
    const auto queues = static_cast<int>(dealt_.size());
    const int each = tasks[list] / queues, more = tasks[list] % queues;
    for (int i = 0; i < queues; ++i)
      shares_[static_cast<size_t>(dealt_[static_cast<size_t>(i)])] = {static_cast<int>(list), i, queues,
                                                                      each + (i < more ? 1 : 0)};
    dealt_.clear();
  };
  for (size_t n = 0; n < spans_.size() && (tasks.size() == 1 || n < tasks.size()); ++n) {
    const Span& span = spans_[n];
    for (int i = 0; i < (has_own ? span.queues : span.groups); ++i) dealt_.push_back(span.first + i);
    if (tasks.size() > 1) share_out(n);
  }
  if (tasks.size() > 1) return;
  // A queue whose only worker is left out would be others' work.
  for (int i = 0, out = has_own ? spared(steal, wake) : 0; i < out; ++i)
    if (const int queue = seat_of(threads_ - 1 - i).queue; queues_[static_cast<size_t>(queue)].workers == 1)
      std::erase(dealt_, queue);
  share_out(0);
}

bool ThreadPool::help(std::span<const int> limits, int worker) {
  // The task that waits keeps the job alive, so its queues may be read before anything is claimed.
  for (int index = 0; index < queue_count_; ++index) {
    Queue& queue = queues_[static_cast<size_t>(index)];
    uint64_t seen = queue.word.load(std::memory_order_acquire);
    const auto left = static_cast<uint32_t>(seen);
    if (left == 0 ||
        queue.share.at(queue.share.total - static_cast<int>(left)) >= limits[static_cast<size_t>(queue.share.list)])
      continue;
    if (!queue.word.compare_exchange_strong(seen, seen - 1, std::memory_order_acq_rel)) continue;
    execute(queue, left, worker);
    queue.finished.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }
  return false;
}

void ThreadPool::relax(int turn) {
  static const int turns = std::max(1, static_cast<int>(kYieldMicroseconds * pace().pauses_per_us));
  if (turn % turns == turns - 1) sched_yield();
  else _mm_pause();
}

// True as soon as there is a new generation, false after a while without one.
bool ThreadPool::spin(const News& news, uint32_t seen) const {
  static const bool can_wait = has_waitpkg();
  const uint64_t end = __rdtsc() + patience_.load(std::memory_order_relaxed);
  do {
    if (can_wait) {  // the system may cut a wait short, so there can be several
      wait_for_write(news.generation, seen, end);
      if (news.generation.load(std::memory_order_acquire) != seen) return true;
      continue;
    }
    for (int i = 0; i < kPausesBetweenClocks; ++i) {
      if (news.generation.load(std::memory_order_acquire) != seen) return true;
      _mm_pause();
    }
  } while (__rdtsc() < end);
  return false;
}

void ThreadPool::wake_some(News& news) {
  if (news.sleepers.load() > 0) futex(news.generation, FUTEX_WAKE_PRIVATE, kWakeFan);
}

void ThreadPool::publish(News& news, uint32_t generation) {
  news.generation.store(generation);
  wake_some(news);
}

void ThreadPool::work(int worker) {
  const Denormals zero(Denormals::kZero);
  News& news = news_of(worker);
  uint32_t seen = 0;
  for (;;) {
    while (!spin(news, seen)) {
      news.sleepers.fetch_add(1);
      // The kernel compares once more, so a generation published meanwhile is not slept through.
      futex(news.generation, FUTEX_WAIT_PRIVATE, seen);
      news.sleepers.fetch_sub(1);
      // Only news is passed on: late wakers wake workers that have been there already, and these would wake others.
      if (news.generation.load(std::memory_order_relaxed) != seen) wake_some(news);
    }
    const std::optional<uint32_t> latest = latest_news(news.generation, stop_);
    if (!latest) return;
    seen = *latest;
    drain(seen, worker);
    fetch_own(news, seen, worker);
  }
}

uint32_t ThreadPool::finished() const {
  uint32_t sum = 0;
  for (int index = 0; index < queue_count_; ++index)
    sum += queues_[static_cast<size_t>(index)].finished.load(std::memory_order_acquire);
  return sum;
}

void ThreadPool::run(std::span<const int> tasks, Function function, void* context, Steal steal, Wake wake) {
  int all = 0;
  for (const int count : tasks) all += count;
  if (all == 0) return;
  const bool alone = wake == Wake::none || threads_ == 1 || all == 1;
  if (!alone) take_seat();
  function_ = function;
  context_ = context;
  failed_.store(false, std::memory_order_relaxed);
  cancelled_.store(false, std::memory_order_relaxed);
  steal_.store(steal == Steal::yes || alone, std::memory_order_relaxed);
  const uint32_t generation = ++generation_;
  handed_out_ += static_cast<uint32_t>(all);
  deal(tasks, steal, wake);
  // Queues without a task stay as they are, empty: each line that is written here has to come from another core.
  for (int index = 0; index < queue_count_; ++index) {
    Queue& queue = queues_[static_cast<size_t>(index)];
    if (shares_[static_cast<size_t>(index)].total == 0) continue;
    queue.share = shares_[static_cast<size_t>(index)];
    queue.word.store((uint64_t{generation} << 32) | static_cast<uint32_t>(queue.share.total),
                     std::memory_order_release);
  }
  // Where nobody is told, idle workers go on watching the old generation, and no claim of theirs can fit the new one.
  if (!alone) {
    patience_.store(static_cast<uint64_t>(patience_us * pace().ticks_per_us), std::memory_order_relaxed);
    publish(news_, generation);
    for (int i = spared(steal, wake); i < spare_; ++i) publish(spare_news_[static_cast<size_t>(i)], generation);
  }
  drain(generation, 0);
  for (int turn = 0; finished() != handed_out_ && forks() == forks_; ++turn) {
    relax(turn);
    look_for_interrupt();
  }
  if (failed_.load()) {
    // Ctrl-C comes first: nobody sends it again.
    std::exception_ptr failure = std::exchange(failure_, nullptr);
    if (interrupted_ != nullptr) failure = std::exchange(interrupted_, nullptr);
    std::rethrow_exception(failure);
  }
  if (cancelled_.load()) throw Cancelled();
}

std::byte* ThreadPool::buffer(size_t slot, size_t bytes, size_t node) {
  const size_t index = slot * nodes_.size() + node;
  if (index >= buffers_.size()) buffers_.resize(index + 1);
  Block& block = buffers_[index];
  if (block.size() < bytes) {
    block = Block();  // the old one is freed first: both at once may not fit
    block = Block(bytes + bytes / 4);
  }
  return block.data();
}

void set_patience(double microseconds) { patience_us = microseconds; }

void leave_room(Room room) { left_room = room; }

int default_threads() {
  const auto cpus = static_cast<int>(allowed_cpus().size());
  const double quota = std::ceil(quota_cpus());
  return std::max(1, quota < cpus ? static_cast<int>(quota) : cpus);
}

std::shared_ptr<ThreadPool> pool() {
  Global& here = state();
  std::lock_guard lock(here.mutex);
  if (!here.pool) {
    int threads = here.threads > 0 ? here.threads : default_threads();
    if (!here.crowded) threads = std::min(threads, std::max(1, static_cast<int>(allowed_cpus().size())));
    here.pool = std::make_shared<ThreadPool>(threads, nodes_of(here));
  }
  return here.pool;
}

void compute_alone(bool alone) { own_pool = alone ? std::make_shared<ThreadPool>(1, std::vector<Node>(1)) : nullptr; }

Session::Session() {
  if (own_pool == nullptr) {
    turn_ = std::unique_lock(turns);
    pool_ = pool();
  } else {
    pool_ = own_pool;
  }
  ++sessions;
}

uint64_t Session::count() { return sessions.load(); }

void set_threads(int threads, bool crowded) {
  if (threads < 0 || threads > 4096)
    throw std::invalid_argument("threads: found " + std::to_string(threads) + "; allowed: 0 (automatic) to 4096");
  Global& here = state();
  std::lock_guard lock(here.mutex);
  here.threads = threads;
  here.crowded = crowded;
  here.pool.reset();
}

std::vector<Node> nodes() {
  Global& here = state();
  std::lock_guard lock(here.mutex);
  return nodes_of(here);
}

void set_nodes(int virtual_nodes) {
  if (virtual_nodes < 0 || virtual_nodes > kMostNodes)
    throw std::invalid_argument("nodes: found " + std::to_string(virtual_nodes) + "; allowed: 0 (the machine's) to " +
                                std::to_string(kMostNodes));
  Global& here = state();
  std::lock_guard lock(here.mutex);
  here.virtual_nodes = virtual_nodes;
  here.pool.reset();
}

}  // namespace ktinject::runtime
