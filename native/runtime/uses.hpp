// How often each expert is chosen, for whoever looks: counted only between start and stop.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ktinject::runtime {

// Forgets what was counted and counts from now on.
void uses_start();
void uses_stop();
// Of each layer's experts that computed since the start: the layer's experts, and how often each one was chosen.
std::vector<std::pair<const void*, std::vector<uint64_t>>> uses();

extern std::atomic<bool> uses_counted;
template <class Id>
void add_uses(const void* owner, int experts, const Id* ids, size_t count);

// Ids of what `owner` is about to compute; others than those of its experts are left out. Costs one load where nobody
// looks.
template <class Id>
void count_uses(const void* owner, int experts, const Id* ids, size_t count) {
  if (uses_counted.load(std::memory_order_relaxed)) add_uses(owner, experts, ids, count);
}

}  // namespace ktinject::runtime
