#include "moe/routing.hpp"

#include <algorithm>
#include <cstdint>

namespace ktinject::moe {

template <class Id>
void Routing::sort(const Id* ids, int tokens, int top_k, int experts) {
  const int slots = tokens * top_k;
  count.assign(static_cast<size_t>(experts), 0);
  start.assign(static_cast<size_t>(experts), 0);
  row.assign(static_cast<size_t>(slots), -1);
  active.clear();
  auto routed = [&](int slot) { return ids[slot] >= 0 && ids[slot] < experts; };
  for (int slot = 0; slot < slots; ++slot)
    if (routed(slot)) ++count[static_cast<size_t>(ids[slot])];
  int rows = 0;
  for (int e = 0; e < experts; ++e) {
    start[static_cast<size_t>(e)] = rows;
    rows += count[static_cast<size_t>(e)];
    if (count[static_cast<size_t>(e)] > 0) active.push_back(e);
  }
  expert.resize(static_cast<size_t>(rows));
  token.resize(static_cast<size_t>(rows));
  // `start` is advanced while filling, and set back below.
  for (int slot = 0; slot < slots; ++slot) {
    if (!routed(slot)) continue;
    const int to = start[static_cast<size_t>(ids[slot])]++;
    row[static_cast<size_t>(slot)] = to;
    expert[static_cast<size_t>(to)] = static_cast<int>(ids[slot]);
    token[static_cast<size_t>(to)] = slot / top_k;
  }
  for (int e = 0; e < experts; ++e) start[static_cast<size_t>(e)] -= count[static_cast<size_t>(e)];
  // The longest first, so that no long task is left for the end.
  std::stable_sort(active.begin(), active.end(),
                   [&](int a, int b) { return count[static_cast<size_t>(a)] > count[static_cast<size_t>(b)]; });
}

void Routing::keep_places(std::span<const int> experts) {
  for (size_t place = 0; place < std::min(experts.size(), active.size()); ++place) {
    const auto found = std::find(active.begin(), active.end(), experts[place]);
    if (found != active.end()) std::swap(active[place], *found);
  }
}

template void Routing::sort(const int32_t*, int, int, int);
template void Routing::sort(const int64_t*, int, int, int);

}  // namespace ktinject::moe
