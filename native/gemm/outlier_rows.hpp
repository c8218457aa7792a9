// Which rows of a kernel's call have outliers. Most have none, and theirs are not looked at for each panel: 300 rows of
// them would drive the weights out of the L1 cache.
#pragma once

#include "gemm/vector_ops.hpp"

namespace ktinject::gemm {

class OutlierRows {
 public:
  static constexpr int kMost = 320;  // rows of a call

  explicit OutlierRows(const PackedActivations& rows) : outliers_(rows.outliers) {
    int found = 0;
    if (outliers_ != nullptr)
      for (int row = 0; row < rows.m; ++row) {
        before_[row] = static_cast<uint16_t>(found);
        if (outliers_[row].count > 0) row_[found++] = static_cast<uint16_t>(row);
      }
    any_ = found > 0;
    if (any_) before_[rows.m] = static_cast<uint16_t>(found);
  }

  // c [count, 32] += the outliers of rows `first` ... times a panel's weights.
  void add(const VectorOps& ops, const Matrix& matrix, const std::byte* panel, int first, int count, float* c) {
    if (!any_) return;
    const int begin = before_[first], end = before_[first + count];
    if (end - begin == count) return ops.add_outliers(matrix, panel, outliers_ + first, count, columns_, c);
    for (int i = begin; i < end; ++i)
      ops.add_outliers(matrix, panel, outliers_ + row_[i], 1, columns_, c + (row_[i] - first) * kPanel);
  }

 private:
  const Outliers* outliers_;
  bool any_ = false;
  uint16_t before_[kMost + 1];  // rows with outliers before a row
  uint16_t row_[kMost];
  OutlierColumns columns_;
};

}  // namespace ktinject::gemm
