// Decoding with AVX2: the two bytes of a bf16 are looked up apart, 32 weights at a time, and then brought together.
// The tables are those of dequantise_avx512.cpp; mxfp8's are of a scale of one, and zeros are masked.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"
#include "gemm/vector_ops.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace ktinject::gemm {
namespace {

inline __m256i load(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

// Sixteen bf16 values as their low and their high bytes, for lookups in both lanes.
struct ByteTables {
  __m256i low, high;
  explicit ByteTables(const uint16_t* values) {
    alignas(16) uint8_t bytes[2][16];
    for (int i = 0; i < 16; ++i) {
      bytes[0][i] = static_cast<uint8_t>(values[i]);
      bytes[1][i] = static_cast<uint8_t>(values[i] >> 8);
    }
    low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[0])));
    high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes[1])));
  }
  ByteTables() = default;
};

// bf16 lanes whose low and high bytes are the even, or the odd, bytes of two vectors.
inline __m256i even_lanes(__m256i low, __m256i high) {
  return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi16(0xff)), _mm256_slli_epi16(high, 8));
}
inline __m256i odd_lanes(__m256i low, __m256i high) {
  return _mm256_blendv_epi8(_mm256_srli_epi16(low, 8), high, _mm256_set1_epi16(static_cast<short>(0xff00)));
}

inline void store(std::byte* to, __m256i value) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), value); }

// Sixteen 16-bit lanes of four codes each → four vectors of bf16, 64 bytes apart: what `finish` makes of the table's
// values, but zero for codes of zero.
template <class Finish>
inline void nibbles(const std::byte* from, size_t ahead, const ByteTables& table, std::byte* to, Finish finish) {
  const __m256i low_bits = _mm256_set1_epi8(0x0f), magnitude = _mm256_set1_epi16(7);
  _mm_prefetch(reinterpret_cast<const char*>(from + ahead), _MM_HINT_T0);
  const __m256i four = load(from);
  auto put = [&](int i, __m256i lanes, __m256i codes) {
    const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_and_si256(codes, magnitude), _mm256_setzero_si256());
    store(to + i * 64, _mm256_andnot_si256(is_zero, finish(lanes)));
  };
  // Nibbles 0 and 2 of each lane, then 1 and 3.
  for (int i = 0; i < 2; ++i) {
    const __m256i codes = _mm256_and_si256(i == 0 ? four : _mm256_srli_epi16(four, 4), low_bits);
    const __m256i low = _mm256_shuffle_epi8(table.low, codes), high = _mm256_shuffle_epi8(table.high, codes);
    put(i, even_lanes(low, high), codes);
    put(i + 2, odd_lanes(low, high), _mm256_srli_epi16(codes, 8));
  }
}

// scales [8] e8m0 as exponents of bf16, in both lanes of each output.
inline __m256i e8m0_lanes(const uint8_t* scales) {
  const __m256i scale = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales)));
  return _mm256_slli_epi16(_mm256_or_si256(scale, _mm256_slli_epi32(scale, 16)), 7);
}

// The values of e4m3 codes times a scale, without the exponents' upper three bits: of normal ones, and of others.
struct Fp8Tables {
  ByteTables normal, subnormal;
  explicit Fp8Tables(float scale) {
    uint16_t values[2][16] = {};
    for (int i = 0; i < 16; ++i) {
      values[0][i] = float_to_bf16(static_cast<float>(8 + i % 8) * (i < 8 ? 0x1p-10f : 0x1p-9f) * scale);
      if (i < 8) values[1][i] = float_to_bf16(static_cast<float>(i) * 0x1p-9f * scale);
    }
    normal = ByteTables(values[0]);
    subnormal = ByteTables(values[1]);
  }
  Fp8Tables() = default;
};

// Half a row of fp8 codes: the same half of two rows of bf16. finish(codes, values) makes results of the values that
// the tables give, the codes in the low bytes of lanes; what is in the high ones does not matter.
template <class Finish>
inline void fp8_half(const std::byte* from, size_t ahead, const Fp8Tables& tables, std::byte* to, Finish finish) {
  const __m256i low_bits = _mm256_set1_epi8(0x0f), exponent_bits = _mm256_set1_epi8(static_cast<char>(0xe8));
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80)), zero = _mm256_setzero_si256();
  _mm_prefetch(reinterpret_cast<const char*>(from + ahead), _MM_HINT_T0);
  const __m256i codes = load(from);
  const __m256i index = _mm256_and_si256(codes, low_bits);
  const __m256i is_subnormal = _mm256_cmpeq_epi8(_mm256_and_si256(codes, exponent_bits), zero);
  const __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables.normal.low, index),
                                         _mm256_shuffle_epi8(tables.subnormal.low, index), is_subnormal);
  __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(tables.normal.high, index),
                                    _mm256_shuffle_epi8(tables.subnormal.high, index), is_subnormal);
  high = _mm256_add_epi8(high, _mm256_and_si256(_mm256_srli_epi16(codes, 5), _mm256_set1_epi8(7)));
  high = _mm256_or_si256(high, _mm256_and_si256(_mm256_slli_epi16(codes, 3), sign));
  store(to, finish(codes, even_lanes(low, high)));
  store(to + 64, finish(_mm256_srli_epi16(codes, 8), odd_lanes(low, high)));
}

}  // namespace

void avx2_decode_fp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead, std::byte* to) {
  constexpr int kBlocksAScale = kFp8Block / 32;
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 1024;
  Fp8Tables tables[2];
  for (int block = first; block < first + blocks; ++block) {
    if (block == first || block % kBlocksAScale == 0)
      for (int tile = 0; tile < 2; ++tile)
        tables[tile] = Fp8Tables(has_factors(matrix.format) ? 1.0f : fp8_scale(panel, block / kBlocksAScale, tile));
    for (int tile = 0; tile < 2; ++tile)
      for (int row = 0; row < 8; ++row, from += 64, to += 128)
        for (int half = 0; half < 64; half += 32)
          fp8_half(from + half, ahead, tables[tile], to + half, [](__m256i, __m256i value) { return value; });
  }
}

void avx2_decode_mxfp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to) {
  const Fp8Tables tables(1.0f);
  const __m256i magnitude = _mm256_set1_epi16(0xef), zero = _mm256_setzero_si256();
  const __m256i bias = _mm256_set1_epi16(127 << 7);
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 1024;
  const uint8_t* scales = e8m0_scales(panel) + static_cast<size_t>(first) * kPanel;
  for (int block = 0; block < blocks; ++block, scales += kPanel)
    for (int tile = 0; tile < 2; ++tile) {
      const uint8_t* of_tile = scales + tile * kTile;
      const __m256i exponents[2] = {_mm256_sub_epi16(e8m0_lanes(of_tile), bias),
                                    _mm256_sub_epi16(e8m0_lanes(of_tile + 8), bias)};
      for (int row = 0; row < 8; ++row, from += 64, to += 128)
        for (int half = 0; half < 2; ++half)
          fp8_half(from + half * 32, ahead, tables, to + half * 32, [&](__m256i codes, __m256i value) {
            const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_and_si256(codes, magnitude), zero);
            return _mm256_andnot_si256(is_zero, _mm256_add_epi16(value, exponents[half]));
          });
    }
}

void avx2_decode_mxfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to) {
  const ByteTables table(kE2m1Bits);
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 512;
  const uint8_t* scales = e8m0_scales(panel) + static_cast<size_t>(first) * kPanel;
  for (int block = 0; block < blocks; ++block, scales += kPanel)
    for (int tile = 0; tile < 2; ++tile) {
      const uint8_t* of_tile = scales + tile * kTile;
      const __m256i exponents[2] = {e8m0_lanes(of_tile), e8m0_lanes(of_tile + 8)};
      for (int row = 0; row < 4; ++row, from += 64, to += 256)
        for (int half = 0; half < 2; ++half)
          nibbles(from + half * 32, ahead, table, to + half * 32,
                  [&](__m256i lanes) { return _mm256_add_epi16(lanes, exponents[half]); });
    }
}

void avx2_decode_nvfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to) {
  const ByteTables table(kE2m1Added);
  const __m256i lowest = _mm256_set1_epi16(1);
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 512;
  const uint8_t* scales = nvfp4_scales(panel) + static_cast<size_t>(first) * 2 * kPanel;
  const auto twice = [](__m256i bits) { return _mm256_or_si256(bits, _mm256_srli_epi32(bits, 16)); };
  for (int block = 0; block < blocks; ++block, scales += 2 * kPanel)
    for (int tile = 0; tile < 2; ++tile)
      for (int row = 0; row < 4; ++row, from += 64, to += 256)
        for (int half = 0; half < 2; ++half) {
          const uint8_t* of_group = scales + row / 2 * kPanel + tile * kTile + half * 8;
          const __m256i packed = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(of_group)));
          const __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(packed, 20), _mm256_set1_epi32(117 << 23));
          const __m256 half_more = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(1.5f));
          const __m256i plain = twice(bits), more = _mm256_sub_epi16(twice(_mm256_castps_si256(half_more)), lowest);
          nibbles(from + half * 32, ahead, table, to + half * 32, [&](__m256i added) {
            const __m256i is_more = _mm256_cmpeq_epi16(_mm256_and_si256(added, lowest), lowest);
            return _mm256_add_epi16(added, _mm256_blendv_epi8(plain, more, is_more));
          });
        }
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
