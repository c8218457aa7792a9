// Memory that the tasks of a call read, and what is read behind it.
//
// A decode step makes the same calls for each token, and between two of them the memory bus has nothing to do. So who
// knows what was read behind a call the last time can have it brought nearer meanwhile.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <unordered_map>

namespace ktinject::runtime {

// Tasks go through parts, one after the other. Only addresses are kept: what lies there may be gone later.
class Reads {
 public:
  static constexpr size_t kMostParts = 4;

  // `bytes` of memory, of which each task reads so many, the last one what is left.
  void add(const void* first, size_t bytes, size_t bytes_of_task);
  // Tasks that read `bytes` each, which begin so far from each other.
  void add(const void* first, int tasks, size_t bytes, size_t stride);

  int tasks() const;
  std::span<const std::byte> of(int task) const;
  // What tells them from others: where they begin.
  const std::byte* begin() const { return parts_[0].first; }

 private:
  struct Part {
    const std::byte* first = nullptr;
    size_t bytes = 0, stride = 0, last_bytes = 0;  // of a task, from one to the next, and of the last one
    int tasks = 0;
  };
  std::array<Part, kMostParts> parts_{};
  size_t count_ = 0;
};

// Which calls came behind which.
class Successors {
 public:
  // What came behind `now` when it was here before; null: that is not known. `now` came behind the last one.
  const Reads* after(const Reads& now);

 private:
  // More are those of models that are gone.
  static constexpr size_t kMost = 8192;
  std::unordered_map<const std::byte*, Reads> found_;
  const std::byte* last_ = nullptr;
};

}  // namespace ktinject::runtime
