#include "handoff/dispatcher.hpp"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "runtime/denormals.hpp"
#include "runtime/futex.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::handoff {
namespace {

using Clock = std::chrono::steady_clock;
using runtime::futex_wait;
using runtime::futex_wake;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr milliseconds kHot{2};
constexpr microseconds kShortNap{50};
constexpr milliseconds kLongNap{1};
constexpr std::chrono::seconds kUntilLongNaps{1};
// A work under way may wait for who pauses.
constexpr std::chrono::seconds kLongestPauseUnseen{1};
constexpr int kSpinsBetweenClocks = 128;
// How long workers spin between two layers of a step on the GPU, and between two steps while the GPU computes logits.
constexpr double kPatienceMicroseconds = 300;

std::atomic<double> timeout_s{60};

struct Global {
  std::mutex mutex;
  std::atomic<Dispatcher*> dispatcher{nullptr};
};

Global* global = nullptr;
std::once_flag global_once;

Global& state() {
  std::call_once(global_once, [] {
    global = new Global;
    // The child has none of the parent's threads, so it never touches the parent's dispatcher again.
    pthread_atfork(nullptr, nullptr, [] { global = new Global; });
  });
  return *global;
}

}  // namespace

void set_answer_timeout(double seconds) { timeout_s = seconds; }
double answer_timeout() { return timeout_s; }

void Request::compute(const moe::Experts& experts) const {
  if (ids_are_64_bit) experts.forward(x, dtype, static_cast<const int64_t*>(ids), weights, tokens, top_k, out);
  else experts.forward(x, dtype, static_cast<const int32_t*>(ids), weights, tokens, top_k, out);
}

Dispatcher& dispatcher() {
  Global& here = state();
  if (Dispatcher* found = here.dispatcher.load(std::memory_order_acquire)) return *found;
  std::lock_guard lock(here.mutex);
  if (Dispatcher* found = here.dispatcher.load(std::memory_order_acquire)) return *found;
  auto* made = new Dispatcher;  // lives as long as the process: a GPU may write to its rings at any time
  std::thread([made] { made->loop(); }).detach();
  here.dispatcher.store(made, std::memory_order_release);
  return *made;
}

void Dispatcher::watch(const uint64_t* ring) {
  const size_t index = ring_count_.load();
  if (index == rings_.size()) throw std::runtime_error("too many rings");
  rings_[index].entries = ring;
  ring_count_.store(index + 1, std::memory_order_release);
}

// The rings that are read so far.
std::span<Dispatcher::Ring> Dispatcher::watched() {
  return {rings_.data(), ring_count_.load(std::memory_order_acquire)};
}

Dispatcher::Ring& Dispatcher::find_ring(const uint64_t* entries) {
  for (Ring& ring : watched())
    if (ring.entries == entries) return ring;
  throw std::logic_error("nobody reads this ring");
}

void Dispatcher::announce(const uint64_t* ring) {
  find_ring(ring).announced.fetch_add(1, std::memory_order_relaxed);
  wake();
}

void Dispatcher::withdraw(const uint64_t* ring) { find_ring(ring).take_announcement(); }

void Dispatcher::lose(const uint64_t* ring) { find_ring(ring).announced = 0; }

bool Dispatcher::naps() {
  const auto rings = watched();
  return replayable_.load() > 0 ||
         std::any_of(rings.begin(), rings.end(), [](const Ring& ring) { return ring.announced.load() > 0; });
}

// Not below none: a ring that lost its announcements may still bring some.
void Dispatcher::Ring::take_announcement() {
  int left = announced.load(std::memory_order_relaxed);
  while (left > 0 && !announced.compare_exchange_weak(left, left - 1, std::memory_order_relaxed)) {
  }
}

Dispatcher::Replayable::Replayable(Dispatcher& dispatcher) : dispatcher_(dispatcher) {
  if (dispatcher_.replayable_.fetch_add(1) == 0) dispatcher_.wake();
}

uint32_t Dispatcher::open(Work* work) {
  for (uint32_t port = 0; port < kMostPorts; ++port) {
    Work* free = nullptr;
    if (ports_[port].work.compare_exchange_strong(free, work))
      return (ports_[port].generation.load() << kPortBits | port) & ~kAnnounced;
  }
  throw std::runtime_error("more than " + std::to_string(kMostPorts) + " handoff slots are in use; drop a model first");
}

void Dispatcher::close(uint32_t address) {
  Port& port = ports_[address % (1u << kPortBits)];
  port.generation.fetch_add(1);  // before the port is free for others
  if (const Work* work = port.work.exchange(nullptr)) settle(work);
}

bool Dispatcher::settle(const Work* work, double seconds) const {
  const auto start = Clock::now();
  while (running_.load() == work) {
    if (Clock::now() - start > std::chrono::duration<double>(seconds)) return false;
    sched_yield();
  }
  return true;
}

void Dispatcher::enqueue(uintptr_t posted) {
  const uint32_t ticket = post_ticket_.fetch_add(1);
  auto& place = posted_[ticket % posted_.size()];
  for (uintptr_t free = 0; !place.compare_exchange_weak(free, posted); free = 0) sched_yield();
  wake();
}

void Dispatcher::wake() {
  wake_.fetch_add(1);
  if (sleeping_.load()) futex_wake(wake_);
}

void Dispatcher::pause(bool paused) {
  is_pause_seen_ = false;
  paused_ = paused;
  wake();
  // What the thread has begun to look for it may still find: so it has to come by once more.
  const auto start = Clock::now();
  while (paused && !is_pause_seen_ && Clock::now() - start < kLongestPauseUnseen) sched_yield();
}

Work* Dispatcher::next() {
  if (paused_.load()) {
    is_pause_seen_ = true;
    return nullptr;
  }
  auto& place = posted_[post_next_ % posted_.size()];
  if (place.load(std::memory_order_relaxed) != 0) {
    ++post_next_;
    const uintptr_t posted = place.exchange(0);
    return posted & 1 ? find(static_cast<uint32_t>(posted >> 1)) : reinterpret_cast<Work*>(posted);
  }
  for (Ring& ring : watched()) {
    const uint64_t entry = __atomic_load_n(&ring.entries[ring.next % kRingEntries], __ATOMIC_ACQUIRE);
    if (!has_ticket(entry, ring.next)) continue;
    ++ring.next;
    const auto address = static_cast<uint32_t>(entry);
    if (address & kAnnounced) ring.take_announcement();
    if (Work* work = find(address & ~kAnnounced)) return work;
  }
  return nullptr;
}

// The work behind an address, already stored in running_; null if the address has been closed.
Work* Dispatcher::find(uint32_t address) {
  const uint32_t index = address % (1u << kPortBits);
  if (index == kMostPorts) return nullptr;
  Port& port = ports_[index];
  // running_ first, then a second look at the port: either we see that close() was called, or close() sees us run.
  Work* work = port.work.load();
  running_.store(work);
  const bool is_open = work != nullptr && port.work.load() == work;
  if (is_open && (port.generation.load() << kPortBits & ~kAnnounced) == (address & ~index)) {
    entries_.fetch_add(1, std::memory_order_relaxed);
    return work;
  }
  running_.store(nullptr);
  return nullptr;
}

void Dispatcher::loop() {
  const runtime::Denormals zero(runtime::Denormals::kZero);
  // This thread is not pinned: it may be the one that starts the pool, and threads inherit the mask of their creator.
  pthread_setname_np(pthread_self(), "kt-dispatcher");
  prctl(PR_SET_TIMERSLACK, 1000);  // a nap of 50 us would else take twice as long
  runtime::set_patience(kPatienceMicroseconds);
  uint32_t woken = wake_.load();
  auto active = Clock::now();
  for (int spins = 0;;) {
    if (Work* work = next()) {
      run(work);
      spins = kSpinsBetweenClocks - 1;  // the clock is read once, after the work
      active = Clock::time_point::max();
      continue;
    }
    if (!runtime::fetch_more()) _mm_pause();
    if (++spins < kSpinsBetweenClocks) continue;
    spins = 0;
    const auto now = Clock::now();
    const uint32_t seen = wake_.load();
    if (active == Clock::time_point::max() || seen != woken) {
      active = now;
      woken = seen;
    }
    const auto idle = now - active;
    if (idle < kHot) continue;
    sleeping_.store(true);
    // sleeping_ first, then a second look at wake_: either we see the wake(), or wake() sees that we sleep.
    if (wake_.load() == woken) {
      if (naps()) {
        const auto nap = idle < kUntilLongNaps ? std::chrono::nanoseconds(kShortNap) : kLongNap;
        const timespec time{0, nap.count()};
        futex_wait(wake_, woken, &time);
        spins = kSpinsBetweenClocks - 1;
      } else {
        futex_wait(wake_, woken, nullptr);
      }
    }
    sleeping_.store(false);
  }
}

void Dispatcher::run(Work* work) {
  running_.store(work);
  work->run();
  running_.store(nullptr);
}

Task::~Task() {
  // The buffers belong to the task until it has run, even if nobody waits for it.
  while (submitted_ && !done() && !is_lost()) sched_yield();
}

void Task::submit() {
  submitted_ = true;
  dispatcher().post(this);
}

void Task::run() noexcept {
  // Who waits for it gives its CPU away, see wait().
  runtime::leave_room(runtime::Room::some);
  try {
    request_.compute(experts_);
  } catch (...) {
    failure_ = std::current_exception();
  }
  done_.store(true, std::memory_order_release);
}

void Task::wait() {
  const auto limit = std::chrono::duration<double>(answer_timeout());
  const auto start = Clock::now();
  for (int spins = 0; !done();) {
    if (is_lost())
      throw std::runtime_error(
          "this process was forked off while its parent computed the answer; submit it again here");
    _mm_pause();
    if (++spins < 4096) continue;
    spins = 0;
    sched_yield();
    if (Clock::now() - start > limit)
      throw std::runtime_error("no answer from the experts within " + std::to_string(limit.count()) + " s");
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace ktinject::handoff
