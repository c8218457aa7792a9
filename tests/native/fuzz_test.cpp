// Every kernel that this CPU can run, on matrices of any size in buffers of exactly the size that is needed, against
// the reference kernel of its format. Weights of a layer lie in pages with room behind them, where a sanitizer sees no
// read beyond the end.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gemm/backends.hpp"
#include "gemm/k_quants.hpp"
#include "gemm/pack.hpp"
#include "native_test.hpp"
#include "runtime/thread_pool.hpp"

using namespace ktinject;
using namespace ktinject::gemm;

namespace {

// Aligned as kernels want it, and no longer than asked for.
class Exact {
 public:
  explicit Exact(size_t bytes) : data_(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64))) {}
  ~Exact() { std::free(data_); }
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  std::byte* data() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  std::byte* data_;
};

// A GGUF file's rows of random codes; the halves that scale them are finite and small.
std::vector<uint8_t> random_blocks(const Matrix& matrix, std::mt19937& random) {
  const size_t bytes = k_file_bytes(matrix.format);
  const auto blocks = static_cast<size_t>(matrix.n) * static_cast<size_t>(matrix.k / k_file_inputs(matrix.format));
  std::vector<uint8_t> rows(blocks * bytes);
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random());
  for (size_t block = 0; block < blocks; ++block) {
    const auto scale = [&](size_t at) {
      const auto half = static_cast<uint16_t>(0x2000 + random() % 0x800);
      std::memcpy(&rows[block * bytes + at], &half, sizeof half);
    };
    switch (matrix.format) {
      case Format::q2_k:
        scale(80), scale(82);
        break;
      case Format::q3_k:
        scale(108);
        break;
      case Format::q4_k:
      case Format::q5_k:
        scale(0), scale(2);
        break;
      case Format::q6_k:
        scale(208);
        break;
      default:
        scale(0);
    }
  }
  return rows;
}

class Problem {
 public:
  Problem(Format format, std::mt19937& random)
      : matrix_(matrix_of(format, random)),
        rows_(1 + static_cast<int>(random() % 70)),
        weights_(matrix_.bytes()),
        input_(matrix_.row_bytes() * size(rows_)),
        scales_(sizeof(float) * size(rows_) * size(matrix_.row_scales())),
        sums_(sizeof(int32_t) * size(rows_) * groups()),
        outliers_(sizeof(Outliers) * size(rows_)) {
    pack_weights(random);
    pack_input(random);
  }

  const Matrix& matrix() const { return matrix_; }
  std::string name() const {
    return "m " + std::to_string(rows_) + ", k " + std::to_string(matrix_.k) + ", n " + std::to_string(matrix_.n) +
           ", groups of " + std::to_string(matrix_.group_size) + (matrix_.symmetric ? "" : " with zero points");
  }

  std::vector<float> multiply(const Kernel& kernel) const {
    const size_t count = size(matrix_.panels) * size(rows_) * size(kPanel);
    const Exact out(count * sizeof(float)), scratch(scratch_bytes(matrix_));
    const bool is_int8 = has_int8_rows(matrix_.format);
    const PackedActivations rows{input_.data(),
                                 matrix_.row_bytes(),
                                 rows_,
                                 is_int8 ? scales_.floats() : nullptr,
                                 groups() > 0 ? reinterpret_cast<const int32_t*>(sums_.data()) : nullptr,
                                 has_outliers(matrix_.format) ? outliers() : nullptr,
                                 matrix_.row_scales()};
    kernel.multiply(matrix_, weights_.data(), matrix_.panels, rows, out.floats(), scratch.data(), nullptr);
    return {out.floats(), out.floats() + count};
  }

 private:
  static size_t size(int count) { return static_cast<size_t>(count); }
  size_t groups() const { return has_group_sums(matrix_.format) ? size(matrix_.groups()) : 0; }
  Outliers* outliers() const { return reinterpret_cast<Outliers*>(outliers_.data()); }

  static Matrix matrix_of(Format format, std::mt19937& random) {
    const auto up_to = [&](int most) { return 1 + static_cast<int>(random() % static_cast<unsigned>(most)); };
    const int k = is_k_quant(format) ? k_file_inputs(format) * up_to(9) : up_to(700), n = up_to(100);
    const int group_size = format == Format::int4 ? 32 << random() % 3 : 0;
    const bool symmetric = format != Format::int4 || random() % 2 == 0;
    return {format, n, k, scale_group(format, group_size), (n + kPanel - 1) / kPanel, symmetric};
  }

  void pack_weights(std::mt19937& random) {
    std::memset(weights_.data(), 0, matrix_.bytes());
    runtime::ThreadPool alone(1, std::vector<runtime::Node>(1));
    if (is_k_quant(matrix_.format)) {
      const std::vector<uint8_t> blocks = random_blocks(matrix_, random);
      const size_t row = blocks.size() / size(matrix_.n);
      const PanelRun whole[] = {{0, matrix_.panels, weights_.data()}};
      return pack_k_quants(alone, matrix_, {blocks.data(), matrix_.n, row, static_cast<ptrdiff_t>(row)}, paired_tiles,
                           whole, "weight");
    }
    std::vector<float> values(size(matrix_.n) * size(matrix_.k));
    std::uniform_real_distribution<float> some(-1, 1);
    for (float& value : values) value = some(random);
    pack_matrix(alone, matrix_, vector_ops(), {values.data(), DType::f32, matrix_.n, matrix_.k, matrix_.k, 1},
                paired_tiles, weights_.data(), "weight");
  }

  void pack_input(std::mt19937& random) {
    std::vector<float> row(size(matrix_.k));
    const Exact packed(matrix_.row_bytes());
    std::uniform_real_distribution<float> some(-1, 1);
    for (int i = 0; i < rows_; ++i) {
      for (float& value : row) value = some(random);
      if (random() % 3 == 0) row[random() % row.size()] *= 50;
      pack_row(vector_ops(), matrix_, row.data(), DType::f32, packed.data(),
               has_int8_rows(matrix_.format) ? scales_.floats() + size(i) * size(matrix_.row_scales()) : nullptr,
               groups() > 0 ? reinterpret_cast<int32_t*>(sums_.data()) + size(i) * groups() : nullptr,
               has_outliers(matrix_.format) ? outliers() + i : nullptr);
      place_row(input_.data(), matrix_.row_bytes(), rows_, i, packed.data());
    }
  }

  Matrix matrix_;
  int rows_;
  Exact weights_, input_, scales_, sums_, outliers_;
};

}  // namespace

void test_kernels_at_the_edge(int rounds, unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < rounds; ++round)
    for (const FormatName& format : kFormatNames) {
      const Problem problem(format.format, random);
      const Kernel* const reference = choose_kernel(format.format, std::string("reference_") + format.name).many;
      const std::vector<float> want = problem.multiply(*reference);
      float greatest = 0;
      for (const float value : want) greatest = std::max(greatest, std::abs(value));
      for (const Kernel& kernel : kernel_table()) {
        if (kernel.format != format.format || &kernel == reference || !why_unavailable(kernel).empty()) continue;
        const std::vector<float> found = problem.multiply(kernel);
        // AMX rounds int4 once more.
        const float allowed = (kernel.name.find("amx_int4") == std::string::npos ? 1e-3f : 0.03f) * greatest + 1e-6f;
        bool is_near = true;
        for (size_t i = 0; i < want.size(); ++i) is_near = is_near && std::abs(found[i] - want[i]) <= allowed;
        check(is_near, kernel.name + ", " + problem.name());
      }
    }
}
