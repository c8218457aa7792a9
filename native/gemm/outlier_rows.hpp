// The outliers of the rows of a kernel's call, as they are added to its results panel by panel.
//
// The rows of a prompt have many of their outliers in the same channels. These weights of a panel are dequantised once
// for several rows, whose values lie side by side, with zeros. Rows with outliers elsewhere, too, are kept apart.
// Either way the outliers of a row are added in the order of their channels, so that results do not depend on the rows
// beside it.
#pragma once

#include "gemm/layout.hpp"

namespace ktinject::gemm {

struct OutlierRows {
  static constexpr int kMost = 320;  // rows of a call

  OutlierRows(const Matrix& matrix, const PackedActivations& rows);

  // Whether there is something to add to rows `first` ...
  bool has(int first, int count) const { return any && (shared > 0 || before[first] < before[first + count]); }

  bool any = false;  // what follows is only set where there are outliers

  // Of a panel: its bytes, where its codes begin and, of int4, its zero points (0: none); groups are of 2^group_shift
  // inputs.
  Format format;
  size_t panel_bytes, codes_at, zeros_at;
  int group_shift;

  const Outliers* outliers;                             // [m]
  int shared;                                           // channels
  uint16_t channel[Outliers::kMost];                    // ascending
  alignas(64) float values[kMost * Outliers::kMost];    // [m, shared]; zeros of rows apart
  uint16_t before[kMost + 1];                           // rows apart before a row
  uint16_t apart[kMost];                                // rows
  uint8_t places[kMost * Outliers::kMost];              // [rows apart, 16]: outliers' in channel; shared: in none
  const std::byte* panel = nullptr;                     // whose weights of the shared channels are
  alignas(64) float columns[Outliers::kMost * kPanel];  // [shared, 32]

 private:
  void find_shared(int m);
  bool share(const Outliers& row, float* to) const;
  void find_places(const Outliers& row, uint8_t* to) const;
};

}  // namespace ktinject::gemm
