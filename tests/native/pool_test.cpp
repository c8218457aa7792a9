// The pool without layers: whose turn it is, and which workers have a part in a call.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "native_test.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/waiting.hpp"

using namespace ktinject::runtime;

namespace {

// Held while a Turns is taken: as Python's GIL.
thread_local bool holds_something = false;

}  // namespace

// Of 16 workers, the last two have no part in a call that leaves room, the last one none in any call where room is
// always left, and all have one again in the next.
void test_room() {
  using Wake = ThreadPool::Wake;
  set_threads(16, true);
  for (const Room room : {Room::some, Room::none, Room::always, Room::some}) {
    leave_room(room);
    for (const Wake wake : {Wake::most, Wake::all}) {
      const Session workers;
      const int left_out = wake == Wake::most ? (room == Room::none ? 0 : 2) : (room == Room::always ? 1 : 0);
      for (int turn = 0; turn < 20; ++turn) {
        std::array<std::atomic<bool>, 16> seen{};
        const int lists[] = {64};
        std::atomic<int> came{0};
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        workers->parallel_lists(
            lists,
            [&](int, int, int worker) {
              if (!seen[static_cast<size_t>(worker)].exchange(true)) ++came;
              // Every worker that is woken has the time to come.
              while (came < 16 - left_out && std::chrono::steady_clock::now() < end) std::this_thread::yield();
            },
            ThreadPool::Steal::yes, wake);
        check(came == 16 - left_out, "the workers that are told come");
        for (int worker = 16 - left_out; worker < 16; ++worker)
          check(!seen[static_cast<size_t>(worker)], "spare workers are left out");
      }
    }
  }
  leave_room(Room::none);
}

// A worker is told of the memory of those tasks that it begins first in the call that comes, whichever workers that
// call leaves out; and it asks for all of it if no call comes.
void test_fetch() {
  using Wake = ThreadPool::Wake;
  using Memory = std::span<const std::byte>;
  constexpr int kTasks = 70;
  static std::array<std::array<std::byte, 4096>, kTasks> memory;
  const int lists[] = {kTasks};
  const auto reads = [](int, int index) {
    return index % 9 == 8 ? Memory{} : Memory(memory[static_cast<size_t>(index)]);
  };
  set_threads(16, true);
  for (const Room room : {Room::none, Room::some, Room::always}) {
    leave_room(room);
    {
      const Session workers;
      const int part = room == Room::none ? 16 : 14;
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      // Bytes that each worker is told of, all of which are asked for in the end.
      const auto fetch = [&](std::span<const int> tasks, auto&& what) {
        const size_t before = workers->fetched();
        workers->fetch(tasks, what);
        std::vector<size_t> bytes(static_cast<size_t>(part));
        for (int worker = 0; worker < part; ++worker)
          for (const Memory& one : workers->told(worker)) bytes[static_cast<size_t>(worker)] += one.size();
        const size_t all = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
        while (fetch_more()) {
        }
        while (workers->fetched() < before + all && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        check(workers->fetched() == before + all, "workers that have nothing else to do ask for all of it");
        return bytes;
      };

      // No more than a cache holds.
      static std::array<std::byte, size_t{2} << 20> large;
      const int few[] = {16};
      for (const size_t bytes : fetch(few, [](int, int) { return Memory(large); }))
        check(0 < bytes && bytes < large.size(), "a worker is told of what its cache holds");

      const std::vector<size_t> bytes = fetch(lists, reads);
      check(std::accumulate(bytes.begin(), bytes.end(), size_t{0}) == (kTasks - kTasks / 9) * memory[0].size(),
            "each task's memory is some worker's");
      std::array<std::atomic<bool>, 16> seen{};
      std::atomic<int> came{0}, other{0};
      workers->parallel_lists(
          lists,
          [&](int, int index, int worker) {
            if (!seen[static_cast<size_t>(worker)].exchange(true)) {
              const std::vector<Memory> told = workers->told(worker);
              const Memory first = reads(0, index).empty() ? reads(0, index + part) : reads(0, index);
              if (told.empty() || told[0].data() != first.data()) ++other;
              ++came;
            }
            // Every worker comes to its own tasks first.
            while (came < part && std::chrono::steady_clock::now() < end) std::this_thread::yield();
          },
          ThreadPool::Steal::yes, Wake::most);
      check(came == part && other == 0, "a worker begins with what it was told of");
      check(!fetch_more(), "a call ends it");
    }
  }
  leave_room(Room::none);

  // Each node's workers are told of its own list.
  set_nodes(2);
  set_threads(6, true);
  {
    const Session workers;
    const int both[] = {9, 14};
    workers->fetch(both, [&](int list, int index) {
      return reads(0, index).empty()
                 ? Memory{}
                 : Memory(memory[static_cast<size_t>(index)]).subspan(static_cast<size_t>(list) * 64, 64);
    });
    std::array<std::vector<const std::byte*>, 2> told, wanted;
    for (int worker = 0; worker < 6; ++worker)
      for (const Memory& one : workers->told(worker))
        told[static_cast<size_t>(workers->node_of(worker))].push_back(one.data());
    for (size_t list = 0; list < 2; ++list) {
      for (int index = 0; index < both[list]; ++index)
        if (!reads(0, index).empty()) wanted[list].push_back(memory[static_cast<size_t>(index)].data() + list * 64);
      std::sort(told[list].begin(), told[list].end());
      check(told[list] == wanted[list], "a node's workers are told of its tasks");
    }
  }
  set_nodes(0);
  set_threads(2, true);
  {
    const Session workers;
  }
  check(!fetch_more(), "nothing is fetched for a pool that is gone");
}

// Each stage begins once, when all tasks of the one before have ended; and an error in any ends the call.
void test_stages() {
  const std::vector<std::byte> memory(1 << 16);
  for (const int threads : {1, 2, 5, 16}) {
    set_threads(threads, true);
    const Session workers;
    for (int turn = 0; turn < 50; ++turn) {
      const std::array<int, 3> counts{1 + turn % 7, 1, 40};
      std::array<std::atomic<int>, 3> ended{};
      std::array<std::atomic<int>, 3> begun{};
      std::atomic<bool> in_order{true};
      std::atomic<int> more{0}, more_begun{0};  // of what is beside the second stage
      constexpr int kMore = 3;
      const int fault = turn % 10 == 9 ? turn / 10 % 3 : -1;  // of which stage a task fails
      auto stage = [&](size_t i) {
        return Stage{counts[i],
                     [&, i] {
                       if (i > 0 && ended[i - 1] != counts[i - 1]) in_order = false;
                       if (i == 2 && more != kMore) in_order = false;
                       ++begun[i];
                     },
                     [&, i](int index, int) {
                       if (begun[i] != 1 || index < 0 || index >= counts[i]) in_order = false;
                       if (static_cast<int>(i) == fault) throw Fault("a task");
                       ++ended[i];
                     },
                     [&](int index) {
                       return std::span<const std::byte>(memory).subspan(static_cast<size_t>(index) * 100, 5000);
                     }};
      };
      const Stage other{kMore, [&] { ++more_begun; },
                        [&](int index, int) {
                          if (more_begun != 1 || begun[1] != 1 || index < 0 || index >= kMore) in_order = false;
                          ++more;
                        },
                        kReadsNothing};
      const bool failed = throws<Fault>([&] { run_stages(*workers, stage(0), beside(stage(1), other), stage(2)); });
      check(failed == (fault >= 0), "an error of a task is the call's");
      check(in_order, "a stage begins behind the one before it");
      for (size_t i = 0; fault < 0 && i < 3; ++i)
        check(begun[i] == 1 && ended[i] == counts[i] && more == kMore, "all tasks of all stages run");
      for (size_t i = 0; fault >= 0 && i < 3; ++i)
        check(static_cast<int>(i) <= fault || begun[i] == 0, "nothing begins behind a stage that failed");
    }
  }
}

void test_turns(bool forks) {
  Turns turns;
  turns.lock();
  check(throws<std::logic_error>([&] { turns.lock(); }), "a turn within a turn is refused");
  // Whoever waits gets its turn before the one who gave it back gets another.
  constexpr int kWaiters = 5;
  std::vector<int> order;
  std::vector<std::thread> waiters;
  std::atomic<int> asking{0};
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&, i] {
      ++asking;
      const std::lock_guard turn(turns);
      order.push_back(i);
    });
    while (asking <= i) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // from asking to waiting
  }
  turns.unlock();
  turns.lock();
  check(order == std::vector<int>{0, 1, 2, 3, 4}, "turns are given in the order of asking");
  for (auto& waiter : waiters) waiter.join();

  std::atomic<bool> ended{false};
  std::thread impatient([&] {
    const Interruptible interruptible([] { throw Fault("Ctrl-C"); });
    ended = throws<Fault>([&] { turns.lock(); });
  });
  impatient.join();
  check(ended, "waiting can be ended");
  turns.unlock();
  turns.lock();
  turns.unlock();

  set_wait_guard([] {
    if (holds_something) throw Fault("held");
  });
  holds_something = true;
  check(throws<Fault>([] { const Session session; }), "who holds something may not wait");
  holds_something = false;
  check(!throws<Fault>([] { const Session session; }), "who holds nothing may");
  set_wait_guard(nullptr);

  if (!forks) return;
  // What runs within a computation, such as a signal's handler, may fork: there the computation ends with an error.
  static pid_t forked;
  forked = -1;
  bool ended_there = false;
  try {
    const Interruptible interruptible([] {
      if (forked < 0) forked = fork();
    });
    set_threads(3, true);
    call(60, [](int, int) { std::this_thread::sleep_for(std::chrono::milliseconds(15)); });
  } catch (const std::runtime_error&) {
    ended_there = true;
  }
  if (forked == 0) _exit(ended_there ? 0 : 1);
  int left = 1;
  check(!ended_there && waitpid(forked, &left, 0) == forked && left == 0, "a fork within a computation");

  const std::lock_guard turn(turns);
  const pid_t child = fork();
  if (child == 0) {
    turns.lock();
    turns.unlock();
    _exit(0);
  }
  int status = 1;
  check(waitpid(child, &status, 0) == child && status == 0, "in a forked child it is nobody's turn");
}
