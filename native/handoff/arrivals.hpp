// How often something has happened, for threads that wait for it asleep.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

#include "runtime/futex.hpp"

namespace ktinject::handoff {

class Arrivals {
 public:
  // What was written before is seen by who finds that it has happened. Wakes those who sleep, without whom that costs
  // no call of the system.
  void arrive() noexcept {
    count_.fetch_add(1);
    if (sleepers_.load() > 0) runtime::futex_wake(count_);
  }
  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // Waits until `done`, which arrive() may have made true. Looks again and again for some microseconds, in which most
  // answers come, and then sleeps: others may need this CPU for what is waited for. False after `seconds`.
  template <class Done>
  bool await(Done&& done, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    const std::chrono::duration<double> limit(seconds), spins(kSpinSeconds);
    while (true) {
      const uint32_t seen = count_.load();  // before `done`: what comes later than it changes the word
      if (done()) return true;
      const std::chrono::duration<double> waited = Clock::now() - start;
      if (waited >= limit) return false;
      if (waited < spins) {
        for (int i = 0; i < 8; ++i) _mm_pause();
        continue;
      }
      // In pieces, so that no time is too long for a timespec.
      const auto nap = std::chrono::duration_cast<std::chrono::nanoseconds>(
          std::min(limit - waited, std::chrono::duration<double>(1.0)));
      const timespec time{nap.count() / 1'000'000'000, nap.count() % 1'000'000'000};
      // The sleeper counts before the system compares the word: either arrive() sees it, or the word is not `seen`.
      sleepers_.fetch_add(1);
      runtime::futex_wait(count_, seen, &time);
      sleepers_.fetch_sub(1);
    }
  }

 private:
  static constexpr double kSpinSeconds = 20e-6;
  std::atomic<uint32_t> count_{0}, sleepers_{0};
};

}  // namespace ktinject::handoff
