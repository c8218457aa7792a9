// A queue of the pool: tasks of the call that runs, and memory that its worker is told of. The pool's own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "runtime/thread_pool.hpp"

namespace ktinject::runtime {

struct ThreadPool::Queue {
  // All that a claim reads is in one cache line, which comes from the caller's core.
  alignas(64) std::atomic<uint64_t> word{0};      // generation << 32 | tasks left
  Share share;                                    // of the latest call that had tasks for it
  int node = 0;                                   // the same for every call, as the next one
  int workers = 0;                                // whose home this is
  alignas(64) std::atomic<uint32_t> finished{0};  // tasks finished by those workers, of all calls so far
  // What its only worker is to bring nearer. Who is late may see parts of two lists, which does no harm.
  struct Fetched {
    std::atomic<const std::byte*> first{nullptr};
    std::atomic<size_t> bytes{0};
  };
  alignas(64) std::atomic<int> fetches{0};
  size_t room = 0;  // bytes that it may still be told of
  std::array<Fetched, kMostFetched> fetch;
  alignas(64) std::atomic<size_t> fetched{0};  // bytes so far
};

}  // namespace ktinject::runtime
