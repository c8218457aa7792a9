// The loops of gemm/step_ops.inl for the avx512 level.
#include "gemm/step_ops.hpp"

#include "runtime/cpu_features.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
namespace ktinject::gemm {

using namespace runtime;  // the bits of instruction sets
namespace avx512 {
#include "gemm/step_ops.inl"
}  // namespace avx512

extern const StepOps kAvx512StepOps;
const StepOps kAvx512StepOps =
    avx512::step_ops_of("avx512", kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx2 | kFma);

}  // namespace ktinject::gemm
#pragma GCC pop_options
