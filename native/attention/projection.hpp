// A linear layer of a step that may be as small as a few outputs: packed, or with the weight as the model has it.
#pragma once

#include <cstddef>
#include <utility>

#include "gemm/linear.hpp"
#include "gemm/step_ops.hpp"

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
};

// Some layers of the same input: those that are packed together, then each of the others.
class Products {
 public:
  void add(const gemm::Linear* linear, float* y) { packed_[count_++] = {linear, y}; }
  void add(const Projection& layer, float* y);
  void forward(const float* x, int rows, DType model) const;

 private:
  static constexpr size_t kMost = 8;
  gemm::Linear::Product packed_[kMost];
  std::pair<const Projection*, float*> others_[kMost];
  size_t count_ = 0, other_ = 0;
};

}  // namespace ktinject::attention
