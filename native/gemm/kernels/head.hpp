// Reading a packed panel's head; see gemm/layout.hpp.
#pragma once

#include "gemm/backends.hpp"

namespace ktinject::gemm {

struct Int8Head {
  float scale[kPanel];
  int32_t offset[kPanel];
};

inline const Int8Head& int8_head(const std::byte* panel) { return *reinterpret_cast<const Int8Head*>(panel); }
inline const float* int4_levels(const std::byte* panel) { return reinterpret_cast<const float*>(panel); }
inline const uint16_t* int4_scales(const std::byte* panel) {
  return reinterpret_cast<const uint16_t*>(panel + kInt4ScalesAt);
}

inline const uint8_t* int4_zeros(const Matrix& matrix, const std::byte* panel) {
  return reinterpret_cast<const uint8_t*>(panel + int4_zeros_at(matrix.groups()));
}
inline float fp8_scale(const std::byte* panel, int group, int tile) {
  return reinterpret_cast<const float*>(panel)[group * 2 + tile];
}
// Of mxfp4 and mxfp8.
inline const uint8_t* e8m0_scales(const std::byte* panel) { return reinterpret_cast<const uint8_t*>(panel); }
inline float e8m0_value(uint8_t e8m0) {
  const uint32_t bits = uint32_t{e8m0} << 23;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
// Of fp8_channel and nvfp4.
inline const float* factors(const std::byte* panel) { return reinterpret_cast<const float*>(panel); }
inline const uint8_t* nvfp4_scales(const std::byte* panel) {
  return reinterpret_cast<const uint8_t*>(panel + kFactorsBytes);
}
// sums [rows, 32] times the factors of their outputs, in place, where the format has them.
inline void multiply_by_factors(const Matrix& matrix, const std::byte* panel, int rows, float* sums) {
  if (!has_factors(matrix.format)) return;
  const float* factor = factors(panel);
  for (int row = 0; row < rows; ++row, sums += kPanel)
    for (int j = 0; j < kPanel; ++j) sums[j] *= factor[j];
}

// e4m3 (1 sign, 4 exponent, 3 mantissa bits, bias 7, no infinities) as it is packed: from the top, exponent bits 3 to
// 1, sign, exponent bit 0, mantissa. So the low five bits choose among 32 values, and the rest is added to the
// exponent. Scales are kept within 2^-100 ... 2^100, where no product of code and scale leaves the normal range of
// bf16.
struct Fp8 {
  static constexpr float kMost = 448.0f;
  static constexpr float kLeastScale = 0x1p-100f, kMostScale = 0x1p100f;

  static bool is_nan(uint8_t e4m3) { return (e4m3 & 0x7f) == 0x7f; }
  static uint8_t pack(uint8_t e4m3) {
    return static_cast<uint8_t>((e4m3 & 0x0f) | (e4m3 & 0x80) >> 3 | (e4m3 & 0x70) << 1);
  }
  static float value(uint8_t packed) {
    const int exponent = (packed & 0xe0) >> 4 | (packed & 8) >> 3, mantissa = packed & 7;
    const float magnitude = exponent == 0
                                ? static_cast<float>(mantissa) * 0x1p-9f
                                : static_cast<float>(8 + mantissa) * 0x1p-10f * static_cast<float>(1 << exponent);
    return packed & 0x10 ? -magnitude : magnitude;
  }
};

// nvfp4's scales: e4m3 in a checkpoint, never negative. They are packed with a fifth bit of exponent, bias 10, in place
// of the sign, so that those below 2^-6 have a leading one like all others and become bf16 by a shift and an addition.
// A scale of zero stays zero; the codes of its group are packed as zeros.
struct Nvfp4 {
  static constexpr float kMost = 448.0f * 6.0f;

  static uint8_t pack(uint8_t e4m3) {
    int exponent = e4m3 >> 3, mantissa = e4m3 & 7;
    if (exponent != 0) return static_cast<uint8_t>((exponent + 3) << 3 | mantissa);
    if (mantissa == 0) return 0;
    for (exponent = 4; mantissa < 8; mantissa *= 2) --exponent;
    return static_cast<uint8_t>(exponent << 3 | (mantissa & 7));
  }
  static float scale(uint8_t packed) {
    const uint32_t bits = packed == 0 ? 0 : (uint32_t{packed} << 20) + (117u << 23);
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
};

// e2m1: 1 sign, 2 exponent, 1 mantissa bits. Scales (e8m0) are kept within 2 ... 252, where code * 2^(scale - 127) is a
// normal bf16 or zero.
struct Mxfp4 {
  static constexpr int kLeastScale = 2, kMostScale = 252;

  static float value(int code) {
    constexpr float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
  }
};

// e4m3 codes with e8m0 scales: within these, code * 2^(scale - 127) is a normal bf16 or zero, and exact.
struct Mxfp8 {
  static constexpr int kLeastScale = 10, kMostScale = 246;

  // The least scale for which `most`, the largest magnitude, is at most 448 of it. Values that fit some such grid
  // exactly come back exactly: to halve a scale adds one to the exponents of codes.
  static uint8_t scale_for(float most) {
    uint32_t bits;
    __builtin_memcpy(&bits, &most, sizeof bits);
    const int scale = static_cast<int>(bits >> 23) - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
    return static_cast<uint8_t>(scale < kLeastScale ? kLeastScale : scale > kMostScale ? kMostScale : scale);
  }
};

}  // namespace ktinject::gemm
