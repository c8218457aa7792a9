// AMX kernels. Tile: 32 rows x 32 outputs as 2 x 2 accumulators over blocks of 64 bytes along k, so every A and B tile
// that is loaded is used twice. Rows that do not fill a tile get a tile of fewer rows, which also makes the product
// shorter.
//
// With many rows and a long k, k is cut into stretches of 16 blocks: 32 KiB of a panel's weights stay in the L1 cache
// while all rows pass by, with the hint that these are not worth keeping there, and the rows' share of a stretch stays
// in the L2 cache while all panels of the call pass by. The accumulators wait in c.
//
// int4 runs on the same int8 chains: q * scale becomes a whole number of the column's level (see moe/layout.hpp), which
// rounds by at most half a level, 1/254 of the column's largest weight. fp8 and mxfp4 become bf16. A stretch of a panel
// is expanded once for all rows; with some rows, between the tile products of the stretch before.
#include <immintrin.h>

#include "moe/kernels/decode.hpp"
#include "moe/kernels/head.hpp"
#include "moe/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace ktinject {
namespace {

constexpr int kStretch = 16;
// Up to here, cutting k costs more, in accumulators stored and loaded, than it gains.
constexpr int kUncut = 64;
// The same for weights that are expanded first, which lie in scratch twice.
constexpr int kInt4Uncut = 32, kDecodedUncut = 64;
// Rows for which codes are expanded between tile products: with more, the products of one stretch take so long that
// expanding the next one hardly counts, and it only drives the rows out of the caches.
constexpr int kWovenRows = 128;

// c [count, m, 32], fp32 or int32 as the product accumulates. weights(panel, first, blocks) returns `blocks` blocks of
// B tiles from block `first` on; finish(panel, row, count, c) gets the complete sums of up to 32 rows, still in the L1
// cache.
template <class Tiles, class Weights, class Finish>
void chains(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, void* c, int stretch,
            void (*product)(bool), Weights weights, Finish finish) {
  auto* out = static_cast<float*>(c);
  const int all = matrix.blocks();
  const size_t data_block = 2 * matrix.tile_bytes();
  int m0 = 0, m1 = 0;
  for (int first_block = 0; first_block < all; first_block += stretch) {
    const int blocks = all - first_block < stretch ? all - first_block : stretch;
    for (int p = 0; p < count; ++p) {
      const std::byte* panel = panels + static_cast<size_t>(p) * matrix.panel_bytes();
      const std::byte* w = weights(panel, first_block, blocks);
      // What comes next from memory is asked for a little at a time: a burst of prefetches would fill the queue of
      // outstanding lines, and the loads of this panel would wait behind it.
      const std::byte* next =
          (p + 1 < count ? panel + matrix.panel_bytes() + static_cast<size_t>(first_block) * data_block
                         : panels + static_cast<size_t>(first_block + stretch) * data_block) +
          matrix.head_bytes();
      const size_t ahead = (data_block / 64 + static_cast<size_t>((rows.m - 1) / (2 * kTile))) /
                           static_cast<size_t>((rows.m + 2 * kTile - 1) / (2 * kTile)) * 64;
      for (int row = 0; row < rows.m; row += 2 * kTile) {
        const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
        if (h0 != m0 || h1 != m1) {
          Tiles::configure(TileShapes(h0, h1));
          m0 = h0;
          m1 = h1;
        }
        const bool two = h1 > 0;
        float* target =
            out + (static_cast<size_t>(p) * static_cast<size_t>(rows.m) + static_cast<size_t>(row)) * kPanel;
        if (first_block == 0) Tiles::zero(two);
        else Tiles::load_c(target, two);
        const std::byte* a0 = rows.group(row) + static_cast<size_t>(first_block) * static_cast<size_t>(h0) * 64;
        const std::byte* a1 = rows.group(row + kTile) + static_cast<size_t>(first_block) * static_cast<size_t>(h1) * 64;
        for (int block = 0; block < blocks; ++block) {
          Tiles::load_a0(a0 + block * h0 * 64);
          if (two) Tiles::load_a1(a1 + block * h1 * 64);
          Tiles::load_b(w + block * 2048, w + block * 2048 + 1024);
          product(two);
          for (size_t at = 0; at < ahead; at += 64) _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T1);
          next += ahead;
        }
        Tiles::store(target, two);
        if (first_block + blocks == all) finish(panel, row, h0 + h1, target);
      }
    }
  }
  Tiles::release();
}

// Up to 32 rows never leave the accumulators, so nothing is gained by cutting k.
int stretch_for(const Matrix& matrix, const Rows& rows) {
  return rows.m <= 2 * kTile || matrix.blocks() <= kUncut ? matrix.blocks() : kStretch;
}

// Sums that need nothing more.
constexpr auto kDone = [](const std::byte*, int, int, float*) {};

template <class Tiles>
void bf16(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c) {
  chains<Tiles>(
      matrix, panels, count, rows, c, stretch_for(matrix, rows), Tiles::bf16,
      [&](const std::byte* panel, int first, int) { return panel + static_cast<size_t>(first) * 2048; }, kDone);
}

// c [count, 32] = (sum - offset) * column scale * row scale, in place.
void scale_sums(const float* column_scale, const int32_t* offset, const float* row_scale, int count, float* c) {
  for (int t = 0; t < 2; ++t) {
    const __m512 column = _mm512_loadu_ps(column_scale + t * kTile);
    const __m512i less = offset != nullptr ? _mm512_loadu_si512(offset + t * kTile) : _mm512_setzero_si512();
    for (int row = 0; row < count; ++row) {
      float* target = c + row * kPanel + t * kTile;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(target), less));
      _mm512_store_ps(target, _mm512_mul_ps(sum, _mm512_mul_ps(column, _mm512_set1_ps(row_scale[row]))));
    }
  }
}

template <class Tiles>
void int8(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c) {
  const size_t head_bytes = matrix.head_bytes();
  chains<Tiles>(
      matrix, panels, count, rows, c, stretch_for(matrix, rows), Tiles::unsigned_signed,
      [&](const std::byte* panel, int first, int) { return panel + head_bytes + static_cast<size_t>(first) * 2048; },
      [&](const std::byte* panel, int row, int height, float* sums) {
        scale_sums(int8_head(panel).scale, int8_head(panel).offset, rows.scale + row, height, sums);
      });
}

// Expands the nibbles of one tile's row pair: bytes are (q - zero) * scale / level, rounded. `ratio` is scale / level *
// 2048, twice in each 32-bit lane; nibbles and zero are brought to 16 times their value in 16 bits, so that the
// rounding high multiply takes off exactly 2^15.
inline __m512i scaled(__m512i even, __m512i odd, __m512i ratio, __m512i zero) {
  const __m512i mask = _mm512_set1_epi16(0xf0);
  even = _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_and_si512(even, mask), zero), ratio);
  odd = _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_and_si512(odd, mask), zero), ratio);
  return _mm512_or_si512(_mm512_and_si512(even, _mm512_set1_epi16(0xff)), _mm512_slli_epi16(odd, 8));
}

// `inverse` is 2048 / level.
inline __m512i ratio_of(const std::byte* panel, int group, int tile, __m512 inverse) {
  const auto* scales = reinterpret_cast<const __m256i*>(int4_scales(panel) + group * kPanel + tile * kTile);
  const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(scales)), 16));
  const __m512i whole = _mm512_and_si512(_mm512_cvtps_epi32(_mm512_mul_ps(scale, inverse)), _mm512_set1_epi32(0xffff));
  return _mm512_or_si512(whole, _mm512_slli_epi32(whole, 16));
}

inline __m512i zero_of(const Matrix& matrix, const std::byte* panel, int group, int tile) {
  const uint8_t* zeros = int4_zeros(matrix, panel) + group * kPanel + tile * kTile;
  const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
  return _mm512_slli_epi16(_mm512_or_si512(zero, _mm512_slli_epi32(zero, 16)), 4);
}

void expand(const Matrix& matrix, const std::byte* panel, int first, int blocks, std::byte* to) {
  __m512 inverse[2];
  for (int tile = 0; tile < 2; ++tile) {
    const __m512 level = _mm512_loadu_ps(int4_levels(panel) + tile * kTile);
    // Columns of zeros; and so small ones that the quotient might overflow count as such.
    const __mmask16 used = _mm512_cmp_ps_mask(level, _mm512_set1_ps(0x1p-110f), _CMP_GT_OQ);
    inverse[tile] = _mm512_maskz_div_ps(used, _mm512_set1_ps(2048.0f), level);
  }
  const std::byte* from = panel + matrix.head_bytes() + static_cast<size_t>(first) * 1024;
  const int run = matrix.group_size < 64 ? 4 : 8;  // rows of a block that share a scale
  for (int block = first; block < first + blocks; ++block)
    for (int tile = 0; tile < 2; ++tile)
      for (int start = 0; start < 8; start += run) {
        const int group = (block * 64 + start * 8) / matrix.group_size;
        const __m512i ratio = ratio_of(panel, group, tile, inverse[tile]);
        const __m512i zero = matrix.symmetric ? _mm512_set1_epi16(8 * 16) : zero_of(matrix, panel, group, tile);
        for (int row = 0; row < run; ++row, from += 64, to += 128) {
          const __m512i pair = _mm512_load_si512(from);
          _mm512_store_si512(to, scaled(_mm512_slli_epi16(pair, 4), _mm512_srli_epi16(pair, 4), ratio, zero));
          _mm512_store_si512(to + 64, scaled(pair, _mm512_srli_epi16(pair, 8), ratio, zero));
        }
      }
}

// chains() for weights that make(panel, first, blocks, to) expands to B tiles: the stretch that comes next is expanded
// a block at a time between the tile products of this one, which leave the vector units idle; the one after that is on
// its way from memory.
template <class Tiles, class Make, class Finish>
void woven(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte* scratch,
           int stretch, void (*product)(bool), Make make, Finish finish) {
  const int all = matrix.blocks(), pairs = (rows.m + 2 * kTile - 1) / (2 * kTile);
  const size_t data_block = 2 * matrix.tile_bytes();
  const size_t ahead = (data_block / 64 + static_cast<size_t>(pairs) - 1) / static_cast<size_t>(pairs) * 64;
  // Place i is stretch i / count of panel i % count.
  const int places = (all + stretch - 1) / stretch * count;
  auto panel_of = [&](int place) { return panels + static_cast<size_t>(place % count) * matrix.panel_bytes(); };
  auto first_of = [&](int place) { return place / count * stretch; };
  auto blocks_of = [&](int place) {
    return place >= places ? 0 : all - first_of(place) < stretch ? all - first_of(place) : stretch;
  };
  std::byte* buffers[2] = {scratch, scratch + static_cast<size_t>(stretch) * 2048};
  make(panels, 0, stretch, buffers[0]);
  int m0 = 0, m1 = 0;
  for (int place = 0; place < places; ++place) {
    const int first = first_of(place), blocks = blocks_of(place), next_blocks = blocks_of(place + 1);
    const std::byte* w = buffers[place % 2];
    const std::byte* later =
        panel_of(place + 2) + matrix.head_bytes() + static_cast<size_t>(first_of(place + 2)) * data_block;
    std::byte* to = buffers[1 - place % 2];
    // Blocks of the next place, over all products of this one.
    int made = 0, due = 0;
    for (int row = 0; row < rows.m; row += 2 * kTile) {
      const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
      if (h0 != m0 || h1 != m1) {
        Tiles::configure(TileShapes(h0, h1));
        m0 = h0;
        m1 = h1;
      }
      const bool two = h1 > 0;
      float* target =
          c + (static_cast<size_t>(place % count) * static_cast<size_t>(rows.m) + static_cast<size_t>(row)) * kPanel;
      if (first == 0) Tiles::zero(two);
      else Tiles::load_c(target, two);
      const std::byte* a0 = rows.group(row) + static_cast<size_t>(first) * static_cast<size_t>(h0) * 64;
      const std::byte* a1 = rows.group(row + kTile) + static_cast<size_t>(first) * static_cast<size_t>(h1) * 64;
      for (int block = 0; block < blocks; ++block) {
        Tiles::load_a0(a0 + block * h0 * 64);
        if (two) Tiles::load_a1(a1 + block * h1 * 64);
        Tiles::load_b(w + block * 2048, w + block * 2048 + 1024);
        product(two);
        for (size_t at = 0; at < ahead; at += 64) _mm_prefetch(reinterpret_cast<const char*>(later + at), _MM_HINT_T1);
        later += ahead;
        due += next_blocks;
        for (; due >= pairs * blocks; due -= pairs * blocks, ++made)
          make(panel_of(place + 1), first_of(place + 1) + made, 1, to + made * 2048);
      }
      Tiles::store(target, two);
      if (first + blocks == all) finish(panel_of(place), row, h0 + h1, target);
    }
  }
  Tiles::release();
}

// Either of the two.
template <class Tiles, class Make, class Finish>
void expanded(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte* scratch,
              int uncut, void (*product)(bool), Make make, Finish finish) {
  const int stretch = matrix.blocks() <= uncut ? matrix.blocks() : kStretch;
  if (rows.m <= kWovenRows)
    return woven<Tiles>(matrix, panels, count, rows, c, scratch, stretch, product, make, finish);
  chains<Tiles>(
      matrix, panels, count, rows, c, stretch, product,
      [&](const std::byte* panel, int first, int blocks) -> const std::byte* {
        make(panel, first, blocks, scratch);
        return scratch;
      },
      finish);
}

template <class Tiles>
void int4(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte* scratch) {
  expanded<Tiles>(
      matrix, panels, count, rows, c, scratch, kInt4Uncut, Tiles::signed_signed,
      [&](const std::byte* panel, int first, int blocks, std::byte* to) { expand(matrix, panel, first, blocks, to); },
      [&](const std::byte* panel, int row, int height, float* sums) {
        scale_sums(int4_levels(panel), nullptr, rows.scale + row, height, sums);
      });
}

// Up to 32 rows: a panel is read from end to end, and its sums never leave the accumulators.
template <class Tiles>
void decoded_few(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                 std::byte* scratch, Decode decode) {
  const int h0 = rows.group_rows(0), h1 = rows.m > kTile ? rows.group_rows(kTile) : 0;
  const bool two = h1 > 0;
  Tiles::configure(TileShapes(h0, h1));
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel) {
    Tiles::zero(two);
    const std::byte *a0 = rows.group(0), *a1 = rows.group(kTile);
    for (int first = 0; first < matrix.blocks(); first += kDecodedBlocks) {
      const int blocks = matrix.blocks() - first < kDecodedBlocks ? matrix.blocks() - first : kDecodedBlocks;
      decode(matrix, panels, first, blocks, kDecodeAhead, scratch);
      for (int block = 0; block < blocks; ++block, a0 += h0 * 64, a1 += h1 * 64) {
        Tiles::load_a0(a0);
        if (two) Tiles::load_a1(a1);
        Tiles::load_b(scratch + block * 2048, scratch + block * 2048 + 1024);
        Tiles::bf16(two);
      }
    }
    Tiles::store(c, two);
  }
  Tiles::release();
}

template <class Tiles>
void decoded(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte* scratch,
             Decode decode) {
  if (rows.m <= 2 * kTile) return decoded_few<Tiles>(matrix, panels, count, rows, c, scratch, decode);
  expanded<Tiles>(
      matrix, panels, count, rows, c, scratch, kDecodedUncut, Tiles::bf16,
      [&](const std::byte* panel, int first, int blocks, std::byte* to) {
        decode(matrix, panel, first, blocks, 0, to);
      },
      kDone);
}

}  // namespace

void amx_bf16(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte*) {
  bf16<HardwareTiles>(matrix, panels, count, rows, c);
}
void amx_int8(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte*) {
  int8<HardwareTiles>(matrix, panels, count, rows, c);
}
void amx_int4(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
              std::byte* scratch) {
  int4<HardwareTiles>(matrix, panels, count, rows, c, scratch);
}
void modelled_amx_bf16(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                       std::byte*) {
  bf16<ModelTiles>(matrix, panels, count, rows, c);
}
void modelled_amx_int8(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                       std::byte*) {
  int8<ModelTiles>(matrix, panels, count, rows, c);
}
void modelled_amx_int4(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                       std::byte* scratch) {
  int4<ModelTiles>(matrix, panels, count, rows, c, scratch);
}

void amx_fp8(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c, std::byte* scratch) {
  decoded<HardwareTiles>(matrix, panels, count, rows, c, scratch, avx512_decode_fp8);
}
void amx_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
               std::byte* scratch) {
  decoded<HardwareTiles>(matrix, panels, count, rows, c, scratch, avx512_decode_mxfp4);
}
void modelled_amx_fp8(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                      std::byte* scratch) {
  decoded<ModelTiles>(matrix, panels, count, rows, c, scratch, avx512_decode_fp8);
}
void modelled_amx_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                        std::byte* scratch) {
  decoded<ModelTiles>(matrix, panels, count, rows, c, scratch, avx512_decode_mxfp4);
}

}  // namespace ktinject

#pragma GCC pop_options
