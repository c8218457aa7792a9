#include "runtime/waiting.hpp"

#include <immintrin.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <new>
#include <stdexcept>

namespace ktinject::runtime {
namespace {

constexpr std::chrono::milliseconds kBetweenChecks{100};
constexpr int kBeingReset = -1;

std::atomic<int> fork_count{0};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });

std::atomic<void (*)()> wait_guard{nullptr};
constinit thread_local Interruption interruption_of_thread;
constinit thread_local char this_thread = 0;  // its address tells threads apart

}  // namespace

int forks() { return fork_count.load(std::memory_order_relaxed); }

Interruption& interruption() { return interruption_of_thread; }

Interruptible::Interruptible(void (*check)()) : before_(interruption()) { interruption() = {check, 0}; }
Interruptible::~Interruptible() { interruption() = before_; }

void set_wait_guard(void (*guard)()) { wait_guard = guard; }

struct Turns::Waiter {
  const void* thread;
  std::condition_variable called;
  bool has_turn = false;
  Waiter* next = nullptr;
};

void Turns::forget_parent() {
  const int now = forks();
  for (int seen = forks_.load(std::memory_order_acquire); seen != now; seen = forks_.load(std::memory_order_acquire)) {
    if (seen == kBeingReset || !forks_.compare_exchange_strong(seen, kBeingReset)) {
      _mm_pause();
      continue;
    }
    new (&mutex_) std::mutex;
    owner_ = nullptr;
    first_ = nullptr;
    forks_.store(now, std::memory_order_release);
  }
}

// Takes a waiter off the list; false where it has been called already.
bool Turns::leave(Waiter& waiter) {
  if (waiter.has_turn) return false;
  Waiter** at = &first_;
  while (*at != &waiter) at = &(*at)->next;
  *at = waiter.next;
  return true;
}

void Turns::lock() {
  if (void (*guard)() = wait_guard.load(std::memory_order_relaxed)) guard();
  forget_parent();
  std::unique_lock lock(mutex_);
  if (owner_ == nullptr) {
    owner_ = &this_thread;
    return;
  }
  if (owner_ == &this_thread)
    throw std::logic_error(
        "a computation was started within another one of the same thread, perhaps by a signal's handler; return from "
        "the handler first");
  Waiter waiter{&this_thread, {}};
  Waiter** last = &first_;
  while (*last != nullptr) last = &(*last)->next;
  *last = &waiter;
  auto is_called = [&] { return waiter.has_turn; };
  void (*check)() = interruption().check;
  if (check == nullptr) return waiter.called.wait(lock, is_called);
  while (!waiter.called.wait_for(lock, kBetweenChecks, is_called)) {
    lock.unlock();
    try {
      check();
    } catch (...) {
      lock.lock();
      const bool left = leave(waiter);
      lock.unlock();
      if (!left) unlock();
      throw;
    }
    lock.lock();
  }
}

void Turns::unlock() noexcept {
  if (forks_.load(std::memory_order_relaxed) != forks()) return;  // a child's, forked off within the turn
  const std::lock_guard lock(mutex_);
  if (owner_ != &this_thread) return;
  Waiter* const next = first_;
  owner_ = next == nullptr ? nullptr : next->thread;
  if (next == nullptr) return;
  first_ = next->next;
  next->has_turn = true;
  next->called.notify_one();  // within the lock: the waiter, and with it this variable, lives until it has returned
}

}  // namespace ktinject::runtime
