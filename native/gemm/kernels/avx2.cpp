// AVX2 kernels, for CPUs without AVX-512. Register tile: M rows x 32 outputs as four or eight 256-bit accumulators a
// row.
//
// bf16 pairs are widened to two fp32 vectors (even inputs by a shift, odd ones by a mask) and multiplied with FMA. int8
// goes through 16 bits, because vpmaddubsw saturates: 255 * 127 * 2 does not fit. Products of int4 do, and some of
// their sums.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace ktinject::gemm {
namespace {

// How far ahead of the loads weights are asked for, and in which order: see avx512.cpp.
constexpr int kPrefetchBytes = 4096;

inline __m256i load(const std::byte* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i broadcast(const std::byte* p) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }

// c [M, 32] = x times `blocks` blocks of weights; on top of what c holds, if `add`. `streamed`: they come from memory;
// else they were decoded to where they are, in the L1 cache.
template <int M, bool streamed>
void bf16_rows(int blocks, const std::byte* w, const std::byte* x, size_t block_stride, bool add, float* c) {
  const __m256i high_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 sum[M][4];
  for (int row = 0; row < M; ++row)
    for (int q = 0; q < 4; ++q) sum[row][q] = add ? _mm256_loadu_ps(c + row * kPanel + q * 8) : _mm256_setzero_ps();
  for (int block = 0; block < blocks; ++block, w += 2048, x += block_stride) {
    for (int r = 0; r < 16; ++r) {
      if constexpr (streamed) {
        _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + r * 128), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + r * 128 + 64), _MM_HINT_T0);
      }
      __m256 even[M], odd[M];
      for (int row = 0; row < M; ++row) {
        const __m256i pair = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x + row * 64 + r * 4));
        even[row] = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
        odd[row] = _mm256_castsi256_ps(_mm256_and_si256(pair, high_half));
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const __m256i pairs = load(w + (q / 2) * 1024 + r * 64 + (q % 2) * 32);
        const __m256 w_even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        const __m256 w_odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, high_half));
        for (int row = 0; row < M; ++row) {
          sum[row][q] = _mm256_fmadd_ps(w_even, even[row], sum[row][q]);
          sum[row][q] = _mm256_fmadd_ps(w_odd, odd[row], sum[row][q]);
        }
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int q = 0; q < 4; ++q) _mm256_storeu_ps(c + row * kPanel + q * 8, sum[row][q]);
}

// Four 16-bit inputs, repeated: the operand for 4 outputs x 4 inputs of widened weights.
inline __m256i widen_quad(const std::byte* p) {
  return _mm256_broadcastq_epi64(_mm_cvtepu8_epi16(_mm_cvtsi32_si128(*reinterpret_cast<const int32_t*>(p))));
}

// Adds the two partial sums of each output: 8 accumulators of (4 outputs x 2) become 32 sums in order.
inline void fold(const __m256i* sum, __m256i* folded) {
  for (int q = 0; q < 4; ++q) {
    const __m256i mixed = _mm256_hadd_epi32(sum[2 * q], sum[2 * q + 1]);  // lanes: a01 b01 | a23 b23
    folded[q] = _mm256_permute4x64_epi64(mixed, 0xd8);
  }
}

void int8_row(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride, float scale,
              float* c) {
  const Int8Head& head = int8_head(panel);
  const std::byte* w = panel + matrix.head_bytes();
  __m256i sum[8];
  for (auto& value : sum) value = _mm256_setzero_si256();
  for (int block = 0; block < matrix.blocks(); ++block, w += 2048, x += block_stride)
    for (int r = 0; r < 16; ++r) {
      _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + r * 128), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + r * 128 + 64), _MM_HINT_T0);
      const __m256i a = widen_quad(x + r * 4);
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        const auto* quads = reinterpret_cast<const __m128i*>(w + (q / 4) * 1024 + r * 64 + (q % 4) * 16);
        sum[q] = _mm256_add_epi32(sum[q], _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_load_si128(quads)), a));
      }
    }
  __m256i folded[4];
  fold(sum, folded);
  for (int q = 0; q < 4; ++q) {
    const __m256i exact =
        _mm256_sub_epi32(folded[q], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(head.offset + q * 8)));
    const __m256 factor = _mm256_mul_ps(_mm256_loadu_ps(head.scale + q * 8), _mm256_set1_ps(scale));
    _mm256_storeu_ps(c + q * 8, _mm256_mul_ps(_mm256_cvtepi32_ps(exact), factor));
  }
}

// Rows of 8 inputs whose products fit 16 bits together: each adds at most 2 · 15 · 128 to a sum, twice.
constexpr int kShortRows = 4;
static_assert(kShortRows * 4 * 15 * 128 <= 32767);

// A panel or a half of it, from vector 2 * half on: c [M, Vectors * 8], of rows that lie kPanel apart. Codes are
// unsigned and below 16, so vpmaddubsw does not saturate; groups are multiples of kShortRows rows.
template <int M, int Vectors>
void int4_part(const Matrix& matrix, const std::byte* panel, int half, const std::byte* x, size_t block_stride,
               const float* scale, const int32_t* group_sum, float* c) {
  const int groups = matrix.groups(), group_rows = matrix.group_size / 8, all_rows = matrix.blocks() * 8;
  const uint16_t* scales = int4_scales(panel) + half * 16;
  const uint8_t* zeros = int4_zeros(matrix, panel) + half * 16;
  const std::byte* data = panel + matrix.head_bytes() + half * 512;
  const __m256i low_nibbles = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256 total[M][Vectors];
  for (auto& row : total)
    for (auto& value : row) value = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    __m256i sum[M][Vectors];
    for (auto& row : sum)
      for (auto& value : row) value = _mm256_setzero_si256();
    const int end = (g + 1) * group_rows < all_rows ? (g + 1) * group_rows : all_rows;
    for (int first = g * group_rows; first < end; first += kShortRows) {
      const std::byte* w = data + static_cast<size_t>(first / 8) * 1024 + static_cast<size_t>(first % 8) * 64;
      const std::byte* quads = x + static_cast<size_t>(first / 8) * block_stride + static_cast<size_t>(first % 8) * 8;
      __m256i few[M][Vectors];
      for (auto& row : few)
        for (auto& value : row) value = _mm256_setzero_si256();
#pragma GCC unroll 4
      for (int r = 0; r < kShortRows; ++r) {
        const std::byte* ahead =
            (Vectors == 4 ? data + static_cast<size_t>(first + r) * 128 : w + r * 64) + kPrefetchBytes;
#pragma GCC unroll 2
        for (int line = 0; line < Vectors / 2; ++line)
          _mm_prefetch(reinterpret_cast<const char*>(ahead + line * 64), _MM_HINT_T0);
#pragma GCC unroll 4
        for (int q = 0; q < Vectors; ++q) {
          const __m256i pair = load(w + q / 2 * 512 + r * 64 + q % 2 * 32);
          const __m256i low = _mm256_and_si256(pair, low_nibbles);
          const __m256i high = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low_nibbles);
          for (int row = 0; row < M; ++row) {
            const std::byte* inputs = quads + row * 64 + r * 8;
            few[row][q] = _mm256_add_epi16(few[row][q], _mm256_maddubs_epi16(low, broadcast(inputs)));
            few[row][q] = _mm256_add_epi16(few[row][q], _mm256_maddubs_epi16(high, broadcast(inputs + 4)));
          }
        }
      }
      for (int row = 0; row < M; ++row)
        for (int q = 0; q < Vectors; ++q)
          sum[row][q] = _mm256_add_epi32(sum[row][q], _mm256_madd_epi16(few[row][q], ones));
    }
#pragma GCC unroll 4
    for (int q = 0; q < Vectors; ++q) {
      const int column = g * kPanel + q * 8;
      const __m256i zero =
          matrix.symmetric ? _mm256_set1_epi32(8)
                           : _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + column)));
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + column));
      const __m256 group_scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
      for (int row = 0; row < M; ++row) {
        const __m256i inputs = _mm256_set1_epi32(group_sum[row * groups + g]);
        const __m256i exact = _mm256_sub_epi32(sum[row][q], _mm256_mullo_epi32(zero, inputs));
        total[row][q] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exact), group_scale, total[row][q]);
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int q = 0; q < Vectors; ++q)
      _mm256_storeu_ps(c + row * kPanel + q * 8, _mm256_mul_ps(total[row][q], _mm256_set1_ps(scale[row])));
}

template <int M>
void int4_rows(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride,
               const float* scale, const int32_t* group_sum, float* c) {
  // A row of its own has registers for the whole panel, and reads it from one end to the other: weights come from
  // memory.
  if constexpr (M == 1) int4_part<1, 4>(matrix, panel, 0, x, block_stride, scale, group_sum, c);
  else
    for (int half = 0; half < 2; ++half)
      int4_part<M, 2>(matrix, panel, half, x, block_stride, scale, group_sum, c + half * 16);
}

// Calls run(panel, x, block_stride, row, take, c) for up to `Most` rows of the same group.
template <int Most, class Run>
void for_runs(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              Run&& run) {
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel)
    for (int group = 0; group < rows.m; group += kTile) {
      const int height = rows.group_rows(group);
      for (int at = 0; at < height;) {
        const int take = height - at < Most ? height - at : Most;
        run(panels, rows.group(group) + at * 64, static_cast<size_t>(height) * 64, group + at, take,
            c + (group + at) * kPanel);
        at += take;
      }
    }
}

// A slice of a panel is decoded once for all rows, which then add its share to c.
void decoded(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
             std::byte* scratch, Decode decode) {
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel) {
    for (int first = 0; first < matrix.blocks(); first += kDecodedBlocks) {
      const int blocks = matrix.blocks() - first < kDecodedBlocks ? matrix.blocks() - first : kDecodedBlocks;
      decode(matrix, panels, first, blocks, kDecodeAhead, scratch);
      for_runs<2>(matrix, panels, 1, rows, c,
                  [&](const std::byte*, const std::byte* x, size_t block_stride, int, int take, float* out) {
                    x += static_cast<size_t>(first) * block_stride;
                    if (take == 2) bf16_rows<2, false>(blocks, scratch, x, block_stride, first > 0, out);
                    else bf16_rows<1, false>(blocks, scratch, x, block_stride, first > 0, out);
                  });
    }
    multiply_by_factors(matrix, panels, rows.m, c);
  }
}

}  // namespace

void avx2_bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               std::byte*, const Epilogue*) {
  for_runs<2>(matrix, panels, count, rows, c,
              [&](const std::byte* panel, const std::byte* x, size_t block_stride, int, int take, float* out) {
                if (take == 2) bf16_rows<2, true>(matrix.blocks(), panel, x, block_stride, false, out);
                else bf16_rows<1, true>(matrix.blocks(), panel, x, block_stride, false, out);
              });
}

void avx2_fp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx2_decode_fp8);
}

void avx2_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx2_decode_mxfp4);
}

void avx2_nvfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx2_decode_nvfp4);
}

void avx2_mxfp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx2_decode_mxfp8);
}

void avx2_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               std::byte*, const Epilogue*) {
  for_runs<1>(matrix, panels, count, rows, c,
              [&](const std::byte* panel, const std::byte* x, size_t block_stride, int row, int, float* out) {
                int8_row(matrix, panel, x, block_stride, rows.scale[row], out);
              });
}

void avx2_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               std::byte*, const Epilogue*) {
  const auto groups = static_cast<size_t>(matrix.groups());
  for_runs<4>(
      matrix, panels, count, rows, c,
      [&](const std::byte* panel, const std::byte* x, size_t block_stride, int row, int take, float* out) {
        const int32_t* sums = rows.group_sum + static_cast<size_t>(row) * groups;
        const auto run = take == 4 ? int4_rows<4> : take == 3 ? int4_rows<3> : take == 2 ? int4_rows<2> : int4_rows<1>;
        run(matrix, panel, x, block_stride, rows.scale + row, sums, out);
      });
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
