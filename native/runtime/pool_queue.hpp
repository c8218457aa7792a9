// The pool's own: a queue, with tasks of the call that runs, and memory that its worker is told of; and how a worker
// reads the news.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "runtime/thread_pool.hpp"

namespace ktinject::runtime {

// The latest generation, nothing if all is to end; who ends all sets `stop`, then raises the generation. In this order:
// else a worker that looks just before might take that last generation for seen, and sleep for ever.
template <class Generation, class Stop>
std::optional<uint32_t> latest_news(const Generation& generation, const Stop& stop) {
  const uint32_t latest = generation.load(std::memory_order_acquire);
  if (stop.load(std::memory_order_relaxed)) return std::nullopt;
  return latest;
}

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
