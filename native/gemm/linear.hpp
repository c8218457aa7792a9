// One dense layer on the CPU, y = x Wᵀ + b: the packed panels and kernels of the experts, without routing.
#pragma once

#include <array>
#include <span>
#include <string>

#include "gemm/backends.hpp"
#include "gemm/k_quants.hpp"
#include "gemm/layout.hpp"
#include "gemm/pack.hpp"
#include "gemm/vector_ops.hpp"
#include "runtime/memory.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::gemm {

struct LinearConfig {
  int out_features = 0;
  int in_features = 0;
  Format format = Format::bf16;
  int group_size = 0;     // int4
  bool symmetric = true;  // int4: no zero points
  bool has_bias = false;
  std::string kernel = "auto";
};

// Many threads may use one object: each call waits for its turn at the pool.
class Linear {
 public:
  explicit Linear(LinearConfig config);

  const LinearConfig& config() const { return config_; }
  const Kernels& kernels() const { return kernels_; }
  // What allocate() takes: packed weight and bias.
  size_t bytes() const;

  // Once. Throws std::bad_alloc.
  void allocate();
  // weight [out, in]. Throws std::domain_error when a row holds a NaN or an infinity and the format has scales. Of a
  // layer that has a weight, an error leaves that one as it was.
  void load(const Source& weight);
  // The same from what a checkpoint stores, for a layer of that format; see gemm/pack.hpp.
  void load_fp8(const Fp8Source& weight);
  void load_nvfp4(const Nvfp4Source& weight);
  void load_integers(const IntegerSource& weight);
  // The same from a GGUF file's blocks of the layer's format, for K-quants.
  void load_blocks(const KSource& weight);
  void load_bias(const Source& bias);
  bool has_weight() const;
  bool has_bias() const;

  // Where the packed panels and the bias [panels * 32] lie, after allocate(); null without a bias.
  const Matrix& matrix() const { return matrix_; }
  const std::byte* packed() const { return data_.data(); }
  const std::byte* packed_bias() const { return config_.has_bias ? bias_.data() : nullptr; }
  // What has been written there is the weight and the bias, as load() would have packed them.
  void mark_loaded();

  // out [out, in] fp32 = the dequantised weight; bias [out].
  void unpack(float* out) const;
  void unpack_bias(float* out) const;

  // y [rows, out] = x [rows, in] times the weight transposed, plus bias; both of `dtype`, contiguous. Throws
  // std::invalid_argument for a layer whose weight or bias was never loaded.
  void forward(const void* x, DType dtype, int rows, void* y) const;

  struct Product {
    const Linear* linear;
    void* y;
    bool is_wide = false;  // y is fp32, of values rounded to x's dtype
  };
  // Several layers over the same input. Those of one format share its conversion and one hand-out of tasks.
  static void forward(std::span<const Product> products, const void* x, DType dtype, int rows);

  // Layers over one input that are multiplied together.
  static constexpr size_t kMostTogether = 8;

  // Such a product as tasks of a call of the pool, of which it may be a part. Within a Session, which outlives this.
  class Tasks {
   public:
    // products: at most kMostTogether, else std::invalid_argument. Of those that live at once each has a `place`, from
    // 0 on, of the pool's memory.
    Tasks(runtime::ThreadPool& workers, std::span<const Product> products, DType dtype, int rows, int place = 0);

    // So little that waking workers would cost more.
    bool is_small() const;
    // First each row of x [rows, in] is converted, by whichever worker; then the tasks may run, in any order.
    void convert(const void* x, int row, int worker) const;
    int count() const { return count_; }
    void run(int index, int worker) const;
    // The weights that a task reads.
    std::span<const std::byte> reads(int index) const;
    // All of them, behind begin(), which converts the rows.
    template <class Begin>
    auto stage(Begin begin) const {
      return runtime::Stage{count(), begin, [this](int index, int worker) { run(index, worker); },
                            [this](int index) { return reads(index); }};
    }

   private:
    // Layers of one format, side by side, which share the conversion of their input.
    struct Group {
      size_t first, last;  // of the products
      const Kernel* kernel;
      PackedActivations all;
      std::byte* input;
      float* scale;
      int32_t* sums;
      Outliers* outliers;
      size_t sums_of_row;
      std::byte* own;  // of each worker: results, a row, and scratch of the kernel
      size_t result_bytes, thread_bytes;
      int run_length;  // in panels

      std::byte* own_of(int worker) const { return own + static_cast<size_t>(worker) * thread_bytes; }
    };
    struct Piece {
      const Group& group;
      const Product& product;
      int panel, panels, row;  // the first of each
    };
    Group group_of(runtime::ThreadPool& workers, size_t first, size_t last, int rows, int place) const;
    std::span<const Group> groups() const { return std::span(groups_).first(group_count_); }
    Piece piece(int index) const;

    std::array<Product, kMostTogether> products_{};
    std::array<Group, kMostTogether> groups_;
    std::array<int, kMostTogether + 1> starts_{};  // of each product's runs of panels
    size_t product_count_, group_count_ = 0, bytes_ = 0;
    DType dtype_;
    int row_blocks_, count_;
  };

  // The products of x; between(), on any one thread, which makes `input` of them; and the product of that. For one row
  // a single call of the pool, if neither is too small for it.
  template <class Between>
  static void forward_both(std::span<const Product> first, const void* x, Between&& between, const Product& second,
                           const void* input, DType dtype, int rows);

 private:
  void check(const Source& source, int k, const char* what) const;
  template <class Pack>
  void load_as(int n, int k, const Pack& pack);
  bool reads_as(const Linear& other) const;
  // How many of these, the first ones, are of one format.
  static size_t alike(std::span<const Product> products);
  static void run(std::span<const Product> products, const void* x, DType dtype, int rows);
  void multiply(const PackedActivations& rows, const Kernel& kernel, int first_panel, int panels, DType dtype,
                bool is_wide, std::byte* y, std::byte* own, std::byte* scratch) const;

  LinearConfig config_;
  Kernels kernels_;
  const VectorOps* vector_ops_;
  Matrix matrix_;
  runtime::Block data_;
  runtime::Block bias_;  // float [panels * 32]
  bool has_weight_ = false;
  bool has_bias_ = false;
};

template <class Between>
void Linear::forward_both(std::span<const Product> first, const void* x, Between&& between, const Product& second,
                          const void* input, DType dtype, int rows) {
  if (rows == 1) {
    const runtime::Session session;
    runtime::ThreadPool& workers = *session;
    const Tasks in(workers, first, dtype, 1), out(workers, std::span(&second, 1), dtype, 1, 1);
    if (workers.threads() > 1 && !in.is_small() && !out.is_small()) {
      runtime::run_stages(workers, in.stage([&] { in.convert(x, 0, 0); }), out.stage([&] {
        between();
        out.convert(input, 0, 0);
      }));
      return;
    }
  }
  forward(first, x, dtype, rows);
  between();
  forward(std::span(&second, 1), input, dtype, rows);
}

}  // namespace ktinject::gemm
