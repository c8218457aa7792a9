// The loops of gemm/step_ops.inl for the avx2 level.
#include "gemm/step_ops.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace ktinject::gemm {
namespace avx2 {
constexpr int kVector = 8;
#include "gemm/step_ops.inl"
}  // namespace avx2

const StepOps kAvx2StepOps = avx2::kStepOps;

}  // namespace ktinject::gemm
#pragma GCC pop_options
