// Memory of one thread, for the length of a call.
#pragma once

#include <cstddef>

namespace ktinject::runtime {

// Memory of the calling thread for as long as this lives, contents undefined. A thread keeps what it has had, so that a
// warmed-up step allocates nothing, and no two threads meet in it.
class Scratch {
 public:
  explicit Scratch(size_t count);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator float*() const { return memory_; }

 private:
  float* memory_;
};

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
