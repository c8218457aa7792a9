// What the pool's idle workers bring nearer, until there is something to compute.
#include <immintrin.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/pool_queue.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::runtime {
namespace {

// What fetch() asks for between two looks for news.
constexpr size_t kFetchedAtOnce = 2048;

// Where a thread is in its own part of what it told a pool to fetch.
struct Fetching {
  std::weak_ptr<ThreadPool> pool;
  uint32_t generation = 0;
  int task = 0;
  size_t at = 0;
};
thread_local Fetching fetching;

}  // namespace

size_t ThreadPool::most_fetched() {
  // What workers compute with needs some of the second cache, too. Where nobody says how many share it, two threads of
  // a core do.
  static const size_t most = [] {
    constexpr size_t kMost = size_t{768} << 10;
    size_t share = level2_share("", allowed_cpus());
    if (share == 0) share = static_cast<size_t>(std::max(0L, sysconf(_SC_LEVEL2_CACHE_SIZE))) / 2;
    return share > 0 ? std::min(kMost, share / 4 * 3) : kMost;
  }();
  return most;
}

void ThreadPool::begin_fetch(std::span<const int> tasks) {
  deal(tasks, Steal::yes, Wake::most);
  for (int index = 0; index < queue_count_; ++index) {
    Queue& queue = queues_[static_cast<size_t>(index)];
    queue.fetches.store(0, std::memory_order_relaxed);
    queue.room = most_fetched();
  }
}

void ThreadPool::tell(int queue, std::span<const std::byte> memory) {
  Queue& to = queues_[static_cast<size_t>(queue)];
  const int at = to.fetches.load(std::memory_order_relaxed);
  const size_t bytes = std::min(memory.size(), to.room);
  if (bytes == 0 || at == kMostFetched) return;
  to.room -= bytes;
  to.fetch[static_cast<size_t>(at)].first.store(memory.data(), std::memory_order_relaxed);
  to.fetch[static_cast<size_t>(at)].bytes.store(bytes, std::memory_order_relaxed);
  to.fetches.store(at + 1, std::memory_order_release);
}

// A generation without tasks: all words keep an earlier one, so nobody can claim anything.
void ThreadPool::publish_fetch() {
  const uint32_t generation = ++generation_;
  fetches_for_.store(generation, std::memory_order_relaxed);
  fetching = {weak_from_this(), generation, 0, 0};
  publish(news_, generation);
  for (int i = spared(Steal::yes, Wake::most); i < spare_; ++i)
    publish(spare_news_[static_cast<size_t>(i)], generation);
}

// Bytes of the next piece, 0 where there is none.
size_t ThreadPool::fetch_piece(int& task, size_t& at, int worker) const {
  const Queue& own = queues_[static_cast<size_t>(seat_of(worker).queue)];
  if (own.workers != 1 || task >= own.fetches.load(std::memory_order_acquire)) return 0;
  const Queue::Fetched& one = own.fetch[static_cast<size_t>(task)];
  const auto* const first = reinterpret_cast<const char*>(one.first.load(std::memory_order_relaxed));
  const size_t bytes = one.bytes.load(std::memory_order_relaxed), begin = at;
  const size_t end = std::max(begin, std::min(bytes, begin + kFetchedAtOnce));
  for (; at < end; at += 64) _mm_prefetch(first + at, _MM_HINT_T1);
  if (end >= bytes) ++task, at = 0;
  return end - begin;
}

void ThreadPool::fetch_own(const News& news, uint32_t generation, int worker) {
  if (fetches_for_.load(std::memory_order_relaxed) != generation) return;
  int task = 0;
  size_t at = 0, bytes = 0;
  while (news.generation.load(std::memory_order_relaxed) == generation) {
    const bool is_all = told_for_.load(std::memory_order_acquire) == generation;
    const size_t piece = fetch_piece(task, at, worker);
    bytes += piece;
    if (piece > 0) continue;
    if (is_all) break;
    _mm_pause();
  }
  queues_[static_cast<size_t>(seat_of(worker).queue)].fetched.fetch_add(bytes, std::memory_order_relaxed);
}

std::vector<std::span<const std::byte>> ThreadPool::told(int worker) const {
  const Queue& own = queues_[static_cast<size_t>(seat_of(worker).queue)];
  std::vector<std::span<const std::byte>> told;
  for (int i = 0; own.workers == 1 && i < own.fetches.load(); ++i) {
    const Queue::Fetched& one = own.fetch[static_cast<size_t>(i)];
    told.emplace_back(one.first.load(), one.bytes.load());
  }
  return told;
}

size_t ThreadPool::fetched() const {
  size_t bytes = 0;
  for (int index = 0; index < queue_count_; ++index) bytes += queues_[static_cast<size_t>(index)].fetched.load();
  return bytes;
}

bool fetch_more() {
  const std::shared_ptr<ThreadPool> pool = fetching.pool.lock();
  if (pool == nullptr || pool->news_.generation.load(std::memory_order_relaxed) != fetching.generation) return false;
  const size_t bytes = pool->fetch_piece(fetching.task, fetching.at, 0);
  pool->queues_[static_cast<size_t>(pool->seat_of(0).queue)].fetched.fetch_add(bytes, std::memory_order_relaxed);
  return bytes > 0;
}

}  // namespace ktinject::runtime
