// What a thread that waits has to mind: those who waited before it, Ctrl-C, locks of others, and forks.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace ktinject::runtime {

// How many forks lie between the first process and this one. What was remembered under another number belonged to the
// parent, whose threads do not exist here.
int forks();

// What a thread runs now and then, null where it runs nothing, and the time stamp from which on it is due.
struct Interruption {
  void (*check)() = nullptr;
  uint64_t due = 0;
};
Interruption& interruption();  // of this thread

// While one lives on a thread, `check` runs about ten times a second where that thread computes or waits for its turn.
// It may throw, which ends both. For Ctrl-C.
class Interruptible {
 public:
  explicit Interruptible(void (*check)());
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  const Interruption before_;
};

// `guard` throws where the calling thread holds something that those who have a turn may need, as `check` above needs
// Python's GIL: waiting would be for ever. It is asked before every turn, not only where there is somebody to wait for.
void set_wait_guard(void (*guard)());

// A mutex for what one thread at a time may use, for long. It is handed on in the order of asking, so that work which
// gives it back between its parts lets everybody else in. A waiting thread looks for Ctrl-C. Taking it twice is
// refused. In a forked child it is free.
class Turns {
 public:
  constexpr Turns() = default;
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  void lock();  // throws std::logic_error, and what the guard and the check throw
  void unlock() noexcept;

 private:
  struct Waiter;
  void forget_parent();
  bool leave(Waiter& waiter);

  std::mutex mutex_;  // of all that follows; held for moments
  const void* owner_ = nullptr;
  Waiter* first_ = nullptr;
  std::atomic<int> forks_{0};  // that all this belongs to
};

}  // namespace ktinject::runtime
