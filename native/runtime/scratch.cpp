#include "runtime/scratch.hpp"

#include <memory>
#include <vector>

namespace ktinject::runtime {
namespace {

// At each depth of calls, as a thread keeps it.
struct Kept {
  std::unique_ptr<float[]> memory;
  size_t count = 0;
};
thread_local std::vector<Kept> kept_at;
thread_local size_t depth = 0;

}  // namespace

Scratch::Scratch(size_t count) {
  if (depth == kept_at.size()) kept_at.emplace_back();
  Kept& kept = kept_at[depth];
  if (kept.count < count) {
    kept = Kept();  // the old memory is freed first: both at once may not fit
    kept = {std::make_unique_for_overwrite<float[]>(count), count};
  }
  memory_ = kept.memory.get();
  ++depth;
}

Scratch::~Scratch() {
  Kept& kept = kept_at[--depth];
  if (kept.count * sizeof(float) > kMostKeptBytes) kept = Kept();
}

size_t Scratch::kept_bytes() {
  size_t count = 0;
  for (const Kept& kept : kept_at) count += kept.count;
  return count * sizeof(float);
}

}  // namespace ktinject::runtime
