// The choice of the greatest scores, as torch.topk makes it on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace ktinject::attention {

// The k greatest (score, index), in front. With torch's own algorithm, so that of those that tie the same ones are
// taken.
inline void take_top(std::vector<std::pair<float, int>>& order, int k, bool sorted) {
  auto greater = [](const std::pair<float, int>& a, const std::pair<float, int>& b) {
    return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
  };
  const auto first = order.begin();
  if (static_cast<size_t>(k) * 64 <= order.size()) {
    std::partial_sort(first, first + k, order.end(), greater);
    return;
  }
  std::nth_element(first, first + k - 1, order.end(), greater);
  if (sorted) std::sort(first, first + k - 1, greater);
}

}  // namespace ktinject::attention
