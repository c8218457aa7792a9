#include "runtime/uses.hpp"

#include <algorithm>
#include <mutex>

namespace ktinject::runtime {
namespace {

using Uses = std::pair<const void*, std::vector<uint64_t>>;

// Never freed: a thread may count while the process ends.
std::mutex& lock() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

std::vector<Uses>& counted() {
  static auto* const found = new std::vector<Uses>;
  return *found;
}

}  // namespace

std::atomic<bool> uses_counted{false};

void uses_start() {
  const std::lock_guard held(lock());
  counted().clear();
  uses_counted.store(true);
}

void uses_stop() {
  const std::lock_guard held(lock());
  uses_counted.store(false);
}

std::vector<Uses> uses() {
  const std::lock_guard held(lock());
  return counted();
}

template <class Id>
void add_uses(const void* owner, int experts, const Id* ids, size_t count) {
  const std::lock_guard held(lock());
  std::vector<Uses>& all = counted();
  auto mine = std::find_if(all.begin(), all.end(), [owner](const Uses& one) { return one.first == owner; });
  if (mine == all.end()) mine = all.insert(all.end(), {owner, {}});
  // Another layer may have been made where one was that is gone.
  if (mine->second.size() != static_cast<size_t>(experts)) mine->second.assign(static_cast<size_t>(experts), 0);
  for (size_t i = 0; i < count; ++i)
    if (ids[i] >= 0 && ids[i] < experts) ++mine->second[static_cast<size_t>(ids[i])];
}

template void add_uses(const void*, int, const int32_t*, size_t);
template void add_uses(const void*, int, const int64_t*, size_t);

}  // namespace ktinject::runtime
