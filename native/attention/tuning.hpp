// What queries are multiplied with by their position.
#pragma once

#include <span>

#include "gemm/step_ops.hpp"

namespace ktinject::attention {

// 1 + factor * log(1 + floor(position / every)); every 0: nothing is (Llama 4, Mistral 4).
struct Steps {
  float every = 0, factor = 0;
  explicit operator bool() const { return every > 0; }
};

// A head's scale * log(position + 1) + bias, [heads] each; null: nothing is (Mistral Large 4).
struct Growth {
  const float *scale = nullptr, *bias = nullptr;
  explicit operator bool() const { return scale != nullptr; }
};

// (1 + position / every)^exponent; every 0: nothing is (BEAM).
struct Power {
  float every = 0, exponent = 0;
  explicit operator bool() const { return every > 0; }
};

// values *= times, rounded.
void multiply(float times, DType dtype, std::span<float> values);

// The same with what a position gives; rounds: so is what they are multiplied with.
void tune(const Steps& by, float position, DType dtype, bool rounds, std::span<float> values);
void tune(const Power& by, float position, DType dtype, std::span<float> values);
void tune(const Growth& by, int head, float position, DType dtype, std::span<float> values);

}  // namespace ktinject::attention
