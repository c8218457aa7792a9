// The loops of gemm/step_ops.inl for the baseline level.
#include "gemm/step_ops.hpp"

namespace ktinject::gemm {
namespace baseline {
constexpr int kVector = 4;
#include "gemm/step_ops.inl"
}  // namespace baseline

const StepOps kBaselineStepOps = baseline::kStepOps;

}  // namespace ktinject::gemm
