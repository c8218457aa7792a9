// The loops of gemm/vector_ops.inl for the avx512 level.
#include "gemm/vector_ops.hpp"

#include <immintrin.h>

#include <immintrin.h>

#include "gemm/layout.hpp"
#include "gemm/outlier_rows.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
namespace ktinject::gemm {
namespace avx512 {
using Vector = __m512;
typedef int32_t Integers __attribute__((vector_size(sizeof(Vector))));
static inline Vector lesser(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static inline Vector greater(Vector a, Vector b) { return _mm512_max_ps(a, b); }
static inline Vector fused(float a, Vector b, Vector c) { return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c); }
static inline Integers widen_bytes(const void* x) {
  return (Integers)_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(x)));
}
static inline Integers widen_halves(const void* x) {
  return (Integers)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(x)));
}
#include "gemm/vector_ops.inl"

// The activation of nearly all models, which the compiler computes twice a value for the clamps in exp_of: once for
// those that are clamped.
static void activate_silu(const Activation& activation, const float* c, const float* bias, int m, uint16_t* h,
                          size_t h_stride) {
  const __m512 alpha = _mm512_set1_ps(-activation.alpha), gate_max = _mm512_set1_ps(activation.gate_max);
  const __m512 limit = _mm512_set1_ps(activation.up_limit), least = _mm512_set1_ps(-activation.up_limit);
  const __m512 offset = _mm512_set1_ps(activation.up_offset), one = _mm512_set1_ps(1.0f);
  const __m512 gate_bias = bias != nullptr ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  const __m512 up_bias = bias != nullptr ? _mm512_loadu_ps(bias + kTile) : _mm512_setzero_ps();
  const __m512i half = _mm512_set1_epi32(0x7fff), lowest = _mm512_set1_epi32(1), quiet = _mm512_set1_epi32(0x40);
  for (int row = 0; row < m; ++row, c += kPanel, h += h_stride) {
    // Of two operands, the second is the result where one is NaN.
    const __m512 gate = _mm512_min_ps(gate_max, _mm512_add_ps(_mm512_loadu_ps(c), gate_bias));
    const __m512 all_up = _mm512_add_ps(_mm512_loadu_ps(c + kTile), up_bias);
    const __m512 up = _mm512_add_ps(_mm512_max_ps(least, _mm512_min_ps(limit, all_up)), offset);
    // exp_of, with fused additions.
    const __m512 asked = _mm512_mul_ps(gate, alpha);
    const __m512 x = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), asked));
    const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504088896341f), _mm512_set1_ps(12582912.0f));
    const __m512 n = _mm512_sub_ps(shifted, _mm512_set1_ps(12582912.0f));
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682030941723e-6f),
                                      _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x));
    __m512 p = _mm512_set1_ps(1.388888888888889e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.333333333333333e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.166666666666666e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.666666666666667e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, one);
    p = _mm512_fmadd_ps(p, r, one);
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);  // what else is in it is shifted out
    const __m512 exp = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), power));
    const __m512 value = _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, exp)), up);
    // to_bf16
    const __m512i bits = _mm512_castps_si512(value), upper = _mm512_srli_epi32(bits, 16);
    const __m512i up_or_even = _mm512_add_epi32(half, _mm512_and_si512(upper, lowest));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, up_or_even), 16);
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), upper, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(h), _mm512_cvtepi32_epi16(rounded));
  }
}

static void activate_fast(const Activation& activation, const float* c, const float* bias, int m, uint16_t* h,
                          size_t h_stride) {
  if (activation.kind == ActivationKind::silu && activation.has_gate)
    return activate_silu(activation, c, bias, m, h, h_stride);
  activate(activation, c, bias, m, h, h_stride);
}
}  // namespace avx512

const VectorOps kAvx512VectorOps = {avx512::round_row,     avx512::quantise_row,
                                    avx512::add_outliers,  avx512::activate_fast,
                                    avx512::combine,       avx512::widen,
                                    avx512::max_abs,       avx512::quantise_int8,
                                    avx512::quantise_int4, avx512::quantise_int4_zero,
                                    avx512::quantise_fp8,  avx512::quantise_mxfp4,
                                    avx512::quantise_e2m1};

}  // namespace ktinject::gemm
#pragma GCC pop_options
