// Experts in a GPU's memory, packed as they are in RAM, and their part of a layer for few tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/stream.hpp"
#include "moe/experts.hpp"

namespace ktinject::cuda {

// What the GPU's part of a layer takes; device pointers, contiguous.
struct ResidentRequest {
  const void* x = nullptr;  // [tokens, hidden] of dtype
  DType dtype = DType::bf16;
  const void* weights = nullptr;  // [tokens, top_k]
  DType weights_dtype = DType::f32;
  int tokens = 0;
  int top_k = 0;
  const int32_t* chosen = nullptr;  // [tokens, top_k]: which of the resident experts, or -1
  const void* resident = nullptr;   // [places] experts of bytes() each
  void* inner = nullptr;            // [tokens, top_k, inner_width()] bf16, working memory
  float* out = nullptr;             // [tokens, hidden]
};

// The shapes of a layer's resident experts. One expert: gate and up panels, down panels, their biases.
class Resident {
 public:
  // Throws std::invalid_argument for a format that has no kernel on GPUs.
  explicit Resident(const moe::Experts& experts);

  size_t bytes() const { return bytes_; }
  // Where the panels of a run lie within an expert.
  size_t at(const moe::PackedRun& run) const {
    return (run.is_down ? down_at_ : 0) + static_cast<size_t>(run.first_panel) * run.matrix.panel_bytes();
  }
  // Whether an expert of these has just these bytes.
  bool holds(const moe::Experts& experts) const;
  int inner_width() const { return config_.intermediate_size; }
  // Copies one expert of `experts`, which must have the same shapes, to `to` on the device, in the order of `stream`.
  // Unless the memory is page-locked, the host waits for it.
  void copy(const moe::Experts& experts, int expert, void* to, Stream stream) const;
  // out = the weighted sum over the experts that are chosen; zero for a token without any. Only enqueues.
  void forward(const ResidentRequest& request, Stream stream) const;

 private:
  moe::ExpertsConfig config_;
  gemm::Matrix gate_up_;
  gemm::Matrix down_;
  size_t down_at_ = 0;
  size_t gate_up_bias_at_ = 0;
  size_t down_bias_at_ = 0;
  size_t bytes_ = 0;
};

}  // namespace ktinject::cuda
