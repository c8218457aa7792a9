// The loops of gemm/step_ops.inl for the baseline level.
#include "gemm/step_ops.hpp"

#include "runtime/cpu_features.hpp"

namespace ktinject::gemm {

using namespace runtime;  // the bits of instruction sets
namespace baseline {
#include "gemm/step_ops.inl"
}  // namespace baseline

extern const StepOps kBaselineStepOps, kAvx2StepOps, kAvx512StepOps;
const StepOps kBaselineStepOps = baseline::step_ops_of("baseline", 0);

const StepOps& step_ops() {
  static const StepOps* best = [] {
    for (const StepOps* one : {&kAvx512StepOps, &kAvx2StepOps})
      if ((one->isa & ~cpu_features()) == 0) return one;
    return &kBaselineStepOps;
  }();
  return *best;
}

}  // namespace ktinject::gemm
