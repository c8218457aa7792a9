#include "attention/projection.hpp"

#include <algorithm>
#include <cstddef>
#include <span>

#include "attention/tasks.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {
namespace {

constexpr int kOutputsOfPart = 16;

}  // namespace

void Projection::forward(const float* x, int rows, DType model, float* y) const {
  if (linear != nullptr) {
    linear->forward(x, DType::f32, rows, y);
    gemm::step_ops().round(y, rows * out, model);
    return;
  }
  const runtime::Session session;
  each(*session, product(rows, out, in) < kSerialProducts, rows * parts(), [&](int index, int) {
    const int row = index / parts();
    run(index % parts(), x + product(row, in), y + product(row, out));
  });
}

int Projection::parts() const { return (out + kOutputsOfPart - 1) / kOutputsOfPart; }

void Projection::run(int part, const float* x, float* y) const {
  const int first = part * kOutputsOfPart, count = std::min(kOutputsOfPart, out - first);
  gemm::step_ops().rows_times(reads(part).data(), x, count, in, dtype, y + first);
  for (int i = first; bias != nullptr && i < first + count; ++i) y[i] += bias[i];
}

std::span<const std::byte> Projection::reads(int part) const {
  const int first = part * kOutputsOfPart, count = std::min(kOutputsOfPart, out - first);
  const size_t width = dtype_bytes(dtype);
  return {static_cast<const std::byte*>(weight) + product(first, in) * width, product(count, in) * width};
}

void Products::add(const Projection& layer, float* y) {
  if (layer.linear != nullptr) return add(layer.linear, y);
  others_[other_++] = {&layer, y};
}

void Products::forward(const float* x, int rows, DType model) const {
  if (count_ > 0) gemm::Linear::forward(packed(), x, DType::f32, rows);
  for (size_t i = 0; i < other_; ++i) others_[i].first->forward(x, rows, model, others_[i].second);
}

int Products::parts() const {
  int count = 0;
  for (size_t i = 0; i < other_; ++i) count += others_[i].first->parts();
  return count;
}

Products::Part Products::part(int index) const {
  size_t i = 0;
  for (; index >= others_[i].first->parts(); ++i) index -= others_[i].first->parts();
  return {others_[i].first, others_[i].second, index};
}

}  // namespace ktinject::attention
