#include "attention/tuning.hpp"

#include <cmath>

#include "gemm/backends.hpp"

namespace ktinject::attention {

void multiply(float times, DType dtype, std::span<float> values) {
  for (float& value : values) value *= times;
  gemm::step_ops().round(values.data(), static_cast<int>(values.size()), dtype);
}

void tune(const Steps& by, float position, DType dtype, bool rounds, std::span<float> values) {
  float times = std::log1p(std::floor(position / by.every)) * by.factor + 1;
  if (rounds) gemm::step_ops().round(&times, 1, dtype);
  multiply(times, dtype, values);
}

void tune(const Power& by, float position, DType dtype, std::span<float> values) {
  multiply(std::exp(by.exponent * std::log1p(position / by.every)), dtype, values);
}

void tune(const Growth& by, int head, float position, DType dtype, std::span<float> values) {
  const auto round = gemm::step_ops().round;
  float parts[] = {std::log(position + 1), by.scale[head], by.bias[head]};
  round(parts, 3, dtype);
  float times = parts[0] * parts[1];
  round(&times, 1, dtype);
  times += parts[2];
  round(&times, 1, dtype);
  multiply(times, dtype, values);
}

}  // namespace ktinject::attention
