// The loops of gemm/vector_ops.inl for the baseline level.
#include "gemm/vector_ops.hpp"

#include <immintrin.h>

#include "gemm/layout.hpp"

namespace ktinject::gemm {
namespace baseline {
using Vector = __m128;
static inline Vector lesser(Vector a, Vector b) { return _mm_min_ps(a, b); }
static inline Vector greater(Vector a, Vector b) { return _mm_max_ps(a, b); }
#include "gemm/vector_ops.inl"
}  // namespace baseline

const VectorOps kBaselineVectorOps = {baseline::round_row,     baseline::quantise_row,
                                      baseline::add_outliers,  baseline::activate,
                                      baseline::combine,       baseline::widen,
                                      baseline::max_abs,       baseline::quantise_int8,
                                      baseline::quantise_int4, baseline::quantise_int4_zero,
                                      baseline::quantise_fp8,  baseline::quantise_mxfp4,
                                      baseline::quantise_e2m1};

}  // namespace ktinject::gemm
