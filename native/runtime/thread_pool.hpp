// The CPU workers. One call publishes lists of tasks, the caller works on them too, and returns when all are done.
//
// There is no barrier that a thread has to reach. All progress is counted in tasks: a worker that the operating system
// does not schedule in time simply claims nothing, and the others do its share. So threads >= cores, a busy neighbour
// or another library's spinning threads cost throughput but no scheduler tick.
//
// Workers belong to nodes (NUMA nodes, or virtual ones for tests), and within a node to groups of at most 16. Tasks are
// claimed from queues, dealt from the node's list like cards: a 64-bit word (generation, tasks left), and a claim is a
// compare-and-swap on it, so a late worker can never claim from a later call by mistake, and touches a job's data only
// while one of its own tasks keeps that job alive. A group has one queue, so no word is shared by more than a group
// until a group has run out of tasks; then it helps the others, those of its node first.
//
// In a node of one group, short calls (Wake::most) have a queue for each worker instead. So it is known before such a
// call which tasks a worker begins first, and who knows what they will read may say so: idle workers bring it into
// their caches (`fetch`).
//
// Tasks of a list are begun in its order. So a task may wait for earlier ones (`await`), which lets a whole layer be
// one call: stages follow each other in the list, and nobody waits where a barrier would have been.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/memory.hpp"
#include "runtime/topology.hpp"
#include "runtime/waiting.hpp"

namespace ktinject::runtime {

// Thrown by a call that `cancel` met.
struct Cancelled : std::runtime_error {
  Cancelled() : std::runtime_error("the computation was cancelled") {}
};

class ThreadPool : public std::enable_shared_from_this<ThreadPool> {
 public:
  ThreadPool(int threads, std::vector<Node> nodes);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  // A worker's node, and which of the workers there it is; both change between calls only.
  int node_of(int worker) const { return seat_of(worker).node; }
  int place_of(int worker) const { return seat_of(worker).place; }
  // The CPU that a worker is kept to, -1: none; and how many workers, the last ones, are left out for a core's work.
  int cpu_of(int worker) const { return seat_of(worker).cpu; }
  int spare() const { return spare_; }
  // How many workers a node has; none if there are more nodes than threads.
  int workers_of(int node) const;

  enum class Steal { yes, no };
  enum class Wake { all, most, none };

  // Runs task(index, worker) for every index in [0, tasks), worker in [0, threads()); the caller is worker 0. The first
  // exception of a task is rethrown here once all tasks have ended; those not begun by then are left out. Calls are
  // made within a Session.
  template <class Task>
  void parallel_for(int tasks, Task&& task) {
    const int lists[] = {tasks};
    run(
        lists,
        [](void* context, int, int index, int worker) {
          (*static_cast<std::remove_reference_t<Task>*>(context))(index, worker);
        },
        &task, Steal::yes, Wake::all);
  }

  // The same for task(list, index, worker) with tasks[i] tasks in list i. One list is for all workers; of several, at
  // most nodes().size(), list i is for node i. With Steal::no the workers of another node leave it alone as long as the
  // node has workers of its own. With Wake::none the caller does everything; with Wake::most a few workers are left out
  // where the caller leaves room, and with Wake::all one where it always does, see leave_room().
  template <class Task>
  void parallel_lists(std::span<const int> tasks, Task&& task, Steal steal = Steal::yes, Wake wake = Wake::all) {
    run(
        tasks,
        [](void* context, int list, int index, int worker) {
          (*static_cast<std::remove_reference_t<Task>*>(context))(list, index, worker);
        },
        &task, steal, wake);
  }

  // Foretells a call of parallel_lists() with these tasks and Wake::most. Until a call comes, workers that will have a
  // queue of their own bring the memory nearer that their tasks will read, in their order and as far as their caches
  // hold it: reads(list, index) is that of a task. Returns at once. Memory that is gone by then does no harm, since it
  // is asked for and never touched. Within a Session.
  template <class Reads>
  void fetch(std::span<const int> tasks, Reads&& reads) {
    begin_fetch(tasks);
    const FetchEnd end{*this};  // also where reads() throws: workers wait for what else they are told
    bool more = true;
    for (int turn = 0; more; ++turn) {
      more = false;
      for (int queue = 0; queue < queue_count_; ++queue) {
        const Share& share = shares_[static_cast<size_t>(queue)];
        if (turn >= share.total) continue;
        tell(queue, reads(share.list, share.at(turn)));
        more = true;
      }
      if (turn == 0) publish_fetch();  // workers begin while the rest is told
    }
  }

  // What fetch() told a worker, as long as nobody calls it again; and the bytes that all have asked for so far. For
  // tests.
  std::vector<std::span<const std::byte>> told(int worker) const;
  size_t fetched() const;

  // Called by a task whose input is made by tasks at indices below limits[list]: returns true once ready() holds, false
  // if the call has failed or was cancelled, so that it never will. Meanwhile it begins such tasks where nobody else
  // did, and calls meanwhile() as long as that returns true.
  template <class Ready, class Meanwhile>
  bool await(Ready&& ready, std::span<const int> limits, int worker, Meanwhile&& meanwhile) {
    for (int turn = 0; !ready(); ++turn) {
      if (stopped()) return false;
      if (!help(limits, worker) && !meanwhile()) relax(turn);
    }
    return true;
  }

  // A waiting thread's pause; now and then it gives its core away, for a worker that holds the last task on it.
  static void relax(int turn);

  // The call that runs now, if any, begins no further task and throws Cancelled. From any thread.
  void cancel() { cancelled_.store(true); }

  // Working memory of the layer that runs, at least `bytes` long, 64-byte aligned, contents undefined; one for each
  // (slot, node). It only ever grows, so a warmed-up layer allocates nothing. Call within a Session.
  std::byte* buffer(size_t slot, size_t bytes, size_t node = 0);

 private:
  using Function = void (*)(void* context, int list, int index, int worker);
  struct Queue;
  // A CPU (-1: any) with what belongs to it. Everyone has one, the caller too. The caller may not be moved, so when it
  // is found on a worker's CPU, the two swap seats: sharing one would cost scheduler ticks. On the other thread of a
  // worker's core, too: sharing that would cost both half of their speed.
  struct Seat {
    int cpu;
    int core;  // -1: not known
    int node;
    int queue;
    int place;
  };

  // The generation that idle workers watch, and nothing else in its cache line; and how many of them sleep.
  struct News {
    alignas(64) std::atomic<uint32_t> generation{0};
    alignas(64) std::atomic<int> sleepers{0};
  };

  // What a queue has of a call's tasks: `total` of a list, first, first + stride, ...
  struct Share {
    int list = 0;
    int first = 0;
    int stride = 1;
    int total = 0;

    int at(int place) const { return first + place * stride; }
  };
  // A node's queues, and how many of them, the first ones, are there for all of a group.
  struct Span {
    int first;
    int queues;
    int groups;
  };
  static constexpr int kMostFetched = 16;  // tasks of a worker
  static size_t most_fetched();            // bytes of a worker
  void begin_fetch(std::span<const int> tasks);
  void tell(int queue, std::span<const std::byte> memory);
  void publish_fetch();
  void end_fetch() { told_for_.store(generation_, std::memory_order_release); }
  struct FetchEnd {
    ThreadPool& pool;
    ~FetchEnd() { pool.end_fetch(); }
  };
  void fetch_own(const News& news, uint32_t generation, int worker);
  size_t fetch_piece(int& task, size_t& at, int worker) const;
  friend bool fetch_more();
  int spared(Steal steal, Wake wake) const;
  void deal(std::span<const int> tasks, Steal steal, Wake wake) noexcept;
  void run(std::span<const int> tasks, Function function, void* context, Steal steal, Wake wake);
  void work(int worker);
  bool spin(const News& news, uint32_t seen) const;
  void publish(News& news, uint32_t generation);
  News& news_of(int worker) {
    return worker < threads_ - spare_ ? news_ : spare_news_[static_cast<size_t>(threads_ - 1 - worker)];
  }
  void drain(uint32_t generation, int worker);
  void execute(Queue& queue, uint32_t left, int worker);
  bool help(std::span<const int> limits, int worker);
  void fail();
  void look_for_interrupt();
  const Seat& seat_of(int worker) const {
    return seats_[static_cast<size_t>(seat_[static_cast<size_t>(worker)].load(std::memory_order_relaxed))];
  }
  void take_seat();
  void pin(int worker);
  uint32_t finished() const;
  static void wake_some(News& news);
  void join_all();
  bool stopped() const { return failed_.load(std::memory_order_relaxed) || cancelled_.load(std::memory_order_relaxed); }

  // Workers that are left out at most: both threads of a core, where both are workers or that is not known. Of 16, 14
  // read one token's experts as fast as all, and steps that the host prepares took half as long (4 beams, prompt
  // lookup).
  static constexpr int kMostSpare = 2;

  const int threads_;
  int spare_ = 0;  // of these, the last ones: left out where a caller leaves room
  const std::vector<Node> nodes_;
  std::vector<Seat> seats_;
  std::vector<int> core_of_;                  // of each CPU of the nodes, -1: not known
  std::unique_ptr<std::atomic<int>[]> seat_;  // of each worker
  std::vector<Span> spans_;                   // of each node
  std::vector<std::vector<int>> order_;       // of each queue: itself, the others of its node, all others
  std::unique_ptr<Queue[]> queues_;
  int queue_count_ = 0;
  std::vector<Share> shares_;  // of each queue
  std::vector<int> dealt_;     // deal()'s own
  const int forks_ = forks();
  std::vector<std::thread> workers_;
  std::vector<Block> buffers_;

  uint32_t generation_ = 0;  // of the latest call
  uint32_t handed_out_ = 0;  // tasks, by all calls; as many are finished when none runs
  News news_;
  // The last generation that a spare worker has a part in; of the last worker first.
  std::array<News, kMostSpare> spare_news_;
  // The generation in which there is memory to bring nearer, and no task; and that in which all has been told.
  std::atomic<uint32_t> fetches_for_{0}, told_for_{0};
  std::atomic<uint64_t> patience_{0};  // ticks that idle workers watch before they sleep
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> steal_{true};
  // Written by the caller before it publishes a generation, read by a worker only after a successful claim from it.
  Function function_ = nullptr;
  void* context_ = nullptr;
  std::exception_ptr failure_;      // of the first task that failed
  std::exception_ptr interrupted_;  // what the caller's check threw
};

// A thread that has called ThreadPool::fetch() and waits for what it will compute next has tasks in that call, too:
// this brings a piece of their memory nearer. False once there is nothing left, or somebody else has made a call.
bool fetch_more();

// How long idle workers watch for another call after one that this thread makes, before they sleep; 50 until it is
// said.
void set_patience(double microseconds);

// The CPUs of a machine with many that calls of this thread leave to the one that prepares the next step on a GPU, or
// spins until the GPU has ended this one. If none were left, the system would have it and a worker take turns, some
// milliseconds each, and all others would wait for what the worker began.
enum class Room {
  none,
  some,    // a core, by calls with Wake::most
  always,  // and one CPU by those with Wake::all
};
void leave_room(Room room);

// min(affinity, cgroup quota).
int default_threads();

// The process's pool, made on first use; made anew in a forked child, where the parent's workers do not exist.
std::shared_ptr<ThreadPool> pool();

// A turn at the pool: for one layer, or a part of it where it is long. While one lives, no other thread computes, in
// whichever pool; and what computes (Experts, Linear) changes within one only, so it has no lock of its own.
class Session {
 public:
  Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ThreadPool& operator*() const { return *pool_; }
  ThreadPool* operator->() const { return pool_.get(); }

  // How many there have been, for tests.
  static uint64_t count();

 private:
  std::unique_lock<Turns> turn_;
  std::shared_ptr<ThreadPool> pool_;
};

// 0 means default_threads(). More than there are CPUs are not started, as they could only take them from each other;
// unless `crowded`, for tests. Holds from the next call on; a running one keeps the pool it has.
void set_threads(int threads, bool crowded = false);

// The nodes that the pool has or will have: the machine's usable ones, or as many virtual ones as set_nodes() asked
// for.
std::vector<Node> nodes();

// 0 means the machine's. Holds from the next call on.
void set_nodes(int virtual_nodes);

}  // namespace ktinject::runtime
