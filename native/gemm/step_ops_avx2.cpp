// The loops of gemm/step_ops.inl for the avx2 level.
#include "gemm/step_ops.hpp"

#include "runtime/cpu_features.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace ktinject {
namespace avx2 {
#include "gemm/step_ops.inl"
}  // namespace avx2

extern const Math kAvx2Math;
const Math kAvx2Math = avx2::math_of("avx2", kAvx2 | kFma);

}  // namespace ktinject
#pragma GCC pop_options
