#include "runtime/scratch.hpp"

#include <vector>

namespace ktinject::runtime {
namespace {

// Of a thread: what is borrowed at each depth of calls.
thread_local std::vector<std::vector<float>> memory_at;
thread_local size_t depth = 0;

}  // namespace

Scratch::Scratch(size_t count) {
  if (depth == memory_at.size()) memory_at.emplace_back();
  std::vector<float>& memory = memory_at[depth];
  if (memory.size() < count) memory = std::vector<float>(count);
  memory_ = memory.data();
  ++depth;
}

Scratch::~Scratch() { --depth; }

}  // namespace ktinject::runtime
