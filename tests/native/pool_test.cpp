// The pool without layers: whose turn it is, and which workers have a part in a call.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "native_test.hpp"
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
