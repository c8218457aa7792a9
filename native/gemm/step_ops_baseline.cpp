// The loops of gemm/step_ops.inl for the baseline level.
#include "gemm/step_ops.hpp"

#include "runtime/cpu_features.hpp"

namespace ktinject {
namespace baseline {
#include "gemm/step_ops.inl"
}  // namespace baseline

extern const Math kBaselineMath, kAvx2Math, kAvx512Math;
const Math kBaselineMath = baseline::math_of("baseline", 0);

const Math& math() {
  static const Math* best = [] {
    for (const Math* one : {&kAvx512Math, &kAvx2Math})
      if ((one->isa & ~cpu_features()) == 0) return one;
    return &kBaselineMath;
  }();
  return *best;
}

}  // namespace ktinject
