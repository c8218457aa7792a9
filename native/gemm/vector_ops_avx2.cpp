// The loops of gemm/vector_ops.inl for the avx2 level.
#include "gemm/vector_ops.hpp"

#include <immintrin.h>

#include "gemm/layout.hpp"
#include "gemm/outlier_rows.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace ktinject::gemm {
namespace avx2 {
using Vector = __m256;
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
static inline Vector lesser(Vector a, Vector b) { return _mm256_min_ps(a, b); }
static inline Vector greater(Vector a, Vector b) { return _mm256_max_ps(a, b); }
static inline Vector fused(float a, Vector b, Vector c) { return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c); }
static inline Integers widen_bytes(const void* x) {
  return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(x)));
}
static inline Integers widen_halves(const void* x) {
  return (Integers)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(x)));
}
#include "gemm/vector_ops.inl"
}  // namespace avx2

const VectorOps kAvx2VectorOps = {
    avx2::round_row,    avx2::quantise_row,   avx2::add_outliers,  avx2::activate,      avx2::combine,
    avx2::widen,        avx2::max_abs,        avx2::quantise_int8, avx2::quantise_int4, avx2::quantise_int4_zero,
    avx2::quantise_fp8, avx2::quantise_mxfp4, avx2::quantise_e2m1};

}  // namespace ktinject::gemm
#pragma GCC pop_options
