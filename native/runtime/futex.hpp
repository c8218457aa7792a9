// Sleeping until another thread of this process changes a word.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace ktinject::runtime {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

// Returns at once where `word` is not `seen`, else after a futex_wake(), the timeout (null: none) or for no reason.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, timeout, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace ktinject::runtime
