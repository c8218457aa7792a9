// Two steps: round or quantise each row of x once, then multiply in tasks of (some rows, some panels). With a single
// row the first is done by the caller alone, so that a token costs one hand-out of tasks.
#include "gemm/linear.hpp"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "gemm/outlier_rows.hpp"

namespace ktinject::gemm {
namespace {

// Slots of the pool's buffers; 0 belongs to packing. A layer has them to itself while it runs, as the experts have.
enum Slot : size_t { kInput = 1, kInputScale, kInputSums, kInputOutliers, kThread };
constexpr size_t kSlots = 5;

// Long inputs are cut so that the rounded rows stay below this.
constexpr size_t kMostWorkspaceBytes = size_t{256} << 20;
// Rows that a kernel is given at once, and rows times panels: 512 KiB of results, a part of an L2 cache.
constexpr int kMostRows = 256;
static_assert(kMostRows <= OutlierRows::kMost);
constexpr int kMostResults = 4096;
// Less than this is left to the caller: waking workers would cost more.
constexpr size_t kSerialBytes = size_t{128} << 10;
constexpr int kTasksPerThread = 4;
// And a task of few rows reads no more than this: who is late with the last one holds up all.
constexpr size_t kMostTaskBytes = size_t{256} << 10;
constexpr int kReadRows = 4;

size_t result_bytes(DType dtype, bool is_wide) { return is_wide ? sizeof(float) : dtype_bytes(dtype); }

}  // namespace

Linear::Linear(LinearConfig config)
    : config_(std::move(config)),
      kernels_(choose_kernel(config_.format, config_.kernel)),
      vector_ops_(&kernels_.vector_ops()) {
  check_size("out_features", config_.out_features, 1 << 24);
  check_inputs("in_features", config_.format, config_.in_features);
  check_format(config_.format, config_.group_size, config_.symmetric);
  matrix_ = {config_.format,
             config_.out_features,
             config_.in_features,
             scale_group(config_.format, config_.group_size),
             (config_.out_features + kPanel - 1) / kPanel,
             config_.symmetric};
}

size_t Linear::bytes() const {
  return matrix_.bytes() + (config_.has_bias ? static_cast<size_t>(matrix_.panels) * kPanel * sizeof(float) : 0);
}

void Linear::allocate() {
  const runtime::Session session;
  if (data_.data() != nullptr) throw std::logic_error("allocate: this layer has its memory already; make another one");
  runtime::Block data(matrix_.bytes()), bias;
  if (config_.has_bias) bias = runtime::Block(static_cast<size_t>(matrix_.panels) * kPanel * sizeof(float));
  data_ = std::move(data);
  bias_ = std::move(bias);
}

void Linear::check(const Source& source, int k, const char* what) const {
  auto refuse = [&](const std::string& why) { throw std::invalid_argument(std::string(what) + ": " + why); };
  if (data_.data() == nullptr) refuse("allocate() was not called");
  if (source.n != config_.out_features || source.k != k)
    refuse("found shape [" + std::to_string(source.n) + ", " + std::to_string(source.k) + "]; expected [" +
           std::to_string(config_.out_features) + ", " + std::to_string(k) + "]");
}

template <class Pack>
void Linear::load_as(int n, int k, const Pack& pack) {
  const runtime::Session workers;
  check({nullptr, DType::f32, n, k, 0, 0}, config_.in_features, "weight");
  // A weight that is there stays as it is until all of the new one is packed: packing may end by an error.
  runtime::Block fresh = has_weight_ ? runtime::Block(matrix_.bytes()) : runtime::Block();
  const PanelRun whole[] = {{0, matrix_.panels, has_weight_ ? fresh.data() : data_.data()}};
  pack(*workers, paired_tiles, whole, "weight");
  if (has_weight_) data_ = std::move(fresh);
  has_weight_ = true;
}

void Linear::load(const Source& weight) {
  load_as(weight.n, weight.k,
          [&](auto& workers, const auto&... to) { pack_matrix(workers, matrix_, *vector_ops_, weight, to...); });
}

void Linear::load_fp8(const Fp8Source& weight) {
  load_as(weight.n, weight.k, [&](auto& workers, const auto&... to) { pack_fp8(workers, matrix_, weight, to...); });
}

void Linear::load_nvfp4(const Nvfp4Source& weight) {
  load_as(weight.n, weight.k, [&](auto& workers, const auto&... to) { pack_nvfp4(workers, matrix_, weight, to...); });
}

void Linear::load_integers(const IntegerSource& weight) {
  load_as(weight.n, weight.k,
          [&](auto& workers, const auto&... to) { pack_integers(workers, matrix_, weight, to...); });
}

void Linear::load_blocks(const KSource& weight) {
  // The length of the rows tells how many inputs there are; it is checked where they are packed.
  load_as(weight.n, config_.in_features,
          [&](auto& workers, const auto&... to) { pack_k_quants(workers, matrix_, weight, to...); });
}

void Linear::load_bias(const Source& bias) {
  if (!config_.has_bias) throw std::invalid_argument("bias: this layer was built without one");
  const runtime::Session session;
  check(bias, 1, "bias");
  vector_ops_->widen(bias.data, bias.dtype, bias.n_stride, bias.n, reinterpret_cast<float*>(bias_.data()));
  has_bias_ = true;
}

void Linear::mark_loaded() {
  const runtime::Session session;
  if (data_.data() == nullptr) throw std::invalid_argument("mark_loaded: allocate() was not called");
  has_weight_ = true;
  has_bias_ = config_.has_bias;
}

bool Linear::has_weight() const {
  const runtime::Session session;
  return has_weight_;
}

bool Linear::has_bias() const {
  const runtime::Session session;
  return has_bias_;
}

void Linear::unpack(float* out) const {
  const runtime::Session workers;
  check({nullptr, DType::f32, config_.out_features, config_.in_features, 0, 0}, config_.in_features, "weight");
  unpack_matrix(*workers, matrix_, data_.data(), paired_tiles, config_.out_features, out);
}

void Linear::unpack_bias(float* out) const {
  const runtime::Session session;
  if (bias_.data() == nullptr) throw std::invalid_argument("bias: there is none");
  const auto* bias = reinterpret_cast<const float*>(bias_.data());
  std::copy(bias, bias + config_.out_features, out);
}

void Linear::forward(const void* x, DType dtype, int rows, void* y) const {
  const Product one{this, y};
  forward(std::span(&one, 1), x, dtype, rows);
}

void Linear::forward(std::span<const Product> products, const void* x, DType dtype, int rows) {
  while (!products.empty()) {
    const Linear& front = *products.front().linear;
    // Of many rows, one format after the other, so that a second one's input takes no memory beside the first one's.
    const size_t together = rows <= kReadRows ? std::min(products.size(), kMostTogether) : alike(products);
    const int most = std::max(
        kMostRows, static_cast<int>(std::min<size_t>(kMostWorkspaceBytes / front.matrix_.row_bytes(), 1u << 20)));
    for (int64_t first = 0; first < rows; first += most) {
      std::array<Product, kMostTogether> part;
      for (size_t i = 0; i < together; ++i) {
        const auto& [linear, y, is_wide] = products[i];
        const size_t width = static_cast<size_t>(linear->config_.out_features) * result_bytes(dtype, is_wide);
        part[i] = {linear, static_cast<std::byte*>(y) + static_cast<size_t>(first) * width, is_wide};
      }
      const auto width = static_cast<size_t>(front.config_.in_features) * dtype_bytes(dtype);
      run(std::span(part.data(), together), static_cast<const std::byte*>(x) + static_cast<size_t>(first) * width,
          dtype, static_cast<int>(std::min<int64_t>(most, rows - first)));
    }
    products = products.subspan(together);
  }
}

bool Linear::reads_as(const Linear& other) const {
  return matrix_.format == other.matrix_.format && matrix_.k == other.matrix_.k &&
         matrix_.group_size == other.matrix_.group_size && kernels_.many == other.kernels_.many &&
         kernels_.few == other.kernels_.few;
}

size_t Linear::alike(std::span<const Product> products) {
  size_t count = 1;
  while (count < products.size() && count < kMostTogether && products[0].linear->reads_as(*products[count].linear))
    ++count;
  return count;
}

Linear::Tasks::Tasks(runtime::ThreadPool& workers, std::span<const Product> products, DType dtype, int rows, int place)
    : product_count_(products.size()), dtype_(dtype), row_blocks_((rows + kMostRows - 1) / kMostRows) {
  if (products.size() > kMostTogether)
    throw std::invalid_argument("products of one input: found " + std::to_string(products.size()) +
                                "; allowed: at most " + std::to_string(kMostTogether));
  std::copy(products.begin(), products.end(), products_.begin());
  for (size_t first = 0; first < product_count_;) {
    const size_t last = first + alike(products.subspan(first));
    const size_t own_place = static_cast<size_t>(place) * kMostTogether + group_count_;
    const Group& group = groups_[group_count_++] = group_of(workers, first, last, rows, static_cast<int>(own_place));
    for (; first < last; ++first) {
      const Matrix& matrix = products_[first].linear->matrix_;
      bytes_ += matrix.bytes() * static_cast<size_t>(rows);
      starts_[first + 1] = starts_[first] + (matrix.panels + group.run_length - 1) / group.run_length;
    }
  }
  count_ = starts_[product_count_] * row_blocks_;
}

Linear::Tasks::Group Linear::Tasks::group_of(runtime::ThreadPool& workers, size_t first, size_t last, int rows,
                                             int place) const {
  size_t scratch = 0;
  int panels = 0;
  for (size_t i = first; i < last; ++i) {
    const Linear& linear = *products_[i].linear;
    if (linear.data_.data() == nullptr) throw std::invalid_argument("forward before allocate()");
    if (!linear.has_weight_ || linear.has_bias_ != linear.config_.has_bias)
      throw std::invalid_argument(std::string("forward: never loaded: ") + (linear.has_weight_ ? "bias" : "weight"));
    scratch = std::max(scratch, scratch_bytes(linear.matrix_));
    panels += linear.matrix_.panels;
  }
  const Linear& front = *products_[first].linear;
  const Matrix& matrix = front.matrix_;
  const auto m = static_cast<size_t>(rows), scales = static_cast<size_t>(matrix.row_scales());
  auto memory = [&](Slot slot, bool is_there, size_t bytes) -> std::byte* {
    return is_there ? workers.buffer(slot + static_cast<size_t>(place) * kSlots, bytes) : nullptr;
  };
  Group group{};
  group.first = first;
  group.last = last;
  group.sums_of_row = has_group_sums(matrix.format) ? static_cast<size_t>(matrix.groups()) : 0;
  group.input = memory(kInput, true, m * matrix.row_bytes());
  group.scale = reinterpret_cast<float*>(memory(kInputScale, has_int8_rows(matrix.format), m * scales * sizeof(float)));
  group.sums =
      reinterpret_cast<int32_t*>(memory(kInputSums, group.sums_of_row > 0, m * group.sums_of_row * sizeof(int32_t)));
  group.outliers =
      reinterpret_cast<Outliers*>(memory(kInputOutliers, has_outliers(matrix.format), m * sizeof(Outliers)));
  // Fewer rows a task only where the panels are too few to go round.
  const int per_block = std::max(1, workers.threads() * kTasksPerThread / row_blocks_);
  const int block_rows = std::min(kMostRows, round_up(rows, kTile));
  group.run_length = std::clamp(panels / per_block, 1, kMostResults / block_rows);
  if (rows <= kReadRows)
    group.run_length = std::min(group.run_length, std::max(1, static_cast<int>(kMostTaskBytes / matrix.panel_bytes())));
  group.result_bytes = static_cast<size_t>(block_rows * group.run_length * kPanel) * sizeof(float);
  group.thread_bytes = group.result_bytes + matrix.row_bytes() + scratch;
  group.own = memory(kThread, true, group.thread_bytes * static_cast<size_t>(workers.threads()));

  group.kernel = &front.kernels_(rows);
  group.all = {group.input, matrix.row_bytes(), rows, group.scale, group.sums, group.outliers, matrix.row_scales()};
  return group;
}

bool Linear::Tasks::is_small() const { return bytes_ < kSerialBytes; }

void Linear::Tasks::convert(const void* x, int row, int worker) const {
  const auto at = static_cast<size_t>(row);
  for (const Group& group : groups()) {
    const Linear& front = *products_[group.first].linear;
    const Matrix& matrix = front.matrix_;
    const void* from = static_cast<const std::byte*>(x) + at * static_cast<size_t>(matrix.k) * dtype_bytes(dtype_);
    const int rows = group.all.m;
    std::byte* to = rows == 1 ? group.input : group.own_of(worker) + group.result_bytes;
    pack_row(*front.vector_ops_, matrix, from, dtype_, to,
             group.scale == nullptr ? nullptr : group.scale + at * static_cast<size_t>(matrix.row_scales()),
             group.sums == nullptr ? nullptr : group.sums + at * group.sums_of_row,
             group.outliers == nullptr ? nullptr : group.outliers + row);
    if (rows > 1) place_row(group.input, matrix.row_bytes(), rows, row, to);
  }
}

// Neighbouring tasks share their panels, which stay in the caches while the rows pass.
Linear::Tasks::Piece Linear::Tasks::piece(int index) const {
  const int run = index / row_blocks_;
  size_t i = 0, g = 0;
  while (run >= starts_[i + 1]) ++i;
  while (i >= groups_[g].last) ++g;
  const int length = groups_[g].run_length, panel = (run - starts_[i]) * length;
  return {groups_[g], products_[i], panel, std::min(length, products_[i].linear->matrix_.panels - panel),
          index % row_blocks_ * kMostRows};
}

void Linear::Tasks::run(int index, int worker) const {
  const auto& [group, product, panel, panels, row] = piece(index);
  const auto& [linear, y, is_wide] = product;
  const size_t y_bytes = static_cast<size_t>(linear->config_.out_features) * result_bytes(dtype_, is_wide);
  std::byte* mine = group.own_of(worker);
  linear->multiply(group.all.part(row, std::min(kMostRows, group.all.m - row), static_cast<int>(group.sums_of_row)),
                   *group.kernel, panel, panels, dtype_, is_wide,
                   static_cast<std::byte*>(y) + static_cast<size_t>(row) * y_bytes, mine,
                   mine + group.result_bytes + linear->matrix_.row_bytes());
}

std::span<const std::byte> Linear::Tasks::reads(int index) const {
  const auto& [group, product, panel, panels, row] = piece(index);
  const size_t bytes = product.linear->matrix_.panel_bytes();
  return {product.linear->packed() + static_cast<size_t>(panel) * bytes, static_cast<size_t>(panels) * bytes};
}

void Linear::run(std::span<const Product> products, const void* x, DType dtype, int rows) {
  const runtime::Session session;
  runtime::ThreadPool& workers = *session;
  const Tasks tasks(workers, products, dtype, rows);
  auto each = [&](int count, auto&& task) {
    if (tasks.is_small())
      for (int index = 0; index < count; ++index) task(index, 0);
    else workers.parallel_for(count, task);
  };
  auto convert = [&](int row, int worker) { tasks.convert(x, row, worker); };
  if (rows == 1) convert(0, 0);
  else each(rows, convert);
  each(tasks.count(), [&](int index, int worker) { tasks.run(index, worker); });
}

void Linear::multiply(const PackedActivations& rows, const Kernel& kernel, int first_panel, int panels, DType dtype,
                      bool is_wide, std::byte* y, std::byte* own, std::byte* scratch) const {
  auto* c = reinterpret_cast<float*>(own);
  kernel.multiply(matrix_, data_.data() + static_cast<size_t>(first_panel) * matrix_.panel_bytes(), panels, rows, c,
                  scratch, nullptr);
  const auto* bias = reinterpret_cast<const float*>(bias_.data());
  OutlierRows outliers(matrix_, rows);
  for (int p = first_panel; p < first_panel + panels; ++p) {
    const int column = p * kPanel, width = std::min(kPanel, config_.out_features - column);
    const float* column_bias = bias == nullptr ? nullptr : bias + column;
    constexpr float one = 1.0f;
    if (outliers.has(0, rows.m))
      vector_ops_->add_outliers(outliers, data_.data() + static_cast<size_t>(p) * matrix_.panel_bytes(), 0, rows.m, c);
    for (int row = 0; row < rows.m; ++row, c += kPanel) {
      std::byte* to =
          y + (static_cast<size_t>(row) * static_cast<size_t>(config_.out_features) + static_cast<size_t>(column)) *
                  result_bytes(dtype, is_wide);
      const float* values = c;
      alignas(64) std::byte narrow[kPanel * sizeof(float)];
      vector_ops_->combine(&values, bias == nullptr ? nullptr : &column_bias, &one, 1, width, dtype,
                           is_wide ? narrow : to);
      if (is_wide) vector_ops_->widen(narrow, dtype, 1, width, reinterpret_cast<float*>(to));
    }
  }
}

}  // namespace ktinject::gemm
