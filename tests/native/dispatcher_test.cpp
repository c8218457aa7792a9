// The dispatcher without layers: entries of rings and of the host, naps, and who waits for an answer.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "handoff/arrivals.hpp"
#include "handoff/dispatcher.hpp"
#include "native_test.hpp"

using namespace ktinject::handoff;

namespace {

struct CountedWork final : Work {
  std::atomic<int> runs{0};
  void run() noexcept override { ++runs; }
};

// A ring as a GPU writes it, which the dispatcher reads.
class TestRing {
 public:
  TestRing() { dispatcher().watch(entries_->data()); }
  const uint64_t* entries() const { return entries_->data(); }
  void ring(uint32_t address) {
    const uint32_t ticket = tickets_++;
    __atomic_store_n(&(*entries_)[ticket % kRingEntries], ring_entry(ticket, address), __ATOMIC_RELEASE);
    dispatcher().wake();
  }
  // Returns when the dispatcher has seen all that was written before.
  void drain() {
    CountedWork last;
    const uint32_t address = dispatcher().open(&last);
    ring(address);
    while (last.runs == 0) std::this_thread::yield();
    dispatcher().close(address);
  }

 private:
  // It is never taken away from the dispatcher.
  std::array<uint64_t, kRingEntries>* const entries_ = new std::array<uint64_t, kRingEntries>{};
  uint32_t tickets_ = 0;
};

// How often the dispatcher thread has gone to sleep.
uint64_t sleeps_of_dispatcher() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, word;
    std::ifstream(task.path() / "comm") >> name;
    if (name != "kt-dispatcher") continue;
    std::ifstream status(task.path() / "status");
    uint64_t sleeps = 0;
    while (status >> word)
      if (word == "voluntary_ctxt_switches:") status >> sleeps;
    return sleeps;
  }
  return 0;
}

// The same within 0.3 s, after what came before has been forgotten.
uint64_t sleeps_when_idle() {
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const uint64_t before = sleeps_of_dispatcher();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return sleeps_of_dispatcher() - before;
}

// What a thread uses of a CPU.
double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

void test_dispatcher() {
  TestRing gpu;
  for (const bool by_host : {false, true}) {
    const std::string who = by_host ? "host function" : "GPU";
    auto ask = [&](uint32_t address) { by_host ? dispatcher().ring(address) : gpu.ring(address); };
    auto first = std::make_unique<CountedWork>();
    const uint32_t old = dispatcher().open(first.get());
    ask(old);
    gpu.drain();
    check(first->runs == 1, who + ": what an open address names is run");

    dispatcher().pause(true);  // a dispatcher that comes late: the answer is given up, and the model dropped
    ask(old);
    dispatcher().close(old);
    first.reset();
    CountedWork second;
    const uint32_t address = dispatcher().open(&second);
    check(address != old, who + ": no address is given twice");
    check((address ^ old) % (1u << kPortBits) == 0, who + ": the test is of a port that has a new owner");
    dispatcher().pause(false);
    gpu.drain();
    check(second.runs == 0, who + ": a late entry does not run the port's new owner");
    ask(address);
    gpu.drain();
    check(second.runs == 1, who + ": its own entry does");
    dispatcher().close(address);
  }

  bool fits = true;
  CountedWork work;
  for (uint32_t i = 0; i < (1u << 19) + 10; ++i) {  // more than there are generations
    const uint32_t address = dispatcher().open(&work);
    fits = fits && (address & kAnnounced) == 0 && address != kNobody;
    dispatcher().close(address);
  }
  check(fits, "generations stay within an address");
  const uint32_t address = dispatcher().open(&work);
  gpu.ring(address);
  gpu.drain();
  check(work.runs == 1, "addresses go on after the last generation");
  dispatcher().close(address);

  dispatcher().announce(gpu.entries());
  check(dispatcher().naps(), "an announced submit is waited for in naps");
  gpu.ring(kAnnounced | kNobody);
  gpu.drain();
  check(!dispatcher().naps(), "a submit that got no slot ends the naps");
  dispatcher().announce(gpu.entries());
  dispatcher().withdraw(gpu.entries());
  check(!dispatcher().naps(), "a submit that was not launched ends the naps");

  TestRing other;
  dispatcher().announce(gpu.entries());
  dispatcher().announce(other.entries());
  dispatcher().lose(gpu.entries());
  check(dispatcher().naps(), "what one device has lost, another one still brings");
  other.ring(kAnnounced | kNobody);
  other.drain();
  check(!dispatcher().naps(), "a device that failed brings nothing any more");
  gpu.ring(kAnnounced | kNobody);
  gpu.drain();
  dispatcher().announce(gpu.entries());
  check(dispatcher().naps(), "an entry that comes in spite of that does not count for a later one");
  gpu.ring(kAnnounced | kNobody);
  gpu.drain();

  {
    const Dispatcher::Replayable first(dispatcher());
    {
      const Dispatcher::Replayable second(dispatcher());
    }
    check(dispatcher().naps(), "while there is a graph, it may be replayed");
    check(sleeps_when_idle() > 10, "so the dispatcher looks again and again");
  }
  check(!dispatcher().naps(), "the last graph ends the naps");
  check(sleeps_when_idle() <= 1, "then it sleeps");
}

void test_arrivals() {
  Arrivals arrivals;
  std::atomic<bool> is_awaited{false};
  double used = 0;
  bool came = false;
  std::thread waiter([&] {
    const double before = thread_seconds();
    is_awaited = true;
    came = arrivals.await([&] { return arrivals.count() == 2; }, 60);
    used = thread_seconds() - before;
  });
  while (!is_awaited) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  arrivals.arrive();  // which wakes it in vain
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  arrivals.arrive();
  waiter.join();
  check(came, "who waits is woken");
  check(used < 0.1, "who waits for 0.4 s sleeps");
  const auto start = std::chrono::steady_clock::now();
  check(!arrivals.await([] { return false; }, 0.05), "the time is bounded");
  check(std::chrono::steady_clock::now() - start < std::chrono::seconds(5), "by what was asked for");

  std::atomic<bool> is_sleepless{true};
  for (int i = 0; i < 2000; ++i) {  // with every interleaving that the machine has
    Arrivals once;
    std::thread other([&] { is_sleepless = once.await([&] { return once.count() == 1; }, 30) && is_sleepless; });
    once.arrive();
    other.join();
  }
  check(is_sleepless, "nobody oversleeps what comes while he lies down");
}
