// Memory of one thread, for the length of a call.
#pragma once

#include <cstddef>
#include <vector>

namespace ktinject::runtime {

// Memory of the calling thread for as long as this lives, contents undefined. A thread keeps what it has had, so that a
// warmed-up step allocates nothing, and no two threads meet in it. What is larger than a step of any model needs goes
// back at the end: a long prompt may have needed it.
class Scratch {
 public:
  static constexpr size_t kMostKeptBytes = size_t{64} << 20;  // at each depth of calls

  explicit Scratch(size_t count);  // of floats
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator float*() const { return memory_; }

  // What the calling thread keeps, for tests.
  static size_t kept_bytes();

 private:
  float* memory_;
};

// The same for a vector that a thread keeps: at the end of a call, what a long text has made it grow to goes back.
template <class T>
void give_back(std::vector<T>& kept) {
  constexpr size_t kMostKept = size_t{1} << 20;
  if (kept.capacity() * sizeof(T) > kMostKept) std::vector<T>().swap(kept);
}

// Lays several arrays into one piece of scratch.
class Arrays {
 public:
  // Offsets first, the memory once all are known.
  size_t take(size_t count) {
    const size_t at = count_;
    count_ += (count + 15) / 16 * 16;
    return at;
  }
  size_t count() const { return count_; }

 private:
  size_t count_ = 0;
};

}  // namespace ktinject::runtime
