// A linear layer of a step that may be as small as a few outputs: packed, or with the weight as the model has it.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "gemm/linear.hpp"
#include "gemm/step_ops.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// y = W x + bias, rounded: of a packed layer to the model's dtype, else to that of its weight [out, in].
struct Projection {
  const gemm::Linear* linear = nullptr;
  const void* weight = nullptr;
  DType dtype = DType::bf16;
  int out = 0, in = 0;
  const float* bias = nullptr;  // [out] beside a weight in fp32, or none; a packed layer has its own

  explicit operator bool() const { return linear != nullptr || weight != nullptr; }
  void forward(const float* x, int rows, DType model, float* y) const;
  // Of a weight that is not packed: a row's product in parts, in any order, and what a part reads.
  int parts() const;
  void run(int part, const float* x, float* y) const;
  std::span<const std::byte> reads(int part) const;
};

// Some layers of the same input: those that are packed together, then each of the others.
class Products {
 public:
  void add(const gemm::Linear* linear, float* y) { packed_[count_++] = {linear, y}; }
  void add(const Projection& layer, float* y);
  // Outputs of packed layers are not rounded.
  void forward(const float* x, int rows, DType model) const;

  // All of them of one row as a stage of a call of the pool. Within a Session, which outlives this; place: as that of
  // Linear::Tasks.
  class Tasks {
   public:
    Tasks(runtime::ThreadPool& workers, const Products& products, const float* x, int place = 0)
        : products_(products), x_(x), packed_(workers, products.packed(), DType::f32, 1, place) {}
    // So little that waking workers would cost more.
    bool is_small() const { return packed_.is_small(); }
    // begin() comes first; x need not be there before.
    template <class Begin>
    auto stage(Begin begin) const {
      return runtime::Stage{packed_.count() + products_.parts(),
                            [this, begin] {
                              begin();
                              packed_.convert(x_, 0, 0);
                            },
                            [this](int index, int worker) { run(index, worker); },
                            [this](int index) { return reads(index); }};
    }

   private:
    void run(int index, int worker) const {
      if (index < packed_.count()) return packed_.run(index, worker);
      const auto [layer, y, part] = products_.part(index - packed_.count());
      layer->run(part, x_, y);
    }
    std::span<const std::byte> reads(int index) const {
      if (index < packed_.count()) return packed_.reads(index);
      const auto [layer, y, part] = products_.part(index - packed_.count());
      return layer->reads(part);
    }

    const Products& products_;
    const float* x_;
    gemm::Linear::Tasks packed_;
  };

 private:
  struct Part {
    const Projection* layer;
    float* y;
    int part;
  };
  std::span<const gemm::Linear::Product> packed() const { return std::span(packed_).first(count_); }
  int parts() const;
  Part part(int index) const;  // of the others, one behind the other

  static constexpr size_t kMost = gemm::Linear::kMostTogether;
  gemm::Linear::Product packed_[kMost];
  std::pair<const Projection*, float*> others_[kMost];
  size_t count_ = 0, other_ = 0;
};

}  // namespace ktinject::attention
