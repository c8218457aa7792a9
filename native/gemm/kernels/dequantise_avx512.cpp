// Decoding with AVX-512: 16-bit lanes, so that one table lookup gives 32 weights.
//
// fp8: the low five bits of a packed byte (see `Fp8`) choose sign, mantissa and the lowest exponent bit of scale *
// code, rounded to bf16; the upper three bits are added to the exponent. Codes with an exponent of zero come from a
// table of their own. A scale belongs to a whole tile and four blocks, for which the two tables are made; fp8_channel
// has none. mxfp8 has the tables of the largest scale; what others have less is taken off the exponents, by a
// difference that is unsigned and saturates, so that zeros stay zero. mxfp4: sixteen values, to whose exponent that of
// the scale is added; zeros stay zero. nvfp4: a code is a power of two, or 1.5 times one; its sign and exponent are
// added to the scale, or to 1.5 times the scale.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")

namespace ktinject::gemm {
namespace {

struct Fp8Tables {
  __m512i normal, subnormal;
};

// 32 values in two halves, the second the negative of the first.
inline __m512i scaled_table(__m512 values, __m512 scale) {
  const __m512 product = _mm512_mul_ps(values, scale);
  const __m512 negative = _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_castps_si512(product), _mm512_set1_epi32(static_cast<int>(0x80000000u))));
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(negative, product));
}

inline Fp8Tables fp8_tables(float scale) {
  // Mantissas 8 ... 15 with exponents 0 and 1, as if an exponent of zero were normal too.
  const __m512 normal = _mm512_setr_ps(0x1p-7f, 0x9p-10f, 0xap-10f, 0xbp-10f, 0xcp-10f, 0xdp-10f, 0xep-10f, 0xfp-10f,
                                       0x1p-6f, 0x9p-9f, 0xap-9f, 0xbp-9f, 0xcp-9f, 0xdp-9f, 0xep-9f, 0xfp-9f);
  const __m512 subnormal =
      _mm512_setr_ps(0.0f, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512 all = _mm512_set1_ps(scale);
  return {scaled_table(normal, all), scaled_table(subnormal, all)};
}

// The low byte of each lane decoded; what is in the high byte does not matter.
inline __m512i fp8_lanes(__m512i codes, __m512i exponents, const Fp8Tables& tables) {
  const __mmask32 subnormal = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x00e8));
  const __m512i value =
      _mm512_mask_permutexvar_epi16(_mm512_permutexvar_epi16(codes, tables.normal), subnormal, codes, tables.subnormal);
  return _mm512_add_epi16(value, exponents);
}

// scales [16] e8m0 as exponents of bf16, in both lanes of each output.
inline __m512i e8m0_lanes(const uint8_t* scales) {
  const __m512i scale = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  return _mm512_slli_epi16(_mm512_or_si512(scale, _mm512_slli_epi32(scale, 16)), 7);
}

// A block of fp8 codes: two rows of bf16 for each of theirs. finish(tile, values) makes results of the values that the
// tables of the tile give.
template <class Finish>
inline void fp8_block(const std::byte* from, size_t ahead, const Fp8Tables* tables, std::byte* to, Finish finish) {
  const __m512i upper = _mm512_set1_epi16(0x0700);
#pragma GCC unroll 2
  for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 8
    for (int row = 0; row < 8; ++row, to += 128) {
      const std::byte* codes = from + tile * 512 + row * 64;
      _mm_prefetch(reinterpret_cast<const char*>(codes + ahead), _MM_HINT_T0);
      const __m512i pair = _mm512_load_si512(codes), second = _mm512_srli_epi16(pair, 8);
      const __m512i values[2] = {fp8_lanes(pair, _mm512_and_si512(_mm512_slli_epi16(pair, 3), upper), tables[tile]),
                                 fp8_lanes(second, _mm512_and_si512(_mm512_srli_epi16(pair, 5), upper), tables[tile])};
      _mm512_store_si512(to, finish(tile, values[0]));
      _mm512_store_si512(to + 64, finish(tile, values[1]));
    }
  }
}

}  // namespace

void avx512_decode_fp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to) {
  constexpr int kBlocksAScale = kFp8Block / 32;
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 1024;
  Fp8Tables tables[2];
  for (int block = first; block < first + blocks; ++block, from += 1024, to += 2048) {
    if (block == first || block % kBlocksAScale == 0)
      for (int tile = 0; tile < 2; ++tile)
        tables[tile] = fp8_tables(has_factors(matrix.format) ? 1.0f : fp8_scale(panel, block / kBlocksAScale, tile));
    fp8_block(from, ahead, tables, to, [](int, __m512i value) { return value; });
  }
}

void avx512_decode_mxfp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                         std::byte* to) {
  Fp8Tables table = fp8_tables(e8m0_value(Mxfp8::kMostScale));
  table.subnormal = _mm512_maskz_mov_epi16(0xfffeffffu, table.subnormal);  // the zero that is negative
  const Fp8Tables tables[2] = {table, table};
  const __m512i most = _mm512_set1_epi16(Mxfp8::kMostScale << 7);
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 1024;
  const uint8_t* scales = e8m0_scales(panel) + static_cast<size_t>(first) * kPanel;
  for (int block = 0; block < blocks; ++block, from += 1024, to += 2048, scales += kPanel) {
    const __m512i less[2] = {_mm512_sub_epi16(most, e8m0_lanes(scales)),
                             _mm512_sub_epi16(most, e8m0_lanes(scales + kTile))};
    fp8_block(from, ahead, tables, to, [&](int tile, __m512i value) { return _mm512_subs_epu16(value, less[tile]); });
  }
}

void avx512_decode_mxfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                         std::byte* to) {
  const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kE2m1Bits));
  const __m512i table = _mm512_broadcast_i64x4(sixteen);  // twice: lookups see the lowest bit of the next code
  const __m512i magnitude = _mm512_set1_epi16(7);
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 512;
  const uint8_t* scales = e8m0_scales(panel) + static_cast<size_t>(first) * kPanel;
  for (int block = 0; block < blocks; ++block, from += 512, scales += kPanel) {
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
      const __m512i exponents = e8m0_lanes(scales + tile * kTile);
#pragma GCC unroll 4
      for (int row = 0; row < 4; ++row, to += 256) {
        const std::byte* codes = from + tile * 256 + row * 64;
        _mm_prefetch(reinterpret_cast<const char*>(codes + ahead), _MM_HINT_T0);
        const __m512i four = _mm512_load_si512(codes);
        auto store = [&](int i, __m512i lanes) {
          const __m512i value = _mm512_permutexvar_epi16(lanes, table);
          const __mmask32 used = _mm512_test_epi16_mask(lanes, magnitude);
          _mm512_store_si512(to + i * 64, _mm512_maskz_add_epi16(used, value, exponents));
        };
        store(0, four);
        store(1, _mm512_srli_epi16(four, 4));
        store(2, _mm512_srli_epi16(four, 8));
        store(3, _mm512_srli_epi16(four, 12));
      }
    }
  }
}

void avx512_decode_nvfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                         std::byte* to) {
  const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kE2m1Added));
  const __m512i table = _mm512_broadcast_i64x4(sixteen);  // twice: lookups see the lowest bit of the next code
  const __m512i magnitude = _mm512_set1_epi16(7), lowest = _mm512_set1_epi16(1);
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 512;
  const uint8_t* scales = nvfp4_scales(panel) + static_cast<size_t>(first) * 2 * kPanel;
  const auto twice = [](__m512i bits) { return _mm512_or_si512(bits, _mm512_srli_epi32(bits, 16)); };
  for (int block = 0; block < blocks; ++block, from += 512, scales += 2 * kPanel) {
#pragma GCC unroll 2
    for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 2
      for (int group = 0; group < 2; ++group) {
        const __m512i packed = _mm512_cvtepu8_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + group * kPanel + tile * kTile)));
        const __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(packed, 20), _mm512_set1_epi32(117 << 23));
        const __m512 half_more = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(1.5f));
        const __m512i plain = twice(bits), more = _mm512_sub_epi16(twice(_mm512_castps_si512(half_more)), lowest);
#pragma GCC unroll 2
        for (int row = 0; row < 2; ++row, to += 256) {
          const std::byte* codes = from + tile * 256 + (group * 2 + row) * 64;
          _mm_prefetch(reinterpret_cast<const char*>(codes + ahead), _MM_HINT_T0);
          const __m512i four = _mm512_load_si512(codes);
          auto store = [&](int i, __m512i lanes) {
            const __m512i added = _mm512_permutexvar_epi16(lanes, table);
            const __m512i scale = _mm512_mask_mov_epi16(plain, _mm512_test_epi16_mask(added, lowest), more);
            const __mmask32 used = _mm512_test_epi16_mask(lanes, magnitude);
            _mm512_store_si512(to + i * 64, _mm512_maskz_add_epi16(used, added, scale));
          };
          store(0, four);
          store(1, _mm512_srli_epi16(four, 4));
          store(2, _mm512_srli_epi16(four, 8));
          store(3, _mm512_srli_epi16(four, 12));
        }
      }
    }
  }
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
