// Everything of an experts layer that is not the matrix product: rounding and quantising rows, the activation, the
// weighted sum, and the quantisation of weights when they are packed. Plain loops, compiled once for each level of
// vector unit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/layout.hpp"
#include "runtime/dtype.hpp"

namespace ktinject::gemm {

enum class ActivationKind { silu, gelu, gelu_tanh, relu, relu2, identity };

// h = act(min(gate, gate_max)) * (clamp(up, -up_limit, up_limit) + up_offset), or act(up) without a gate;
// silu is x * sigmoid(alpha * x).
struct Activation {
  ActivationKind kind = ActivationKind::silu;
  bool has_gate = true;
  float alpha = 1.0f;
  float gate_max = 0;  // infinity where there is no limit
  float up_limit = 0;
  float up_offset = 0;
};

struct OutlierRows;

struct VectorOps {
  // out [padded_k] bf16 = x [k]; the padding is zero.
  void (*round_row)(const void* x, DType dtype, int k, int padded_k, uint16_t* out);

  // out [padded_k] = round(x / scale) + zero_point, scale = max|x| / 127 (0 for a row of zeros); the padding is
  // zero_point. group_sum [ceil(padded_k / group_size)], where not null: sums of the quantised values, zero point left
  // out.
  // Outliers are left out of all that, as zeros: the values above a limit, which is max|x| at first. It is halved i
  // times, for i from 1 on, where that adds no more than 2^i outliers, one of them at least 1.25 times the limit, and
  // from there again; 10 times in all. There are at most kMost and one of kLeastInputs inputs, and none in a row with a
  // NaN or an infinity, or where `outliers` is null.
  float (*quantise_row)(const void* x, DType dtype, int k, int padded_k, int zero_point, int group_size, uint8_t* out,
                        int32_t* group_sum, Outliers* outliers);

  // c [count, 32] += the outliers of rows `first` ... times a panel's weights, int8 or int4.
  void (*add_outliers)(OutlierRows& rows, const std::byte* panel, int first, int count, float* c);

  // h [m, 16 with a gate, else 32] bf16, rows `h_stride` values apart = activation of c [m, 32] + bias [32] (may be
  // null).
  void (*activate)(const Activation& activation, const float* c, const float* bias, int m, uint16_t* h,
                   size_t h_stride);

  // out [n] = sum over s of weight[s] * (y[s] [n] + bias[s] [n]); bias may be null.
  void (*combine)(const float* const* y, const float* const* bias, const float* weight, int terms, int n, DType dtype,
                  void* out);

  // x [k] of `dtype`, elements `stride` apart, to fp32.
  void (*widen)(const void* x, DType dtype, ptrdiff_t stride, int k, float* out);

  // Largest |x|; NaN or infinity come out as NaN or infinity.
  float (*max_abs)(const float* x, int k);

  // q [k] int8 = round(x / scale), clamped to [-127, 127].
  void (*quantise_int8)(const float* x, int k, float scale, int8_t* q);

  // q [k] in [-8, 7]; returns the bf16 bits of the scale. Of a few candidate scales the one with the least squared
  // error.
  uint16_t (*quantise_int4)(const float* x, int k, int8_t* q);

  // The same with a zero point: q [k] in [0, 15], the value is (q - zero) * scale.
  uint16_t (*quantise_int4_zero)(const float* x, int k, int8_t* q, uint8_t* zero);

  // codes [k] e4m3 = round(x / scale), saturating at 448.
  void (*quantise_fp8)(const float* x, int k, float scale, uint8_t* codes);

  // codes [k] e2m1; returns the e8m0 scale. Of the two powers of two around max|x| / 6 the one with the least squared
  // error; values that fit some such grid exactly come back exactly.
  uint8_t (*quantise_mxfp4)(const float* x, int k, uint8_t* codes);

  // codes [k] e2m1 = round(x * inverse), saturating at 6.
  void (*quantise_e2m1)(const float* x, int k, float inverse, uint8_t* codes);
};

extern const VectorOps kBaselineVectorOps;
extern const VectorOps kAvx2VectorOps;
extern const VectorOps kAvx512VectorOps;

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof value);
  return value;
}

// Rounds to nearest even; for finite values.
inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace ktinject::gemm
