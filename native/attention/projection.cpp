#include "attention/projection.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include "attention/tasks.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

constexpr int kRowsOfTask = 16;  // of a plain weight

}  // namespace

void Projection::forward(const float* x, int rows, DType model, float* y) const {
  const gemm::StepOps& ops = gemm::step_ops();
  if (linear != nullptr) {
    linear->forward(x, DType::f32, rows, y);
    ops.round(y, rows * out, model);
    return;
  }
  const runtime::Session session;
  const int blocks = (out + kRowsOfTask - 1) / kRowsOfTask;
  each(*session, product(rows, out, in) < kSerialProducts, rows * blocks, [&](int index, int) {
    const int row = index / blocks, first = index % blocks * kRowsOfTask;
    const auto* w = static_cast<const std::byte*>(weight) + product(first, in) * dtype_bytes(dtype);
    ops.rows_times(w, x + product(row, in), std::min(kRowsOfTask, out - first), in, dtype,
                   y + product(row, out) + first);
  });
  for (int i = 0; bias != nullptr && i < rows * out; ++i) y[i] += bias[i % out];
}

void Products::add(const Projection& layer, float* y) {
  if (layer.linear != nullptr) return add(layer.linear, y);
  others_[other_++] = {&layer, y};
}

void Products::forward(const float* x, int rows, DType model) const {
  if (count_ > 0) gemm::Linear::forward(std::span(packed_, count_), x, DType::f32, rows);
  for (size_t i = 0; i < other_; ++i) others_[i].first->forward(x, rows, model, others_[i].second);
}

}  // namespace ktinject::attention
