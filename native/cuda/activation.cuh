// The activation between the two products of an expert, in fp32.
#pragma once

#include <cmath>

#include "moe/experts.hpp"

namespace ktinject::cuda {

__device__ inline float activated(const gemm::Activation& activation, float x) {
  switch (activation.kind) {
    case gemm::ActivationKind::silu:
      return x / (1.0f + __expf(-activation.alpha * x));
    case gemm::ActivationKind::gelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case gemm::ActivationKind::gelu_tanh:
      return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case gemm::ActivationKind::relu:
      return fmaxf(x, 0.0f);
    case gemm::ActivationKind::relu2:
      return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    case gemm::ActivationKind::identity:
      break;
  }
  return x;
}

__device__ inline float gated(const gemm::Activation& activation, float gate, float up) {
  const float linear = fminf(fmaxf(up, -activation.up_limit), activation.up_limit) + activation.up_offset;
  return activated(activation, fminf(gate, activation.gate_max)) * linear;
}

}  // namespace ktinject::cuda
