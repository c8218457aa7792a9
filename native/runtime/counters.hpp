// What tasks of one call of the pool wait for.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>

namespace ktinject::runtime {

// Tasks that are still to be done before another can start, each counter a thing that is waited for. Each has a cache
// line: all threads count down, and others look on.
class Counters {
 public:
  void begin(std::span<const int> signals) {
    reserve(signals.size());
    for (size_t i = 0; i < signals.size(); ++i) left_[i].left.store(signals[i], std::memory_order_relaxed);
  }
  // `first`, and behind it `count` times `each`.
  void begin(int first, size_t count, int each) {
    reserve(1 + count);
    left_[0].left.store(first, std::memory_order_relaxed);
    for (size_t i = 1; i <= count; ++i) left_[i].left.store(each, std::memory_order_relaxed);
  }
  std::atomic<int>& operator[](size_t index) { return left_[index].left; }

 private:
  struct Counter {
    alignas(64) std::atomic<int> left{0};
  };
  void reserve(size_t count) {
    if (count <= capacity_) return;
    left_ = std::make_unique<Counter[]>(count);
    capacity_ = count;
  }
  std::unique_ptr<Counter[]> left_;
  size_t capacity_ = 0;
};

}  // namespace ktinject::runtime
