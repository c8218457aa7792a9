// AMX kernels. Tile: 32 rows x 32 outputs as 2 x 2 accumulators over blocks of 64 bytes along k, so every A and B tile
// that is loaded is used twice. Rows that do not fill a tile get a tile of fewer rows, which also makes the product
// shorter.
//
// With many rows and a long k, k is cut into slices of 16 blocks: 32 KiB of a panel's weights stay in the L1 cache
// while all rows pass by, with the hint that these are not worth keeping there, and the rows' share of a slice stays
// in the L2 cache while all panels of the call pass by. The accumulators wait in c.
//
// Floats of 8 and 4 bits become bf16: a slice of a panel is decoded once for all rows; with some rows, between the tile
// products of the slice before. int4 is in amx_int4.cpp.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"
#include "gemm/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace ktinject::gemm {
namespace {

#include "gemm/kernels/amx_chains.inl"

// For weights that are decoded first: between tile products up to so many rows, into one of two buffers; with
// more, the products of one slice take so long that expanding the next one hardly counts, and it only drives the rows
// out of the caches.
struct ExpandedLimits {
  int interleaved_rows, interleaved_uncut, uncut;
};
constexpr ExpandedLimits kDecodedLimits{128, 64, 64};

// Up to 32 rows never leave the accumulators, so nothing is gained by cutting k.
int stretch_for(const Matrix& matrix, const PackedActivations& rows) {
  return rows.m <= kPair || matrix.blocks() <= kUncut ? matrix.blocks() : kSlice;
}

// Sums that need nothing more.
constexpr auto kDone = [](const std::byte*, int, int, float*) {};

template <class Tiles>
void bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
          const Epilogue* epilogue) {
  chains<Tiles, Product::bf16>(
      matrix, panels, count, rows, c, epilogue, stretch_for(matrix, rows),
      [&](const std::byte* panel, int first, int) { return panel + static_cast<size_t>(first) * 2048; }, kDone);
}

struct Int8Scales {
  const float* rows;
  void operator()(const std::byte* panel, int row, int count, float* sums) const {
    scale_sums(int8_head(panel).scale, int8_head(panel).offset, rows + row, count, sums);
  }
};
template <class Tiles>
void int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
          const Epilogue* epilogue) {
  const size_t head_bytes = matrix.head_bytes();
  chains<Tiles, Product::unsigned_signed>(
      matrix, panels, count, rows, c, epilogue, stretch_for(matrix, rows),
      [&](const std::byte* panel, int first, int) { return panel + head_bytes + static_cast<size_t>(first) * 2048; },
      Int8Scales{rows.scale});
}

// chains() for weights that make(panel, first, blocks, to) expands to B tiles: the slice that comes next is expanded
// a block at a time between the tile products of this one, which leave the vector units idle; the one after that is on
// its way from memory. Loads come before the products here: with codes expanded in between, the other order was slower
// at 64 rows.
template <class Tiles, Product product, class Make, class Rescale>
void interleaved(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                 std::byte* scratch, const Epilogue* epilogue, int slice, Make make, Rescale rescale) {
  PendingEpilogue<Rescale> pending(rescale, epilogue);
  const int all = matrix.blocks(), pairs = (rows.m + kPair - 1) / kPair;
  const size_t data_block = 2 * matrix.tile_bytes();
  // Place i is slice i / count of panel i % count.
  const int places = (all + slice - 1) / slice * count;
  auto panel_of = [&](int place) { return panels + static_cast<size_t>(place % count) * matrix.panel_bytes(); };
  auto first_of = [&](int place) { return place / count * slice; };
  auto blocks_of = [&](int place) {
    return place >= places ? 0 : all - first_of(place) < slice ? all - first_of(place) : slice;
  };
  std::byte* buffers[2] = {scratch, scratch + static_cast<size_t>(slice) * 2048};
  make(panels, 0, slice, buffers[0]);
  Heights heights;
  Ahead ahead(matrix, rows.m);
  for (int place = 0; place < places; ++place) {
    const int first = first_of(place), blocks = blocks_of(place), next_blocks = blocks_of(place + 1);
    const std::byte* w = buffers[place % 2];
    ahead.start(panel_of(place + 2) + matrix.head_bytes() + static_cast<size_t>(first_of(place + 2)) * data_block);
    std::byte* to = buffers[1 - place % 2];
    // Blocks of the next place, over all products of this one.
    int made = 0, due = 0;
    for (int row = 0; row < rows.m; row += kPair) {
      const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
      heights.configure<Tiles>(h0, h1);
      const bool two = h1 > 0;
      float* sums =
          c + (static_cast<size_t>(place % count) * static_cast<size_t>(rows.m) + static_cast<size_t>(row)) * kPanel;
      if (first == 0) Tiles::zero(two);
      else Tiles::load_c(sums, two);
      const std::byte* a0 = rows.group(row) + static_cast<size_t>(first) * static_cast<size_t>(h0) * 64;
      const std::byte* a1 = rows.group(row + kTile) + static_cast<size_t>(first) * static_cast<size_t>(h1) * 64;
      for (int block = 0; block < blocks; ++block) {
        Tiles::load_a0(a0 + block * h0 * 64);
        if (two) Tiles::load_a1(a1 + block * h1 * 64);
        Tiles::load_b(w + block * 2048, w + block * 2048 + 1024);
        multiply_all<Tiles, product>(two);
        ahead.some();
        due += next_blocks;
        for (; due >= pairs * blocks; due -= pairs * blocks, ++made)
          make(panel_of(place + 1), first_of(place + 1) + made, 1, to + made * 2048);
        pending.some();
      }
      if (blocks == all) sums = pending.place(sums);
      Tiles::store(sums, two);
      if (first + blocks == all) pending.start(panel_of(place), place % count, row, h0 + h1, sums, blocks);
    }
  }
  pending.rest();
  Tiles::release();
}

// Either of the two.
template <class Tiles, Product product, class Make, class Rescale>
void expanded(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch, const Epilogue* epilogue, const ExpandedLimits& limits, Make make, Rescale rescale) {
  const bool is_interleaved = rows.m <= limits.interleaved_rows;
  const int slice =
      matrix.blocks() <= (is_interleaved ? limits.interleaved_uncut : limits.uncut) ? matrix.blocks() : kSlice;
  if (is_interleaved)
    return interleaved<Tiles, product>(matrix, panels, count, rows, c, scratch, epilogue, slice, make, rescale);
  chains<Tiles, product>(
      matrix, panels, count, rows, c, epilogue, slice,
      [&](const std::byte* panel, int first, int blocks) -> const std::byte* {
        make(panel, first, blocks, scratch);
        return scratch;
      },
      rescale);
}

// Up to 32 rows: a panel is read from end to end, and its sums never leave the accumulators. What is expanded between
// the tile products is a few blocks, which come from the L1 cache right away.
template <class Tiles, Product product, class Make, class Rescale>
void few(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
         std::byte* scratch, const Epilogue* epilogue, Make make, Rescale rescale) {
  PendingEpilogue<Rescale> pending(rescale, epilogue);
  const int all = matrix.blocks(), h0 = rows.group_rows(0), h1 = rows.m > kTile ? rows.group_rows(kTile) : 0;
  const bool two = h1 > 0;
  std::byte *w = scratch, *to = scratch + kDecodedBlocks * 2048;
  auto blocks_at = [&](int first) { return all - first < kDecodedBlocks ? all - first : kDecodedBlocks; };
  Tiles::configure(TileShapes(h0, h1));
  make(panels, 0, blocks_at(0), w);
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes()) {
    Tiles::zero(two);
    const std::byte *a0 = rows.group(0), *a1 = rows.group(kTile);
    for (int first = 0; first < all; first += kDecodedBlocks) {
      const int blocks = blocks_at(first);
      const bool is_last = first + blocks == all;
      const std::byte* panel = is_last ? panels + matrix.panel_bytes() : panels;
      const int next = is_last ? 0 : first + blocks, next_blocks = is_last && p + 1 == count ? 0 : blocks_at(next);
      for (int block = 0, made = 0; block < blocks; ++block, a0 += h0 * 64, a1 += h1 * 64) {
        Tiles::load_a0(a0);
        if (two) Tiles::load_a1(a1);
        Tiles::load_b(w + block * 2048, w + block * 2048 + 1024);
        multiply_all<Tiles, product>(two);
        for (; made < (block + 1) * next_blocks / blocks; ++made) make(panel, next + made, 1, to + made * 2048);
        pending.some();
      }
      std::byte* const used = w;
      w = to;
      to = used;
    }
    float* sums = pending.place(c + static_cast<size_t>(p) * static_cast<size_t>(rows.m) * kPanel);
    Tiles::store(sums, two);
    pending.start(panels, p, 0, rows.m, sums, all);
  }
  pending.rest();
  Tiles::release();
}

template <class Tiles, class Rescale>
void decoded(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
             std::byte* scratch, const Epilogue* epilogue, Decode decode, Rescale rescale) {
  if (rows.m <= kPair)
    return few<Tiles, Product::bf16>(
        matrix, panels, count, rows, c, scratch, epilogue,
        [&](const std::byte* panel, int first, int blocks, std::byte* to) {
          decode(matrix, panel, first, blocks, kDecodeAhead, to);
        },
        rescale);
  expanded<Tiles, Product::bf16>(
      matrix, panels, count, rows, c, scratch, epilogue, kDecodedLimits,
      [&](const std::byte* panel, int first, int blocks, std::byte* to) {
        decode(matrix, panel, first, blocks, 0, to);
      },
      rescale);
}

template <class Tiles>
void decoded(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
             std::byte* scratch, const Epilogue* epilogue, Decode decode) {
  if (!has_factors(matrix.format))
    return decoded<Tiles>(matrix, panels, count, rows, c, scratch, epilogue, decode, kDone);
  decoded<Tiles>(
      matrix, panels, count, rows, c, scratch, epilogue, decode,
      [&](const std::byte* panel, int, int height, float* sums) { multiply_by_factors(matrix, panel, height, sums); });
}

}  // namespace

void amx_bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte*, const Epilogue* epilogue) {
  bf16<HardwareTiles>(matrix, panels, count, rows, c, epilogue);
}
void amx_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte*, const Epilogue* epilogue) {
  int8<HardwareTiles>(matrix, panels, count, rows, c, epilogue);
}
void modelled_amx_bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte*, const Epilogue* epilogue) {
  bf16<ModelTiles>(matrix, panels, count, rows, c, epilogue);
}
void modelled_amx_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte*, const Epilogue* epilogue) {
  int8<ModelTiles>(matrix, panels, count, rows, c, epilogue);
}

void amx_fp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
             std::byte* scratch, const Epilogue* epilogue) {
  decoded<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_fp8);
}
void amx_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               std::byte* scratch, const Epilogue* epilogue) {
  decoded<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_mxfp4);
}
void amx_nvfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               std::byte* scratch, const Epilogue* epilogue) {
  decoded<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_nvfp4);
}
void amx_mxfp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
               std::byte* scratch, const Epilogue* epilogue) {
  decoded<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_mxfp8);
}
void modelled_amx_fp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                      std::byte* scratch, const Epilogue* epilogue) {
  decoded<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_fp8);
}
void modelled_amx_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                        float* c, std::byte* scratch, const Epilogue* epilogue) {
  decoded<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_mxfp4);
}
void modelled_amx_nvfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                        float* c, std::byte* scratch, const Epilogue* epilogue) {
  decoded<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_nvfp4);
}
void modelled_amx_mxfp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                        float* c, std::byte* scratch, const Epilogue* epilogue) {
  decoded<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue, avx512_decode_mxfp8);
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
