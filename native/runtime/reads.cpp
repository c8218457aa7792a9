#include "runtime/reads.hpp"

#include <stdexcept>

namespace ktinject::runtime {

void Reads::add(const void* first, size_t bytes, size_t bytes_of_task) {
  if (bytes == 0 || bytes_of_task == 0) throw std::logic_error("reads: a part without memory");
  const int tasks = static_cast<int>((bytes + bytes_of_task - 1) / bytes_of_task);
  add(first, tasks, bytes_of_task, bytes_of_task);
  parts_[count_ - 1].last_bytes = bytes - static_cast<size_t>(tasks - 1) * bytes_of_task;
}

void Reads::add(const void* first, int tasks, size_t bytes, size_t stride) {
  if (count_ == kMostParts) throw std::logic_error("reads: more parts than there is room for");
  parts_[count_++] = {static_cast<const std::byte*>(first), bytes, stride, bytes, tasks};
}

int Reads::tasks() const {
  int all = 0;
  for (size_t i = 0; i < count_; ++i) all += parts_[i].tasks;
  return all;
}

std::span<const std::byte> Reads::of(int task) const {
  size_t i = 0;
  while (task >= parts_[i].tasks) task -= parts_[i++].tasks;
  const Part& part = parts_[i];
  return {part.first + static_cast<size_t>(task) * part.stride,
          task + 1 == part.tasks ? part.last_bytes : part.bytes};
}

const Reads* Successors::after(const Reads& now) {
  const std::byte* const here = now.begin();
  if (last_ != nullptr) {
    if (found_.size() >= kMost) found_.clear();
    found_.insert_or_assign(last_, now);
  }
  last_ = here;
  const auto found = found_.find(here);
  return found == found_.end() ? nullptr : &found->second;
}

}  // namespace ktinject::runtime
