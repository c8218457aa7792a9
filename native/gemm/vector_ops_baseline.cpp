// The loops of gemm/vector_ops.inl for the baseline level.
#include "gemm/vector_ops.hpp"

#include <immintrin.h>

#include "gemm/layout.hpp"
#include "gemm/outlier_rows.hpp"

namespace ktinject::gemm {
namespace baseline {
using Vector = __m128;
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
static inline Vector lesser(Vector a, Vector b) { return _mm_min_ps(a, b); }
static inline Vector greater(Vector a, Vector b) { return _mm_max_ps(a, b); }
static inline Vector fused(float a, Vector b, Vector c) { return a * b + c; }
static inline Integers widen_bytes(const void* x) {
  int bytes;
  __builtin_memcpy(&bytes, x, sizeof bytes);
  const __m128i halves = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), _mm_setzero_si128());
  return (Integers)_mm_unpacklo_epi16(halves, _mm_setzero_si128());
}
static inline Integers widen_halves(const void* x) {
  return (Integers)_mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(x)), _mm_setzero_si128());
}
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
