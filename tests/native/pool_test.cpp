// The pool without layers: whose turn it is, and which workers have a part in a call.
#include <immintrin.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

#include "native_test.hpp"
#include "runtime/denormals.hpp"
#include "runtime/pool_queue.hpp"
#include "runtime/scratch.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"
#include "runtime/waiting.hpp"

using namespace ktinject::runtime;

namespace {

// Held while a Turns is taken: as Python's GIL.
thread_local bool holds_something = false;

// Seconds that all threads of this process have computed.
double computed_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace

// The first call of a pool needs no memory: a call that had begun without it would keep the next one waiting for ever.
void test_pool_without_memory() {
  using Wake = ThreadPool::Wake;
  for (const Wake wake : {Wake::all, Wake::most}) {
    const auto workers = std::make_shared<ThreadPool>(4, std::vector<Node>(1));
    std::atomic<int> runs{0};
    const int lists[] = {16};
    const auto run = [&] {
      workers->parallel_lists(lists, [&](int, int, int) { ++runs; }, ThreadPool::Steal::yes, wake);
    };
    allocations_left = 0;
    const bool failed = throws<std::bad_alloc>(run);
    allocations_left = -1;
    if (!check(!failed && runs == 16, "the first call of a pool allocates nothing")) return;
    run();
    check(runs == 32, "the call after it");
  }
}

namespace {

// An atomic that something else changes right before or right after it is read.
template <class T>
struct Raced {
  T value;
  std::function<void()> before, after;
  T load(std::memory_order) const {
    if (before) before();
    const T found = value;
    if (after) after();
    return found;
  }
};

}  // namespace

// A pool that ends while a worker looks for news, at every moment: the worker ends, or sees a generation that is not
// the last, so that it looks again.
void test_last_news() {
  for (int moment = 0; moment < 4; ++moment) {
    Raced<uint32_t> generation{7, {}, {}};
    Raced<bool> stop{false, {}, {}};
    const auto end = [&] {
      stop.value = true;
      ++generation.value;
    };
    (moment < 2 ? generation.before : stop.before) = moment % 2 == 0 ? std::function<void()>(end) : nullptr;
    (moment < 2 ? generation.after : stop.after) = moment % 2 == 1 ? std::function<void()>(end) : nullptr;
    const std::optional<uint32_t> found = latest_news(generation, stop);
    check(!found || *found != generation.value, "no worker takes the last news for seen");
  }
}

// Pools that end at once, over and over: a worker that looks for news just then must not sleep through the last.
void test_teardown(int rounds) {
  std::atomic<int> round{0};
  std::thread watch([&] {
    constexpr int kMostSeconds = 20;  // that a round may take on a busy machine
    for (int last = -1, same = 0; round < rounds; same = round == last ? same + 1 : 0, last = round) {
      if (same > 10 * kMostSeconds) {
        std::printf("FAILED: the pool of round %d does not end\n", round.load());
        std::fflush(stdout);
        std::_Exit(1);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  for (; round < rounds; ++round) {
    const auto workers = std::make_shared<ThreadPool>(8, std::vector<Node>(1));
    set_patience(round % 3 == 0 ? 0 : round % 3 == 1 ? 5 : 100);
    for (int call = 0; call <= round % 2; ++call) {
      std::atomic<int> runs{0};
      workers->parallel_for(16, [&](int, int) { ++runs; });
      if (runs != 16) check(false, "every task of a short-lived pool runs");
    }
  }
  watch.join();
  set_patience(100);
  check(true, "all pools ended");
}

// Results that are denormal are zero wherever tasks run, and as they were on the caller's thread afterwards.
void test_denormals() {
  constexpr unsigned kFlag = Denormals::kFlushToZero;
  const unsigned before = _mm_getcsr();
  for (const auto kind : {Denormals::kZero, Denormals::kCount}) {
    const Denormals own(kind);
    check((_mm_getcsr() & kFlag) == (kind == Denormals::kZero ? kFlag : 0), "a thread says what denormals are");
  }
  check(_mm_getcsr() == before, "afterwards they are what they were");
  set_threads(4, true);
  const Denormals zero(Denormals::kZero);
  std::atomic<int> wrong{0}, by_workers{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  call(64, [&](int, int worker) {
    volatile float fading = 1e-38f;
    fading = fading * 0.25f;
    if (fading != 0.0f) ++wrong;
    if (worker > 0) ++by_workers;
    while (by_workers == 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  check(wrong == 0 && by_workers > 0, "what fades is zero on every worker");
}

// Workers that have a core each where there are fewer than CPUs; the last ones, which may be left out, are those of one
// core.
void test_cores() {
  std::vector<int> cpus(16), cores(16), alone(16);
  for (size_t i = 0; i < 16; ++i) {  // as the nodes are found: one CPU of each core first; CPUs 2i and 2i + 1 are one
    cpus[i] = static_cast<int>(i < 8 ? 2 * i : 2 * i - 15);
    cores[i] = cpus[i] / 2 * 2;
    alone[i] = cpus[i];
  }
  const auto workers = [&](int threads, const std::vector<int>& of) {
    return std::make_shared<ThreadPool>(threads, std::vector<Node>{{-1, cpus, of}});
  };
  const auto all = workers(16, cores);
  // The caller may have changed places with the worker whose CPU it is on.
  check(all->spare() == 2 && all->cpu_of(14) / 2 == all->cpu_of(15) / 2, "the last two workers are a core's");
  const auto some = workers(8, cores);
  for (int worker = 0; worker < 8; ++worker) check(some->cpu_of(worker) == 2 * worker, "a core for each worker");
  check(workers(16, alone)->spare() == 1, "a CPU that is a core is left out alone");
  check(workers(16, {})->spare() == 2, "where cores are not known, two CPUs are left out");
  const auto most = workers(12, cores);
  std::vector<int> taken;
  for (int worker = 0; worker < 12; ++worker) taken.push_back(most->cpu_of(worker));
  check(taken == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14}, "a core's workers are side by side");
  check(most->spare() == 1, "the last core has one worker");
}

// Memory that is not there is refused with numbers, and not promised.
void test_memory() {
  std::string said;
  try {
    const Block block(size_t{1} << 45);
  } catch (const NoRoom& refusal) {
    said = refusal.what();
  }
  check(said.find("33554432.0 MiB were asked for") == 0 && said.find("leave") != std::string::npos,
        "more than there is: " + said);
  said.clear();
  try {
    allocations_left = 0;
    const Block block(size_t{1} << 20);
  } catch (const NoRoom& refusal) {
    said = refusal.what();
  }
  allocations_left = -1;
  check(said.find("the system refused 1.0 MiB: ") == 0, "what the system refuses: " + said);
  const Block there(size_t{128} << 20);
  check(there.size() == size_t{128} << 20, "what there is room for is given");
}

// Spans that end while another thread starts and stops: each is whole, and belongs to what is recorded.
void test_trace() {
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&stop, i] {
      while (!stop) const TraceSpan span(&stop, i + 1);
    });
  bool is_whole = true;
  size_t found = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (int round = 0; (round < 200 || found < 100) && std::chrono::steady_clock::now() < end; ++round) {
    trace_start();
    std::this_thread::yield();
    for (const Span& span : trace_stop()) {
      ++found;
      is_whole =
          is_whole && span.owner == &stop && span.tokens > 0 && 0 < span.begin_ns && span.begin_ns <= span.end_ns;
    }
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  check(is_whole && found > 0, "spans are whole");
  check(trace_stop().empty(), "nothing is recorded after the end");
}

// A thread keeps what its steps need, and gives back what a long prompt needed.
void test_scratch() {
  std::thread([] {
    constexpr size_t kSmall = 1 << 20, kLarge = Scratch::kMostKeptBytes / sizeof(float) + 1;
    {
      const Scratch outer(kSmall), inner(kLarge);
      check(Scratch::kept_bytes() == (kSmall + kLarge) * sizeof(float), "memory at two depths");
    }
    check(Scratch::kept_bytes() == kSmall * sizeof(float), "a thread keeps a little");
    float* const first = Scratch(kSmall);
    check(first == Scratch(kSmall / 2), "and uses it again");
    std::vector<int> order(1 << 10), long_order(1 << 20);
    give_back(order);
    give_back(long_order);
    check(order.size() == 1 << 10 && long_order.capacity() == 0, "a vector likewise");
  }).join();
}

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

namespace {

// fetch() throws, and the workers sleep soon afterwards.
template <class Call>
void call_off(ThreadPool& workers, Call&& fetch) {
  check(throws<Fault>(fetch), "what a guess throws comes back");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const double before = computed_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  check(computed_seconds() - before < 0.04, "workers sleep after a guess that failed");
  std::atomic<int> runs{0};
  workers.parallel_for(16, [&](int, int) { ++runs; });
  check(runs == 16, "the call after a guess that failed");
}

}  // namespace

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

  // Of a guess that fails halfway, workers wait for nothing.
  set_threads(4, true);
  {
    const Session workers;
    set_patience(5);
    call_off(*workers, [&] {
      const int most[] = {40};
      workers->fetch(most, [&](int list, int index) {
        if (index >= 20) throw Fault("a guess");
        return reads(list, index);
      });
    });
    set_patience(100);
  }
}

// Each stage begins once, when all tasks of the one before have ended; and an error in any ends the call. One without a
// task would be waited for for ever.
void test_stages() {
  const std::vector<std::byte> memory(1 << 16);
  for (int empty = 0; empty < 3; ++empty) {
    const Session workers;
    int begun = 0;
    const auto stage = [&](int i) {
      return Stage{i == empty ? 0 : 4, [&begun] { ++begun; }, [](int, int) {}, kReadsNothing};
    };
    check(throws<std::invalid_argument>([&] { run_stages(*workers, stage(0), stage(1), stage(2)); }) && begun == 0,
          "a stage without a task is refused");
  }
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
