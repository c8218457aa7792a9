#include "gemm/outlier_rows.hpp"

#include <algorithm>
#include <bit>

namespace ktinject::gemm {
namespace {

// Rows that are looked at for channels that others have, too.
constexpr int kSampled = 8;

}  // namespace

OutlierRows::OutlierRows(const Matrix& matrix, const PackedActivations& rows) : outliers(rows.outliers) {
  if (outliers == nullptr) return;
  for (int row = 0; row < rows.m && !any; ++row) any = outliers[row].count > 0;
  if (!any) return;
  format = matrix.format;
  panel_bytes = matrix.panel_bytes();
  codes_at = matrix.head_bytes();
  zeros_at = format == Format::int8 || matrix.symmetric ? 0 : int4_zeros_at(matrix.groups());
  group_shift = format == Format::int8 ? 0 : std::countr_zero(static_cast<unsigned>(matrix.group_size));
  find_shared(rows.m);
  int found = 0;
  for (int row = 0; row < rows.m; ++row) {
    before[row] = static_cast<uint16_t>(found);
    if (share(outliers[row], values + row * shared)) continue;
    find_places(outliers[row], places + found * Outliers::kMost);
    apart[found++] = static_cast<uint16_t>(row);
  }
  before[rows.m] = static_cast<uint16_t>(found);
}

void OutlierRows::find_shared(int m) {
  uint16_t found[kSampled * Outliers::kMost];
  int count = 0;
  const int sampled = std::min(m, kSampled);
  for (int i = 0; i < sampled; ++i) {
    const Outliers& row = outliers[i * m / sampled];
    for (int j = 0; j < row.count; ++j) found[count++] = row.at[j];
  }
  std::sort(found, found + count);
  shared = 0;
  // A row has no more than kMost: at the latest the channels that all rows have are few enough.
  for (int least = 2; least <= sampled; ++least) {
    shared = 0;
    for (int i = 0, next = 0; i < count; i = next) {
      while (next < count && found[next] == found[i]) ++next;
      if (next - i < least) continue;
      if (shared < Outliers::kMost) channel[shared] = found[i];
      ++shared;
    }
    if (shared <= Outliers::kMost) return;
  }
}

// Whether all outliers of a row are in shared channels; to [shared] = their values, or zeros.
bool OutlierRows::share(const Outliers& row, float* to) const {
  int i = 0;
  for (int s = 0; s < shared; ++s) to[s] = i < row.count && row.at[i] == channel[s] ? row.value[i++] : 0.0f;
  if (i == row.count) return true;
  std::fill_n(to, shared, 0.0f);
  return false;
}

void OutlierRows::find_places(const Outliers& row, uint8_t* to) const {
  for (int i = 0, s = 0; i < row.count; ++i) {
    while (s < shared && channel[s] < row.at[i]) ++s;
    to[i] = static_cast<uint8_t>(s < shared && channel[s] == row.at[i] ? s : shared);
  }
}

}  // namespace ktinject::gemm
