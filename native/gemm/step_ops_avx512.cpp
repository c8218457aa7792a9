// The loops of gemm/step_ops.inl for the avx512 level.
#include "gemm/step_ops.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
namespace ktinject::gemm {
namespace avx512 {
constexpr int kVector = 16;
#include "gemm/step_ops.inl"
}  // namespace avx512

const StepOps kAvx512StepOps = avx512::kStepOps;

}  // namespace ktinject::gemm
#pragma GCC pop_options
