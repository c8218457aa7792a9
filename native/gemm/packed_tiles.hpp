// The tiles of packed panels, for those who write them.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gemm/pack.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::gemm {

inline std::byte* panel_of(const Matrix& matrix, std::span<const PanelRun> runs, int panel) {
  size_t run = 0;
  while (panel >= runs[run].first + runs[run].panels) ++run;
  return runs[run].data + static_cast<size_t>(panel - runs[run].first) * matrix.panel_bytes();
}

// use(tile, worker) for all tiles, those of a run by the workers of its node: where memory cannot be asked for on a
// node, their first touch puts it there.
template <class Use>
void each_tile(runtime::ThreadPool& workers, std::span<const PanelRun> runs, TileMap place, Use&& use) {
  const int tiles_a_panel = place == paired_tiles ? 2 : 1;
  const bool by_node = runs.size() <= workers.nodes().size();
  std::vector<int> lists(by_node ? runs.size() : 1, 0);
  for (size_t i = 0; i < runs.size(); ++i) lists[by_node ? i : 0] += runs[i].panels * tiles_a_panel;
  auto task = [&](int list, int index, int worker) {
    use((by_node ? runs[static_cast<size_t>(list)].first : 0) * tiles_a_panel + index, worker);
  };
  workers.parallel_lists(lists, task,
                         lists.size() > 1 ? runtime::ThreadPool::Steal::no : runtime::ThreadPool::Steal::yes);
}

}  // namespace ktinject::gemm
