// AVX-VNNI kernels: the 256-bit dot products of CPUs that have VNNI but not AVX-512, such as Alder Lake.
//
// Register tile: two rows x 32 outputs as four 256-bit accumulators a row, of 8 outputs each. int4 keeps its fp32 sums
// in memory: they are touched once a group.
#include <immintrin.h>

#include "gemm/kernels/head.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")

namespace ktinject::gemm {
namespace {

// How far ahead of the loads weights are asked for, and in which order: see avx512.cpp.
constexpr int kPrefetchBytes = 4096;

inline __m256i load(const std::byte* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i broadcast(const std::byte* p) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }

// In all of these: x is the first of M rows in a group, whose blocks lie block_stride bytes apart and whose rows 64.
template <int M>
void int8_rows(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride,
               const float* scale, float* c) {
  const Int8Head& head = int8_head(panel);
  const std::byte* w = panel + matrix.head_bytes();
  __m256i sum[M][4];
  for (auto& row : sum)
    for (auto& value : row) value = _mm256_setzero_si256();
  for (int block = 0; block < matrix.blocks(); ++block, w += 2048, x += block_stride) {
#pragma GCC unroll 4
    for (int r = 0; r < 16; ++r) {
      _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + r * 128), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w + kPrefetchBytes + r * 128 + 64), _MM_HINT_T0);
      __m256i a[M];
      for (int row = 0; row < M; ++row) a[row] = broadcast(x + row * 64 + r * 4);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const __m256i quads = load(w + q / 2 * 1024 + r * 64 + q % 2 * 32);
        for (int row = 0; row < M; ++row) sum[row][q] = _mm256_dpbusd_avx_epi32(sum[row][q], a[row], quads);
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int q = 0; q < 4; ++q) {
      const __m256i offset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(head.offset + q * 8));
      const __m256 factor = _mm256_mul_ps(_mm256_loadu_ps(head.scale + q * 8), _mm256_set1_ps(scale[row]));
      _mm256_storeu_ps(c + row * kPanel + q * 8,
                       _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(sum[row][q], offset)), factor));
    }
}

template <int M>
void int4_rows(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride,
               const float* scale, const int32_t* group_sum, float* c) {
  const int groups = matrix.groups();
  const uint16_t* scales = int4_scales(panel);
  const uint8_t* zeros = int4_zeros(matrix, panel);
  const std::byte* data = panel + matrix.head_bytes();
  const __m256i low_nibbles = _mm256_set1_epi8(15);
  const int group_rows = matrix.group_size / 8, all_rows = matrix.blocks() * 8;
  alignas(32) float total[M][kPanel] = {};
  for (int g = 0; g < groups; ++g) {
    __m256i sum[M][4];
    for (auto& row : sum)
      for (auto& value : row) value = _mm256_setzero_si256();
    const int end = (g + 1) * group_rows < all_rows ? (g + 1) * group_rows : all_rows;
    for (int at = g * group_rows; at < end; ++at) {
      const std::byte* w = data + static_cast<size_t>(at / 8) * 1024 + static_cast<size_t>(at % 8) * 64;
      const std::byte* quads = x + static_cast<size_t>(at / 8) * block_stride + static_cast<size_t>(at % 8) * 8;
      const std::byte* ahead = data + static_cast<size_t>(at) * 128 + kPrefetchBytes;
      _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(ahead + 64), _MM_HINT_T0);
      __m256i a0[M], a1[M];
      for (int row = 0; row < M; ++row) {
        a0[row] = broadcast(quads + row * 64);
        a1[row] = broadcast(quads + row * 64 + 4);
      }
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) {
        const __m256i pair = load(w + q / 2 * 512 + q % 2 * 32);
        const __m256i low = _mm256_and_si256(pair, low_nibbles);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(pair, 4), low_nibbles);
        for (int row = 0; row < M; ++row) {
          sum[row][q] = _mm256_dpbusd_avx_epi32(sum[row][q], low, a0[row]);
          sum[row][q] = _mm256_dpbusd_avx_epi32(sum[row][q], high, a1[row]);
        }
      }
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int column = g * kPanel + q * 8;
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + column));
      const __m256 group_scale = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
      const __m256i zero =
          matrix.symmetric ? _mm256_set1_epi32(8)
                           : _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + column)));
      for (int row = 0; row < M; ++row) {
        const __m256i inputs = _mm256_set1_epi32(group_sum[row * groups + g]);
        const __m256 exact = _mm256_cvtepi32_ps(_mm256_sub_epi32(sum[row][q], _mm256_mullo_epi32(zero, inputs)));
        float* to = total[row] + q * 8;
        _mm256_store_ps(to, _mm256_fmadd_ps(exact, group_scale, _mm256_load_ps(to)));
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int j = 0; j < kPanel; j += 8)
      _mm256_storeu_ps(c + row * kPanel + j, _mm256_mul_ps(_mm256_load_ps(total[row] + j), _mm256_set1_ps(scale[row])));
}

// Calls run(panel, x, block_stride, first, take, c) for two rows of a group, or the one that is left.
template <class Run>
void for_pairs(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               Run&& run) {
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel)
    for (int group = 0; group < rows.m; group += kTile) {
      const int height = rows.group_rows(group);
      for (int at = 0; at < height; at += 2)
        run(panels, rows.group(group) + at * 64, static_cast<size_t>(height) * 64, group + at, height - at < 2 ? 1 : 2,
            c + (group + at) * kPanel);
    }
}

}  // namespace

void avxvnni_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                  std::byte*, const Epilogue*) {
  for_pairs(matrix, panels, count, rows, c,
            [&](const std::byte* panel, const std::byte* x, size_t block_stride, int first, int take, float* out) {
              if (take == 2) int8_rows<2>(matrix, panel, x, block_stride, rows.scale + first, out);
              else int8_rows<1>(matrix, panel, x, block_stride, rows.scale + first, out);
            });
}

void avxvnni_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                  std::byte*, const Epilogue*) {
  const auto groups = static_cast<size_t>(matrix.groups());
  for_pairs(matrix, panels, count, rows, c,
            [&](const std::byte* panel, const std::byte* x, size_t block_stride, int first, int take, float* out) {
              const int32_t* sums = rows.group_sum + static_cast<size_t>(first) * groups;
              if (take == 2) int4_rows<2>(matrix, panel, x, block_stride, rows.scale + first, sums, out);
              else int4_rows<1>(matrix, panel, x, block_stride, rows.scale + first, sums, out);
            });
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
