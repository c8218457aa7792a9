// The loops of decode/math.inl for the avx2 level.
#include "decode/math.hpp"

#include "runtime/cpu_features.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace ktinject {
namespace avx2 {
#include "decode/math.inl"
}  // namespace avx2

extern const Math kAvx2Math;
const Math kAvx2Math = avx2::math_of("avx2", kAvx2 | kFma);

}  // namespace ktinject
#pragma GCC pop_options
