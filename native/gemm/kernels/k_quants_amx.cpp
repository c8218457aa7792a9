// K-quants with AMX, for many rows. A code times its run's s is a whole number, so the tile unit adds up a block of 256
// inputs as integers, exactly, and a run needs nothing of its own. Where the number does not fit a byte, it becomes
// two, for two tiles:
//
//   q2_k          s * q         one byte, up to 45
//   q3_k          s * (4 - q)   one byte, -128 ... 124; its negative would not fit, so d is negated in its place
//   q4_k, q5_k    8 * (s / 8 * q) + s % 8 * q   bytes of up to 217: two 16-bit multiplications for all four inputs
//   q6_k, iq4_xs  s * (q - zero) = 128 * high + low, low 0 ... 127
//
// The sum of a block is finished as the AVX2 kernel does it, so the results are the same bits. That, and making the
// tiles of the next block, is done a little at a time between tile products, which leave the vector units idle.
//
// The codes of q8_0 are bytes, and its tiles lie in the packed weights. Each run has d of its own: a product is of 32
// inputs, half as long as a tile can be, and its sums are multiplied between the products of the next block.
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "gemm/backends.hpp"
#include "gemm/k_quants.hpp"
#include "gemm/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

namespace ktinject::gemm {
namespace {

#include "gemm/kernels/k_quants.inl"
#include "gemm/kernels/k_quants_avx512.inl"

// Tiles of a byte of its own for each weight, or of two; and what the first of the two counts, as a power of two.
constexpr int parts(Format format) { return format == Format::q2_k || format == Format::q3_k ? 1 : 2; }
constexpr int part_shift(Format format) { return format == Format::q4_k || format == Format::q5_k ? 3 : 7; }
constexpr bool is_unsigned(Format format) { return k_quant(format).has_min; }

// For codes of a run: s in the 16-bit lanes of each output, brought to the form that times() wants.
template <Format kFormat>
class RunScale {
 public:
  // s: of two runs in each 32-bit lane; which: 0 or 1.
  RunScale(__m512i s, int which) {
    const int low = 2 * which, high = low + 1;
    const __m512i both = at(s, low | high << 8 | low << 16 | high << 24);
    if constexpr (parts(kFormat) == 1 && is_unsigned(kFormat)) {
      first_ = both;
    } else if constexpr (kFormat == Format::q3_k) {
      const __m512i negative = _mm512_srai_epi16(both, 15), size = _mm512_abs_epi16(both);
      const __m512i three = _mm512_add_epi16(size, _mm512_add_epi16(size, size));
      first_ = size;
      flip_ = _mm512_andnot_si512(negative, _mm512_set1_epi8(7));
      less_ = _mm512_mullo_epi16(_mm512_add_epi16(three, _mm512_and_si512(negative, size)), _mm512_set1_epi16(0x0101));
    } else if constexpr (is_unsigned(kFormat)) {
      first_ = _mm512_and_si512(both, _mm512_set1_epi16(7));
      second_ = _mm512_srli_epi16(both, 3);
    } else {
      constexpr int kNone = 0x80;
      first_ = at(s, low | kNone << 8 | low << 16 | kNone << 24);
      second_ = at(s, kNone | low << 8 | kNone << 16 | low << 24);
      less_ = _mm512_slli_epi16(both, kFormat == Format::iq4_xs ? 7 : 5);
    }
  }

  // Bytes of one tile, or of two that lie 1 KiB apart.
  KTINJECT_INLINE void times(__m512i codes, std::byte* to) const {
    if constexpr (kFormat == Format::q3_k) {
      codes = _mm512_xor_si512(codes, flip_);
      _mm512_store_si512(to, _mm512_sub_epi8(_mm512_mullo_epi16(codes, first_), less_));
    } else if constexpr (is_unsigned(kFormat)) {
      // The product of the lower byte stays below 256.
      _mm512_store_si512(to, _mm512_mullo_epi16(codes, first_));
      if constexpr (parts(kFormat) == 2) _mm512_store_si512(to + 1024, _mm512_mullo_epi16(codes, second_));
    } else {
      const __m512i even = _mm512_sub_epi16(_mm512_maddubs_epi16(codes, first_), less_);
      const __m512i odd = _mm512_sub_epi16(_mm512_maddubs_epi16(codes, second_), less_);
      _mm512_store_si512(to, _mm512_and_si512(merged(even, _mm512_slli_epi16(odd, 8)), _mm512_set1_epi8(0x7f)));
      _mm512_store_si512(to + 1024, merged(_mm512_srli_epi16(even, 7), _mm512_slli_epi16(odd, 1)));
    }
  }

 private:
  static_assert(k_quant(Format::q6_k).zero == 1 << 5 && kIq4Offset == 1 << 7);

  // Four bytes of each 32-bit lane.
  static __m512i at(__m512i s, uint32_t which) {
    const __m128i lanes = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c);
    return _mm512_shuffle_epi8(s, _mm512_broadcast_i32x4(_mm_add_epi8(lanes, _mm_set1_epi32(static_cast<int>(which)))));
  }
  // The lower byte of each lane of `even` and the upper one of `odd`.
  static __m512i merged(__m512i even, __m512i odd) {
    constexpr int kThirdChooses = 0xe4;  // c ? a : b, bit by bit
    return _mm512_ternarylogic_epi32(even, odd, _mm512_set1_epi16(0xff), kThirdChooses);
  }

  __m512i first_, second_, flip_, less_;
};

// The B tiles of a block: four pairs for the first output tile and the second one (two parts), or four of both.
constexpr size_t tiles_bytes(Format format) { return 8192 * static_cast<size_t>(parts(format)); }

// Quads of 32 inputs from kFirst on.
template <Format kFormat, int kFirst, int... kAt>
KTINJECT_INLINE void expand_run(const KTile<kFormat>& tile, int chunk, const RunScale<kFormat>& scale, std::byte* to,
                                std::integer_sequence<int, kAt...>) {
  const int step = chunk / 2;
  to += parts(kFormat) == 2 ? (tile.tile * 4 + step) * 2048 : step * 2048 + tile.tile * 1024;
  to += chunk % 2 * 512;
  (scale.times(codes_of<kFormat, kFirst + kAt>(tile.codes(chunk)), to + (kFirst + kAt) * 64), ...);
}

// A block's tiles are made in units: two runs of an output tile.
template <Format kFormat>
constexpr int kUnits = 2 * KTile<kFormat>::kPairs;

template <Format kFormat>
void expand(const std::byte* block, int unit, std::byte* to) {
  const int pair = unit / 2;
  const KTile<kFormat> tile{block, unit % 2};
  const __m512i s = scales(tile, pair);
  const RunScale<kFormat> first(s, 0), second(s, 1);
  if constexpr (k_quant(kFormat).run == 32) {
    tile.prefetch(2 * pair), tile.prefetch(2 * pair + 1);
    expand_run<kFormat, 0>(tile, 2 * pair, first, to, std::make_integer_sequence<int, 8>());
    expand_run<kFormat, 0>(tile, 2 * pair + 1, second, to, std::make_integer_sequence<int, 8>());
  } else {
    tile.prefetch(pair);
    expand_run<kFormat, 0>(tile, pair, first, to, std::make_integer_sequence<int, 4>());
    expand_run<kFormat, 4>(tile, pair, second, to, std::make_integer_sequence<int, 4>());
  }
}

// Results of a block and up to 32 rows, from the sums of its tiles.
template <Format kFormat>
class BlockSums {
  using Tile = KTile<kFormat>;
  static constexpr KQuant kKind = Tile::kKind;
  static constexpr int kParts = parts(kFormat);

 public:
  // What all rows of a block need, outside of the packed weights.
  struct Head {
    alignas(64) float d[kPanel], m[kPanel];
    alignas(64) int16_t t[2][Tile::kPairs][kPanel];
    bool adds;     // to what is there
    bool is_last;  // of its panel

    void read(const std::byte* block) {
      for (int side = 0; side < 2; ++side) {
        const Tile tile{block, side};
        const __m512 scale = _mm512_cvtph_ps(load_half(tile.d()));
        _mm512_store_ps(d + side * kTile, kFormat == Format::q3_k ? _mm512_sub_ps(_mm512_setzero_ps(), scale) : scale);
        if constexpr (kKind.has_min) {
          _mm512_store_ps(m + side * kTile, _mm512_cvtph_ps(load_half(tile.m())));
          for (int pair = 0; pair < Tile::kPairs; ++pair) _mm512_store_si512(t[side][pair], minima(tile, pair));
        }
      }
    }
  };

  BlockSums(const PackedActivations& rows, int blocks, int groups, const Epilogue* epilogue)
      : rows_(rows), blocks_(blocks), groups_(groups), epilogue_(epilogue) {}

  // Where to store the sums of a block's tiles: [part or output tile][32 rows][32].
  int32_t* place() { return places_[turn_ ^= 1]; }

  // The sums at the last place() are of block `block` of panel `panel`, rows `row` ...; c [count, 32]; there are
  // `steps` tile products to hide them behind.
  void start(const Head& head, int panel, int block, int row, int count, float* c, int steps) {
    rest();
    head_ = &head, panel_ = panel, block_ = block, row_ = row, c_ = c;
    at_ = 0, count_ = count, step_ = std::max(kAtOnce, (count + steps - 1) / steps);
    sums_ = places_[turn_];
    if constexpr (kKind.has_min)
      for (int i = 0; i < count; ++i) pack_sums(i);
  }
  void some() {
    if (at_ < count_) take(std::min(step_, count_ - at_));
  }
  void rest() {
    if (at_ < count_) take(count_ - at_);
  }

 private:
  // One row alone would be a long chain of operations with nothing beside it.
  static constexpr int kAtOnce = 4;

  // The sums of the activations of all runs, as 16-bit lanes.
  void pack_sums(int i) {
    const int32_t* from =
        rows_.group_sum + static_cast<size_t>(row_ + i) * static_cast<size_t>(groups_) + block_ * Tile::kRuns;
    if constexpr (Tile::kRuns == 8)
      _mm_store_si128(reinterpret_cast<__m128i*>(pairs_[i]),
                      _mm256_cvtepi32_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
    else _mm256_store_si256(reinterpret_cast<__m256i*>(pairs_[i]), _mm512_cvtepi32_epi16(_mm512_loadu_si512(from)));
  }

  void take(int count) {
    for (int side = 0; side < 2; ++side) take(side, count);
    if (head_->is_last && epilogue_ != nullptr)
      epilogue_->take(epilogue_->context, panel_, row_ + at_, count, c_ + at_ * kPanel);
    at_ += count;
  }
  void take(int side, int count) {
    const __m512 d = _mm512_load_ps(head_->d + side * kTile);
    [[maybe_unused]] const __m512 m = kKind.has_min ? _mm512_load_ps(head_->m + side * kTile) : d;
    const float* scale = rows_.scale + static_cast<size_t>(row_) * static_cast<size_t>(blocks_) + block_;
    for (int i = at_; i < at_ + count; ++i) {
      const __m512i sum = sum_of(i, side);
      __m512 value = _mm512_mul_ps(d, _mm512_cvtepi32_ps(sum));
      if constexpr (kKind.has_min) {
        __m512i less = _mm512_setzero_si512();
        for (int pair = 0; pair < Tile::kPairs; ++pair)
          less = _mm512_dpwssd_epi32(less, _mm512_load_si512(head_->t[side][pair]), _mm512_set1_epi32(pairs_[i][pair]));
        value = _mm512_fnmadd_ps(m, _mm512_cvtepi32_ps(less), value);
      }
      float* to = c_ + i * kPanel + side * kTile;
      const __m512 by = _mm512_set1_ps(scale[static_cast<size_t>(i) * static_cast<size_t>(blocks_)]);
      _mm512_store_ps(to, head_->adds ? _mm512_fmadd_ps(by, value, _mm512_load_ps(to)) : _mm512_mul_ps(by, value));
    }
  }
  __m512i sum_of(int i, int side) const {
    if constexpr (kParts == 1) return _mm512_load_si512(sums_ + i * kPanel + side * kTile);
    const int32_t* sums = sums_ + (side * kPanel + i) * kPanel;
    const __m512i low = _mm512_load_si512(sums), high = _mm512_load_si512(sums + kTile);
    return _mm512_add_epi32(low, _mm512_slli_epi32(high, part_shift(kFormat)));
  }

  const PackedActivations& rows_;
  const int blocks_, groups_;
  const Epilogue* const epilogue_;
  alignas(64) int32_t places_[2][kParts * kPanel * kPanel];
  alignas(64) int32_t pairs_[kPanel][Tile::kPairs];
  int turn_ = 0;
  const int32_t* sums_ = nullptr;
  const Head* head_ = nullptr;
  int panel_ = 0, block_ = 0, row_ = 0, at_ = 0, count_ = 0, step_ = 0;
  float* c_ = nullptr;
};

template <class Tiles, Format kFormat>
void multiply_tiles(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                    std::byte* scratch, const Epilogue* epilogue) {
  using Sums = BlockSums<kFormat>;
  constexpr int kParts = parts(kFormat), kProducts = 4 * kParts;
  constexpr auto product = is_unsigned(kFormat) ? Tiles::signed_unsigned : Tiles::signed_signed;
  const int blocks = matrix.blocks(), places = blocks * count, pairs = (rows.m + kPanel - 1) / kPanel;
  // Panels follow each other without heads between them.
  auto block_at = [&](int place) { return panels + static_cast<size_t>(place) * KTile<kFormat>::kBytes; };
  std::byte* buffers[2] = {scratch, scratch + tiles_bytes(kFormat)};
  typename Sums::Head heads[2];
  Sums sums(rows, blocks, matrix.groups(), epilogue);
  for (int unit = 0; unit < kUnits<kFormat>; ++unit) expand<kFormat>(panels, unit, buffers[0]);
  int m0 = 0, m1 = 0;
  for (int place = 0; place < places; ++place) {
    const int block = place % blocks, panel = place / blocks, units = place + 1 < places ? kUnits<kFormat> : 0;
    const std::byte* w = buffers[place % 2];
    std::byte* to = buffers[1 - place % 2];
    auto& head = heads[place % 2];
    head.read(block_at(place));
    head.adds = block > 0, head.is_last = block + 1 == blocks;
    float* results = c + static_cast<size_t>(panel) * static_cast<size_t>(rows.m) * kPanel;
    // Units of the next block, over all products of this one.
    int made = 0, due = 0;
    for (int row = 0; row < rows.m; row += kPanel) {
      const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
      if (h0 != m0 || h1 != m1) {
        Tiles::configure(TileShapes(h0, h1));
        m0 = h0, m1 = h1;
      }
      const bool two = h1 > 0;
      const std::byte* a0 = rows.group(row) + static_cast<size_t>(block) * 4 * static_cast<size_t>(h0) * 64;
      const std::byte* a1 = rows.group(row + kTile) + static_cast<size_t>(block) * 4 * static_cast<size_t>(h1) * 64;
      int32_t* at = sums.place();
      for (int part = 0; part < kParts; ++part) {
        Tiles::zero(two);
        for (int step = 0; step < 4; ++step) {
          Tiles::load_a0(a0 + step * h0 * 64);
          if (two) Tiles::load_a1(a1 + step * h1 * 64);
          const std::byte* b = w + (part * 4 + step) * 2048;
          Tiles::load_b(b, b + 1024);
          product(two);
          due += units;
          for (; due >= pairs * kProducts; due -= pairs * kProducts, ++made)
            expand<kFormat>(block_at(place + 1), made, to);
          sums.some();
        }
        Tiles::store(at + part * kPanel * kPanel, two);
      }
      sums.start(head, panel, block, row, h0 + h1, results + row * kPanel, kProducts);
    }
  }
  sums.rest();
  Tiles::release();
}

// Results of a block of q8_0 and up to 32 rows, from the sums of its runs.
class RunSums {
  using Tile = KTile<Format::q8_0>;
  static constexpr int kOfRun = kPanel * kPanel;

 public:
  static constexpr size_t kBytes = 2 * Tile::kRuns * kOfRun * sizeof(int32_t);

  // scratch: kBytes
  RunSums(const PackedActivations& rows, int blocks, std::byte* scratch, const Epilogue* epilogue)
      : rows_(rows), blocks_(blocks), places_(reinterpret_cast<int32_t*>(scratch)), epilogue_(epilogue) {}

  // Where to store the sums of run `run`: [32 rows][32].
  int32_t* place(int run) const { return places_ + ((turn_ ^ 1) * Tile::kRuns + run) * kOfRun; }

  // The sums at place() are of block `block` of panel `panel`, whose bytes are at `data`, and of rows `row` ...;
  // c [count, 32].
  void start(const std::byte* data, int panel, int block, int row, int count, float* c) {
    rest();
    turn_ ^= 1;
    data_ = data, panel_ = panel, block_ = block, row_ = row, count_ = count, c_ = c, at_ = 0;
  }
  void some() { take(std::min(kAtOnce, count_ - at_)); }
  void rest() { take(count_ - at_); }

 private:
  // A quarter of all: there are four products to hide them behind.
  static constexpr int kAtOnce = kPanel / Tile::kRuns;

  void take(int count) {
    if (count <= 0) return;
    for (int side = 0; side < 2; ++side) take(side, count);
    if (block_ + 1 == blocks_ && epilogue_ != nullptr)
      epilogue_->take(epilogue_->context, panel_, row_ + at_, count, c_ + at_ * kPanel);
    at_ += count;
  }
  void take(int side, int count) const {
    const Tile tile{data_, side};
    __m512 d[Tile::kRuns];
    for (int run = 0; run < Tile::kRuns; ++run) d[run] = _mm512_cvtph_ps(load_half(tile.d(run)));
    const float* scale = rows_.scale + static_cast<size_t>(row_) * static_cast<size_t>(blocks_) + block_;
    for (int i = at_; i < at_ + count; ++i) {
      const int32_t* sums = places_ + turn_ * Tile::kRuns * kOfRun + i * kPanel + side * kTile;
      __m512 value = _mm512_setzero_ps();
      for (int run = 0; run < Tile::kRuns; ++run)
        value = _mm512_fmadd_ps(d[run], _mm512_cvtepi32_ps(_mm512_load_si512(sums + run * kOfRun)), value);
      float* to = c_ + i * kPanel + side * kTile;
      const __m512 by = _mm512_set1_ps(scale[static_cast<size_t>(i) * static_cast<size_t>(blocks_)]);
      _mm512_store_ps(to, block_ > 0 ? _mm512_fmadd_ps(by, value, _mm512_load_ps(to)) : _mm512_mul_ps(by, value));
    }
  }

  const PackedActivations& rows_;
  const int blocks_;
  int32_t* const places_;
  const Epilogue* const epilogue_;
  const std::byte* data_ = nullptr;
  int turn_ = 0, panel_ = 0, block_ = 0, row_ = 0, at_ = 0, count_ = 0;
  float* c_ = nullptr;
};

template <class Tiles>
void multiply_q8_tiles(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte* scratch, const Epilogue* epilogue) {
  using Tile = KTile<Format::q8_0>;
  const int blocks = matrix.blocks();
  RunSums sums(rows, blocks, scratch, epilogue);
  int m0 = 0, m1 = 0;
  for (int panel = 0; panel < count; ++panel, c += static_cast<size_t>(rows.m) * kPanel)
    for (int block = 0; block < blocks; ++block, panels += Tile::kBytes) {
      const Tile tiles[2] = {{panels, 0}, {panels, 1}};
      for (const Tile& tile : tiles) unpack(tile, nullptr);
      for (int row = 0; row < rows.m; row += kPanel) {
        const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
        if (h0 != m0 || h1 != m1) {
          Tiles::configure(TileShapes(h0, h1, 32));
          m0 = h0, m1 = h1;
        }
        const bool two = h1 > 0;
        const size_t first = static_cast<size_t>(block) * (Tile::kInputs / 64);  // of 64 inputs
        for (int run = 0; run < Tile::kRuns; ++run) {
          const size_t step = first + static_cast<size_t>(run / 2);
          const int within = run % 2 * 32;
          Tiles::zero(two);
          Tiles::load_a0(rows.group(row) + step * static_cast<size_t>(h0) * 64 + within);
          if (two) Tiles::load_a1(rows.group(row + kTile) + step * static_cast<size_t>(h1) * 64 + within);
          Tiles::load_b(tiles[0].codes(run), tiles[1].codes(run));
          Tiles::signed_signed(two);
          sums.some();
          Tiles::store(sums.place(run), two);
        }
        sums.start(panels, panel, block, row, h0 + h1, c + row * kPanel);
      }
    }
  sums.rest();
  Tiles::release();
}

}  // namespace

#define KTINJECT_K_QUANT_TILES(BACKEND, TILES, FORMAT)                                                             \
  void BACKEND##_##FORMAT(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, \
                          float* c, std::byte* scratch, const Epilogue* epilogue) {                                \
    multiply_tiles<TILES, Format::FORMAT>(matrix, panels, count, rows, c, scratch, epilogue);                      \
  }
#define KTINJECT_K_QUANTS_TILES(BACKEND, TILES) \
  KTINJECT_K_QUANT_TILES(BACKEND, TILES, q2_k)  \
  KTINJECT_K_QUANT_TILES(BACKEND, TILES, q3_k)  \
  KTINJECT_K_QUANT_TILES(BACKEND, TILES, q4_k)  \
  KTINJECT_K_QUANT_TILES(BACKEND, TILES, q5_k)  \
  KTINJECT_K_QUANT_TILES(BACKEND, TILES, q6_k)  \
  KTINJECT_K_QUANT_TILES(BACKEND, TILES, iq4_xs)
KTINJECT_K_QUANTS_TILES(amx, HardwareTiles)
KTINJECT_K_QUANTS_TILES(modelled_amx, ModelTiles)

void amx_q8_0(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch, const Epilogue* epilogue) {
  multiply_q8_tiles<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue);
}
void modelled_amx_q8_0(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte* scratch, const Epilogue* epilogue) {
  multiply_q8_tiles<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue);
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
