// The loops of gemm/step_ops.inl for the avx2 level.
#include "gemm/step_ops.hpp"

#include "runtime/cpu_features.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace ktinject::gemm {

using namespace runtime;  // the bits of instruction sets
namespace avx2 {
#include "gemm/step_ops.inl"
}  // namespace avx2

extern const StepOps kAvx2StepOps;
const StepOps kAvx2StepOps = avx2::step_ops_of("avx2", kAvx2 | kFma);

}  // namespace ktinject::gemm
#pragma GCC pop_options
