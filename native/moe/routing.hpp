// Which token goes to which expert: the rows that experts compute, sorted by expert.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "gemm/layout.hpp"

namespace ktinject::moe {

struct Routing {
  std::vector<int> count;   // [experts]: rows
  std::vector<int> start;   // [experts]: first row
  std::vector<int> expert;  // [rows]: expert of a sorted row
  std::vector<int> token;   // [rows]: token of a sorted row
  std::vector<int> row;     // [tokens, top_k]: sorted row of a slot, or -1
  std::vector<int> active;  // experts with rows, most rows first

  // Slots [tokens * top_k] whose id is none of the experts' are left out.
  template <class Id>
  void sort(const Id* ids, int tokens, int top_k, int experts);

  // Experts that are among these, too, get the places that they have there; for routings in which no expert has more
  // rows than another.
  void keep_places(std::span<const int> experts);

  size_t rows() const { return expert.size(); }
  int count_of(int id) const { return count[static_cast<size_t>(id)]; }
  size_t start_of(int id) const { return static_cast<size_t>(start[static_cast<size_t>(id)]); }
  int active_at(int place) const { return active[static_cast<size_t>(place)]; }

  // use(place among the active experts, first row, rows) for the groups of up to 16 rows of every expert that has more
  // than one row.
  template <class Use>
  void for_groups(Use&& use) const {
    for (size_t place = 0; place < active.size(); ++place) {
      const int rows = count_of(active[place]);
      for (int first = 0; rows > 1 && first < rows; first += gemm::kTile)
        use(static_cast<int>(place), first, std::min(gemm::kTile, rows - first));
    }
  }
};

}  // namespace ktinject::moe
