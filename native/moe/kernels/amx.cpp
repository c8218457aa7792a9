// AMX kernels. Tile: 32 rows x 32 outputs as 2 x 2 accumulators over blocks of 64 bytes along k, so every A and B tile that is
// loaded is used twice. Rows that do not fill a tile get a tile of fewer rows, which also makes the product shorter.
//
// int4 is expanded to int8 once a panel, then multiplied group by group; the groups' scales are applied in fp32.
#include <immintrin.h>

#include "moe/kernels/head.hpp"
#include "moe/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace ktinject {
namespace {

// Calls run(first, m0, m1) for blocks of up to 32 rows: m0 rows in the first tile, m1 in the second.
template <class Run>
void for_row_blocks(int m, Run&& run) {
  for (int first = 0; first < m; first += 32) {
    const int left = m - first;
    run(first, left < 16 ? left : 16, left < 16 ? 0 : left < 32 ? left - 16 : 16);
  }
}

template <class Tiles, class Product>
inline void accumulate(const Rows& rows, int first, bool two, const std::byte* w, int blocks, Product product) {
  const std::byte* a0 = rows.data + static_cast<size_t>(first) * rows.stride;
  const std::byte* a1 = a0 + 16 * rows.stride;
  for (int block = 0; block < blocks; ++block, w += 2048) {
    Tiles::load_a0(a0 + block * 64, rows.stride);
    if (two) Tiles::load_a1(a1 + block * 64, rows.stride);
    Tiles::load_b(w, w + 1024);
    product(two);
  }
}

template <class Tiles>
void bf16(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c) {
  for_row_blocks(rows.m, [&](int first, int m0, int m1) {
    Tiles::configure(TileShapes(m0, m1, 64));
    Tiles::zero(m1 > 0);
    accumulate<Tiles>(rows, first, m1 > 0, panel, matrix.blocks(), [](bool two) { Tiles::bf16(two); });
    Tiles::store(c + first * kPanel, m1 > 0);
  });
  Tiles::release();
}

template <class Tiles>
void int8(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte* scratch) {
  const Int8Head& head = int8_head(panel);
  auto* sums = reinterpret_cast<int32_t*>(scratch);
  for_row_blocks(rows.m, [&](int first, int m0, int m1) {
    Tiles::configure(TileShapes(m0, m1, 64));
    Tiles::zero(m1 > 0);
    accumulate<Tiles>(rows, first, m1 > 0, panel + matrix.head_bytes(), matrix.blocks(),
                      [](bool two) { Tiles::unsigned_signed(two); });
    Tiles::store(sums, m1 > 0);
    for (int row = 0; row < m0 + m1; ++row)
      for (int t = 0; t < 2; ++t) {
        const __m512i exact = _mm512_sub_epi32(_mm512_load_si512(sums + row * kPanel + t * kTile),
                                               _mm512_loadu_si512(head.offset + t * kTile));
        const __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(head.scale + t * kTile), _mm512_set1_ps(rows.scale[first + row]));
        _mm512_storeu_ps(c + (first + row) * kPanel + t * kTile, _mm512_mul_ps(_mm512_cvtepi32_ps(exact), factor));
      }
  });
  Tiles::release();
}

template <class Tiles>
void int4(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte* scratch) {
  const uint16_t* scales = int4_scales(panel);
  const std::byte* data = panel + matrix.head_bytes();
  const int blocks = matrix.blocks();
  const __m512i low_nibbles = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
  for (size_t row = 0; row < static_cast<size_t>(blocks) * 16; ++row) {
    const __m512i pair = _mm512_load_si512(data + row * 64);
    const __m512i low = _mm512_and_si512(pair, low_nibbles), high = _mm512_and_si512(_mm512_srli_epi16(pair, 4), low_nibbles);
    _mm512_store_si512(scratch + row * 128, _mm512_sub_epi8(low, eight));
    _mm512_store_si512(scratch + row * 128 + 64, _mm512_sub_epi8(high, eight));
  }
  auto* sums = reinterpret_cast<int32_t*>(scratch + static_cast<size_t>(blocks) * 2048);
  // Groups of 32 are half a block; longer ones are whole blocks.
  const int k_bytes = matrix.group_size < 64 ? matrix.group_size : 64;
  for_row_blocks(rows.m, [&](int first, int m0, int m1) {
    const bool two = m1 > 0;
    const std::byte* a0 = rows.data + static_cast<size_t>(first) * rows.stride;
    float* out = c + first * kPanel;
    Tiles::configure(TileShapes(m0, m1, k_bytes));
    for (int g = 0; g < matrix.groups(); ++g) {
      Tiles::zero(two);
      const int end = (g + 1) * matrix.group_size < matrix.padded_k() ? (g + 1) * matrix.group_size : matrix.padded_k();
      for (int k = g * matrix.group_size; k < end; k += k_bytes) {
        Tiles::load_a0(a0 + k, rows.stride);
        if (two) Tiles::load_a1(a0 + 16 * rows.stride + k, rows.stride);
        const std::byte* w = scratch + static_cast<size_t>(k / 64) * 2048 + static_cast<size_t>(k % 64) * 16;
        Tiles::load_b(w, w + 1024);
        Tiles::signed_signed(two);
      }
      Tiles::store(sums, two);
      for (int t = 0; t < 2; ++t) {
        const __m512i bits =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + g * kPanel + t * kTile)));
        const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
        for (int row = 0; row < m0 + m1; ++row) {
          float* target = out + row * kPanel + t * kTile;
          const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums + row * kPanel + t * kTile)), scale);
          _mm512_storeu_ps(target, g == 0 ? product : _mm512_add_ps(product, _mm512_loadu_ps(target)));
        }
      }
    }
    for (int row = 0; row < m0 + m1; ++row)
      for (int t = 0; t < 2; ++t) {
        float* target = out + row * kPanel + t * kTile;
        _mm512_storeu_ps(target, _mm512_mul_ps(_mm512_loadu_ps(target), _mm512_set1_ps(rows.scale[first + row])));
      }
  });
  Tiles::release();
}

}  // namespace

void amx_bf16(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte*) {
  bf16<HardwareTiles>(matrix, panel, rows, c);
}
void amx_int8(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte* scratch) {
  int8<HardwareTiles>(matrix, panel, rows, c, scratch);
}
void amx_int4(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte* scratch) {
  int4<HardwareTiles>(matrix, panel, rows, c, scratch);
}
void modelled_amx_bf16(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte*) {
  bf16<ModelTiles>(matrix, panel, rows, c);
}
void modelled_amx_int8(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte* scratch) {
  int8<ModelTiles>(matrix, panel, rows, c, scratch);
}
void modelled_amx_int4(const Matrix& matrix, const std::byte* panel, const Rows& rows, float* c, std::byte* scratch) {
  int4<ModelTiles>(matrix, panel, rows, c, scratch);
}

}  // namespace ktinject

#pragma GCC pop_options
