// AMX kernels. Tile: 32 rows x 32 outputs as 2 x 2 accumulators over blocks of 64 bytes along k, so every A and B tile
// that is loaded is used twice. Rows that do not fill a tile get a tile of fewer rows, which also makes the product
// shorter.
//
// With many rows and a long k, k is cut into slices of 16 blocks: 32 KiB of a panel's weights stay in the L1 cache
// while all rows pass by, with the hint that these are not worth keeping there, and the rows' share of a slice stays
// in the L2 cache while all panels of the call pass by. The accumulators wait in c.
//
// int4 runs on the same int8 chains: q * scale becomes a whole number of the column's level (see gemm/layout.hpp),
// which rounds by at most half a level, 1/254 of the column's largest weight. Floats of 8 and 4 bits become bf16. A
// slice of a panel is expanded once for all rows; with some rows, between the tile products of the slice before.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"
#include "gemm/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace ktinject::gemm {
namespace {

constexpr int kSlice = 16;
// Up to here, cutting k costs more, in accumulators stored and loaded, than it gains.
constexpr int kUncut = 32;
// The same for weights that are expanded first: between tile products up to so many rows, into one of two buffers; with
// more, the products of one slice take so long that expanding the next one hardly counts, and it only drives the rows
// out of the caches.
struct ExpandedLimits {
  int interleaved_rows, interleaved_uncut, uncut;
};
constexpr ExpandedLimits kInt4Limits{64, 32, 16}, kDecodedLimits{128, 64, 64};

// Complete sums of up to 32 rows: `rescale` makes them results, in place, which the epilogue, if any, takes. A few rows
// at a time between tile products, which leave the vector units idle.
template <class Rescale>
class PendingEpilogue {
 public:
  PendingEpilogue(Rescale rescale, const Epilogue* epilogue) : rescale_(rescale), epilogue_(epilogue) {}

  // Where to store sums that belong at c and are complete at once: there, or if they only pass by, in the L1 cache, in
  // one of two places, as the other may not be empty yet.
  float* place(float* c) { return epilogue_ == nullptr ? c : places_[turn_++ & 1]; }
  // The sums [count, 32] at c are of panel `index`, rows `row` ...; there are `steps` tile products to hide them
  // behind.
  void start(const std::byte* panel, int index, int row, int count, float* c, int steps) {
    rest();
    panel_ = panel, index_ = index, row_ = row, left_ = count, c_ = c;
    step_ = (count + steps - 1) / steps;
    if (step_ < kAtOnce) step_ = kAtOnce;
    const int turns = (count + step_ - 1) / step_;
    period_ = waits_ = steps > turns ? steps / turns : 1;
  }
  void some() {
    if (left_ == 0 || --waits_ > 0) return;
    waits_ = period_;
    take(left_ < step_ ? left_ : step_);
  }
  void rest() {
    if (left_ > 0) take(left_);
  }

 private:
  // One row alone would be a long chain of operations with nothing beside it.
  static constexpr int kAtOnce = 4;

  void take(int count) {
    rescale_(panel_, row_, count, c_);
    if (epilogue_ != nullptr) epilogue_->take(epilogue_->context, index_, row_, count, c_);
    row_ += count, left_ -= count, c_ += count * kPanel;
  }

  const Rescale rescale_;
  const Epilogue* const epilogue_;
  alignas(64) float places_[2][2 * kTile * kPanel];
  int turn_ = 0;
  const std::byte* panel_ = nullptr;
  int index_ = 0, row_ = 0, left_ = 0, step_ = 0, period_ = 0, waits_ = 0;
  float* c_ = nullptr;
};

constexpr int kPair = 2 * kTile;

// A slice of panel `index`: blocks `first` ... of `all`, as B tiles at w.
struct Slice {
  const std::byte* panel;
  int index;
  const std::byte* w;
  int first, blocks, all;
};

template <class Tiles, Product product>
void multiply_all(bool two) {
  Tiles::template multiply_one<product, 0>();
  Tiles::template multiply_one<product, 1>();
  if (!two) return;
  Tiles::template multiply_one<product, 2>();
  Tiles::template multiply_one<product, 3>();
}

// A block: its products; beside(), what is to be hidden behind them; and the loads of the next block. A core has few
// tiles to rename these to, and fewer where another thread shares it: with four loads first and then four products, the
// tile unit waits for the ones and the load ports for the others. `early`: one load stands among the products; with
// two, beside() finds the queues full.
template <class Tiles, Product product, class Beside>
void multiply_block(const std::byte* next_a0, const std::byte* next_a1, const std::byte* next_b, bool is_last, bool two,
                    bool early, Beside beside) {
  Tiles::template multiply_one<product, 0>();
  Tiles::template multiply_one<product, 1>();
  if (early && !is_last) Tiles::load_a0(next_a0);
  if (two) Tiles::template multiply_one<product, 2>();
  if (two) Tiles::template multiply_one<product, 3>();
  beside();
  if (is_last) return;
  if (!early) Tiles::load_a0(next_a0);
  Tiles::load_b(next_b, next_b + 1024);
  if (two) Tiles::load_a1(next_a1);
}

// Rows of the two A tiles, as configured.
struct Heights {
  int m0 = 0, m1 = 0;

  template <class Tiles>
  void configure(int h0, int h1) {
    if (h0 == m0 && h1 == m1) return;
    Tiles::configure(TileShapes(h0, h1));
    m0 = h0, m1 = h1;
  }
};

// All rows times a slice, added to the sums of its panel, c [m, 32]. `early`, beside(): see multiply_block.
template <class Tiles, Product product, class Pending, class Beside>
void multiply_slice(const Slice& slice, const PackedActivations& rows, float* c, Heights& heights, Pending& pending,
                    bool early, Beside beside) {
  const auto first = static_cast<size_t>(slice.first);
  bool is_loaded = false;
  for (int row = 0; row < rows.m; row += kPair) {
    const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
    heights.configure<Tiles>(h0, h1);
    const bool two = h1 > 0;
    const size_t block0 = static_cast<size_t>(h0) * 64, block1 = static_cast<size_t>(h1) * 64;
    const std::byte *a0 = rows.group(row) + first * block0, *a1 = rows.group(row + kTile) + first * block1;
    const std::byte* b = slice.w;
    if (!is_loaded) {
      Tiles::load_a0(a0);
      Tiles::load_b(b, b + 1024);
      if (two) Tiles::load_a1(a1);
    }
    float* sums = c + static_cast<size_t>(row) * kPanel;
    // The sums that are loaded next, which may have left the L1 cache.
    const auto* next_sums = reinterpret_cast<const char*>(sums + (h0 + h1) * kPanel);
    if (first == 0) Tiles::zero(two);
    else Tiles::load_c(sums, two);
    // A pair of as many rows follows: its first block is loaded beside the last products of this one.
    is_loaded = row + 2 * kPair <= rows.m;
    for (int block = 1; block <= slice.blocks; ++block) {
      const bool is_last = block == slice.blocks;
      a0 += block0, a1 += block1, b += 2048;
      if (is_last) {
        a0 = rows.group(row + kPair) + first * block0, a1 = rows.group(row + kPair + kTile) + first * block1;
        b = slice.w;
      }
      multiply_block<Tiles, product>(a0, a1, b, is_last && !is_loaded, two, early, [&] {
        if (first > 0)
          for (int line = 0; line < 4; ++line, next_sums += 64) _mm_prefetch(next_sums, _MM_HINT_T0);
        beside();
        pending.some();
      });
    }
    if (slice.blocks == slice.all) sums = pending.place(sums);
    Tiles::store(sums, two);
    if (slice.first + slice.blocks == slice.all)
      pending.start(slice.panel, slice.index, row, h0 + h1, sums, slice.blocks);
  }
}

// What comes next from memory, asked for a little at a time: a burst of prefetches would fill the queue of outstanding
// lines, and the loads of the present panel would wait behind it.
class Ahead {
 public:
  Ahead(const Matrix& matrix, int m) {
    const size_t lines = 2 * matrix.tile_bytes() / 64, pairs = static_cast<size_t>((m + kPair - 1) / kPair);
    bytes_ = (lines + pairs - 1) / pairs * 64;
  }
  void start(const std::byte* next) { next_ = next; }
  void some() {
    for (const std::byte* end = next_ + bytes_; next_ < end; next_ += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next_), _MM_HINT_T1);
  }

 private:
  size_t bytes_;  // of a block
  const std::byte* next_ = nullptr;
};

// c [count, m, 32], fp32 or int32 as the product accumulates. weights(panel, first, blocks) returns `blocks` blocks of
// B tiles from block `first` on; rescale: see PendingEpilogue.
template <class Tiles, Product product, class Weights, class Rescale>
void chains(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
            const Epilogue* epilogue, int slice, Weights weights, Rescale rescale) {
  PendingEpilogue<Rescale> pending(rescale, epilogue);
  const int all = matrix.blocks();
  const size_t data_block = 2 * matrix.tile_bytes(), sums = static_cast<size_t>(rows.m) * kPanel;
  Heights heights;
  Ahead ahead(matrix, rows.m);
  for (int first = 0; first < all; first += slice) {
    const int blocks = all - first < slice ? all - first : slice;
    for (int p = 0; p < count; ++p) {
      const std::byte* panel = panels + static_cast<size_t>(p) * matrix.panel_bytes();
      ahead.start((p + 1 < count ? panel + matrix.panel_bytes() + static_cast<size_t>(first) * data_block
                                 : panels + static_cast<size_t>(first + slice) * data_block) +
                  matrix.head_bytes());
      multiply_slice<Tiles, product>({panel, p, weights(panel, first, blocks), first, blocks, all}, rows,
                                     c + static_cast<size_t>(p) * sums, heights, pending, rows.m > kPair,
                                     [&] { ahead.some(); });
    }
  }
  pending.rest();
  Tiles::release();
}

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

struct Int8Scales {
  const float* rows;
  void operator()(const std::byte* panel, int row, int count, float* sums) const {
    scale_sums(int8_head(panel).scale, int8_head(panel).offset, rows + row, count, sums);
  }
};
struct Int4Scales {
  const float* rows;
  void operator()(const std::byte* panel, int row, int count, float* sums) const {
    scale_sums(int4_levels(panel), nullptr, rows + row, count, sums);
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

// Expands int4 blocks to int8 tiles: bytes are (q - zero) * scale / level, rounded. The ratio is scale / level * 2048,
// twice in each 32-bit lane; nibbles and zero are brought to 16 times their value in 16 bits, so that the rounding high
// multiply takes off exactly 2^15.
class Expand {
 public:
  explicit Expand(const Matrix& matrix) : matrix_(matrix), run_(matrix.group_size < 64 ? 4 : 8) {}

  // `streamed`: what lies kDecodeAhead bytes further on is prefetched.
  template <bool streamed>
  void run(const std::byte* panel, int first, int blocks, std::byte* to) {
    if (panel != panel_) begin(panel);
    const __m512i nibble = _mm512_set1_epi16(0xf0), lower = _mm512_set1_epi16(0xff);
    const std::byte* from = panel + matrix_.head_bytes() + static_cast<size_t>(first) * 1024;
    for (int block = first; block < first + blocks; ++block)
      for (int tile = 0; tile < 2; ++tile)
        for (int start = 0; start < 8; start += run_) {
          const int group = (block * 64 + start * 8) / matrix_.group_size;
          const __m512i ratio = ratio_of(group, tile), zero = zero_of(group, tile);
          auto scaled = [&](__m512i q) {
            return _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_and_si512(q, nibble), zero), ratio);
          };
          auto merged = [&](__m512i even, __m512i odd) {
            constexpr int kThirdChooses = 0xe4;  // c ? a : b, bit by bit
            return _mm512_ternarylogic_epi32(even, _mm512_slli_epi16(odd, 8), lower, kThirdChooses);
          };
          for (int row = 0; row < run_; ++row, from += 64, to += 128) {
            if constexpr (streamed) _mm_prefetch(reinterpret_cast<const char*>(from + kDecodeAhead), _MM_HINT_T0);
            const __m512i pair = _mm512_load_si512(from);
            _mm512_store_si512(to, merged(scaled(_mm512_slli_epi16(pair, 4)), scaled(_mm512_srli_epi16(pair, 4))));
            _mm512_store_si512(to + 64, merged(scaled(pair), scaled(_mm512_srli_epi16(pair, 8))));
          }
        }
  }

 private:
  void begin(const std::byte* panel) {
    panel_ = panel;
    for (int tile = 0; tile < 2; ++tile) {
      const __m512 level = _mm512_loadu_ps(int4_levels(panel) + tile * kTile);
      // Columns of zeros; and so small ones that the quotient might overflow count as such.
      const __mmask16 used = _mm512_cmp_ps_mask(level, _mm512_set1_ps(0x1p-110f), _CMP_GT_OQ);
      inverse_[tile] = _mm512_maskz_div_ps(used, _mm512_set1_ps(2048.0f), level);
    }
  }
  __m512i ratio_of(int group, int tile) const {
    const auto* scales = reinterpret_cast<const __m256i*>(int4_scales(panel_) + group * kPanel + tile * kTile);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(scales)), 16));
    return twice(_mm512_and_si512(_mm512_cvtps_epi32(_mm512_mul_ps(scale, inverse_[tile])), _mm512_set1_epi32(0xffff)));
  }
  __m512i zero_of(int group, int tile) const {
    if (matrix_.symmetric) return _mm512_set1_epi16(8 * 16);
    const uint8_t* zeros = int4_zeros(matrix_, panel_) + group * kPanel + tile * kTile;
    const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
    return _mm512_slli_epi16(twice(zero), 4);
  }
  static __m512i twice(__m512i low) { return _mm512_or_si512(low, _mm512_slli_epi32(low, 16)); }

  const Matrix& matrix_;
  const int run_;  // rows of a block that share a scale
  const std::byte* panel_ = nullptr;
  __m512 inverse_[2];
};

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

template <class Tiles>
void int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
          std::byte* scratch, const Epilogue* epilogue) {
  Expand expand(matrix);
  if (rows.m <= kPair)
    return few<Tiles, Product::signed_signed>(
        matrix, panels, count, rows, c, scratch, epilogue,
        [&](const std::byte* panel, int first, int blocks, std::byte* to) {
          expand.run<true>(panel, first, blocks, to);
        },
        Int4Scales{rows.scale});
  expanded<Tiles, Product::signed_signed>(
      matrix, panels, count, rows, c, scratch, epilogue, kInt4Limits,
      [&](const std::byte* panel, int first, int blocks, std::byte* to) {
        expand.run<false>(panel, first, blocks, to);
      },
      Int4Scales{rows.scale});
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
void amx_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch, const Epilogue* epilogue) {
  int4<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue);
}
void modelled_amx_bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte*, const Epilogue* epilogue) {
  bf16<ModelTiles>(matrix, panels, count, rows, c, epilogue);
}
void modelled_amx_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte*, const Epilogue* epilogue) {
  int8<ModelTiles>(matrix, panels, count, rows, c, epilogue);
}
void modelled_amx_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte* scratch, const Epilogue* epilogue) {
  int4<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue);
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
