// Which rows of a kernel's call have their outliers in channels that they share. Their results are the same either way,
// so that only this shows it.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gemm/outlier_rows.hpp"
#include "native_test.hpp"

using namespace ktinject::gemm;

namespace {

using Row = std::vector<int>;  // channels of its outliers; each has its channel as value

void check_rows(const std::vector<Row>& rows, const Row& shared, const std::vector<int>& apart,
                const std::string& what) {
  std::vector<Outliers> outliers(rows.size());
  for (size_t row = 0; row < rows.size(); ++row)
    for (const int channel : rows[row]) {
      const int place = outliers[row].count++;
      outliers[row].at[place] = static_cast<uint16_t>(channel);
      outliers[row].value[place] = static_cast<float>(channel);
    }
  const Matrix matrix{Format::int8, 32, 1024, 0, 1, true};
  PackedActivations activations;
  activations.m = static_cast<int>(rows.size());
  activations.outliers = outliers.data();
  const OutlierRows found(matrix, activations);
  const bool any = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return !row.empty(); });
  check(found.any == any, what + ": whether there are any");
  if (!any) return;
  check(Row(found.channel, found.channel + found.shared) == shared, what + ": the channels that rows share");
  const auto count = found.before[rows.size()];
  check(std::vector<int>(found.apart, found.apart + count) == apart, what + ": the rows apart");
  for (int row = 0; row < activations.m; ++row) {
    const auto at = static_cast<size_t>(row);
    const bool is_apart = std::find(apart.begin(), apart.end(), row) != apart.end();
    for (size_t i = 0; i < shared.size(); ++i) {
      const bool has = !is_apart && std::find(rows[at].begin(), rows[at].end(), shared[i]) != rows[at].end();
      check(found.values[at * shared.size() + i] == (has ? static_cast<float>(shared[i]) : 0.0f),
            what + ": values of row " + std::to_string(row));
    }
    check(found.has(row, 1) == (!shared.empty() || is_apart),
          what + ": what there is to add to " + std::to_string(row));
  }
}

}  // namespace

void test_outlier_rows() {
  check_rows({{}, {}, {}}, {}, {}, "none");
  check_rows({{3, 9}}, {}, {0}, "a row alone");
  check_rows({{3, 9}, {}, {9}, {3, 9}}, {3, 9}, {}, "two channels");
  check_rows({{3, 9}, {3, 5, 9}, {}, {700}, {3}}, {3, 9}, {1, 3}, "two channels, and others");
  std::vector<Row> many(320, Row{7, 1000});
  check_rows(many, {7, 1000}, {}, "as many rows as there may be");
  std::vector<Row> full;
  Row all;
  for (int row = 0; row < 8; ++row) {  // pairs of rows have 15 channels together, and all have one
    full.push_back({});
    for (int i = 0; i < 15; ++i) full.back().push_back(row / 2 * 100 + i);
    full.back().push_back(900);
  }
  check_rows(full, {900}, {0, 1, 2, 3, 4, 5, 6, 7}, "more shared channels than there is room for");
}
