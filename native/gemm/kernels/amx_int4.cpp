// The AMX kernel of int4, on the int8 chains of amx_chains.inl: q * scale becomes a whole number of the column's level
// (see gemm/layout.hpp), which rounds by at most half a level, 1/254 of the column's largest weight. A slice of a panel
// is expanded once for all rows; with up to kMostWoven, between the tile products of the slice before.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"
#include "gemm/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace ktinject::gemm {
namespace {

#include "gemm/kernels/amx_chains.inl"

// Up to so many rows, a slice is expanded between the products of the one before; with more, these take so long that
// expanding hardly counts.
constexpr int kMostWoven = 128;

struct Int4Scales {
  const float* rows;
  void operator()(const std::byte* panel, int row, int count, float* sums) const {
    scale_sums(int4_levels(panel), nullptr, rows + row, count, sums);
  }
};

// Expands int4 blocks to int8 tiles: bytes are (q - zero) * scale / level, rounded. The ratio is scale / level * 2048,
// twice in each 32-bit lane; a scale may be negative. In 16 bits, 16 times a nibble less its zero lets the rounding
// high multiply take off exactly 2^15: the result is the lower byte. A nibble in the upper four bits, with a zero of 8,
// is 4096 times its value once its highest bit is turned, so the same multiply rounds to 1/256 of a level, and with
// half a level added the upper byte is the result. So there is nothing to shift, neither before nor after.
//
// A block is expanded in parts, of each tile the upper and the lower half, one after the other from where start() says.
// `streamed`: what lies kDecodeAhead bytes further on is prefetched.
constexpr int kParts = 4;

template <bool streamed>
class Expand {
 public:
  explicit Expand(const Matrix& matrix)
      : matrix_(matrix),
        data_at_(matrix.head_bytes()),
        group_shift_(__builtin_ctz(static_cast<unsigned>(matrix.group_size / 32))) {
    lower_nibble_ = _mm512_set1_epi16(0xf0);
    upper_nibble_ = _mm512_set1_epi16(static_cast<short>(0xf000));
    lower_byte_ = _mm512_set1_epi16(0xff);
    highest_bit_ = _mm512_set1_epi16(static_cast<short>(0x8000));
    half_ = _mm512_set1_epi16(128);
  }

  void start(const std::byte* panel, int block, std::byte* to) {
    if (panel != panel_) begin(panel);
    from_ = panel + data_at_ + static_cast<size_t>(block) * 1024;
    to_ = to;
    part_ = static_cast<unsigned>(block) * kParts;
  }
  // A part; not inline, as it is called at several places.
  __attribute__((noinline)) void next() { advance(); }
  void blocks(int count) {
    for (int i = 0; i < count * kParts; ++i) advance();
  }

 private:
  void advance() {
    const unsigned tile = part_ / 2 % 2, group = (part_ / kParts * 2 + part_ % 2) >> group_shift_;
    if (steps_[tile].group != group) set_steps(group, tile);
    const std::byte* const from = from_;
    std::byte* const to = to_;
    from_ = from + 256;
    ++part_;
    to_ = to + 512;
    if (matrix_.symmetric) expand<true>(steps_[tile], from, to);
    else expand<false>(steps_[tile], from, to);
  }
  // Of a group of a tile.
  struct Steps {
    unsigned group = ~0u;
    __m512i ratio, zero;  // zero: 16 times that
  };

  template <bool symmetric>
  __attribute__((always_inline)) void expand(const Steps& steps, const std::byte* from, std::byte* to) const {
    // Copies, which stores of bytes leave in their registers.
    const __m512i lower_nibble = lower_nibble_, upper_nibble = upper_nibble_, lower_byte = lower_byte_;
    const __m512i highest_bit = highest_bit_, half = half_, ratio = steps.ratio, zero = steps.zero;
    auto lower = [&](__m512i q) {
      return _mm512_mulhrs_epi16(_mm512_sub_epi16(_mm512_and_si512(q, lower_nibble), zero), ratio);
    };
    auto upper = [&](__m512i q) {
      constexpr int kAndThenXor = 0x6a;  // (a & b) ^ c
      if constexpr (symmetric)
        return _mm512_add_epi16(
            _mm512_mulhrs_epi16(_mm512_ternarylogic_epi32(q, upper_nibble, highest_bit, kAndThenXor), ratio), half);
      else return _mm512_slli_epi16(lower(_mm512_srli_epi16(q, 8)), 8);
    };
    auto both = [&](__m512i q) {
      constexpr int kThirdChooses = 0xe4;  // c ? a : b, bit by bit
      return _mm512_ternarylogic_epi32(lower(q), upper(q), lower_byte, kThirdChooses);
    };
#pragma GCC unroll 4
    for (int row = 0; row < 4; ++row, from += 64, to += 128) {
      if constexpr (streamed) _mm_prefetch(reinterpret_cast<const char*>(from + kDecodeAhead), _MM_HINT_T0);
      const __m512i pair = _mm512_load_si512(from);
      _mm512_store_si512(to, both(_mm512_slli_epi16(pair, 4)));
      _mm512_store_si512(to + 64, both(pair));
    }
  }
  void begin(const std::byte* panel) {
    panel_ = panel;
    for (int tile = 0; tile < 2; ++tile) {
      const __m512 level = _mm512_loadu_ps(int4_levels(panel) + tile * kTile);
      // Columns of zeros; and so small ones that the quotient might overflow count as such.
      const __mmask16 used = _mm512_cmp_ps_mask(level, _mm512_set1_ps(0x1p-110f), _CMP_GT_OQ);
      inverse_[tile] = _mm512_maskz_div_ps(used, _mm512_set1_ps(2048.0f), level);
      steps_[tile].group = ~0u;
    }
  }
  __attribute__((noinline)) void set_steps(unsigned group, unsigned tile) {
    Steps& steps = steps_[tile];
    steps.group = group;
    steps.ratio = ratio_of(group, tile);
    steps.zero = zero_of(group, tile);
  }
  __m512i ratio_of(unsigned group, unsigned tile) const {
    const auto* scales = reinterpret_cast<const __m256i*>(int4_scales(panel_) + group * kPanel + tile * kTile);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(scales)), 16));
    return twice(_mm512_and_si512(_mm512_cvtps_epi32(_mm512_mul_ps(scale, inverse_[tile])), _mm512_set1_epi32(0xffff)));
  }
  __m512i zero_of(unsigned group, unsigned tile) const {
    if (matrix_.symmetric) return _mm512_set1_epi16(8 * 16);
    const uint8_t* zeros = int4_zeros(matrix_, panel_) + group * kPanel + tile * kTile;
    const __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)));
    return _mm512_slli_epi16(twice(zero), 4);
  }
  static __m512i twice(__m512i low) { return _mm512_or_si512(low, _mm512_slli_epi32(low, 16)); }

  const Matrix& matrix_;
  const size_t data_at_;
  const int group_shift_;  // of parts of 32 inputs
  const std::byte* from_ = nullptr;
  unsigned part_ = 0;  // from the panel's first block
  std::byte* to_ = nullptr;
  // From memory: as constants they would take a vector port.
  __m512i lower_nibble_, upper_nibble_, lower_byte_, highest_bit_, half_;
  const std::byte* panel_ = nullptr;
  __m512 inverse_[2];
  Steps steps_[2];
};

// The slices of panels in the order in which they are expanded and multiplied. Up to 32 rows never leave the
// accumulators: panel by panel. With more, slice by slice, so that the rows' share of one stays in the L2 cache.
struct Places {
  struct Place {
    int index, first, blocks;  // of a panel its blocks `first` ...; past the last place there are none
    const std::byte* panel;
  };
  Places(const Matrix& matrix, const std::byte* panels, int count, int slice, bool by_panel)
      : matrix(matrix),
        panels(panels),
        panel_bytes(matrix.panel_bytes()),
        count(count),
        all(matrix.blocks()),
        slice(slice),
        by_panel(by_panel) {}

  const Matrix& matrix;
  const std::byte* const panels;
  const size_t panel_bytes;     // which takes divisions to find
  const int count, all, slice;  // panels; blocks of one
  const bool by_panel;

  Place first() const { return at(0, 0); }
  Place after(const Place& place) const {
    const bool is_last = by_panel ? place.first + slice >= all : place.index + 1 == count;
    if (by_panel) return is_last ? at(place.index + 1, 0) : at(place.index, place.first + slice);
    return is_last ? at(0, place.first + slice) : at(place.index + 1, place.first);
  }

 private:
  Place at(int index, int first) const {
    const int left = index < count ? all - first : 0;
    return {index, first,
            left < 0       ? 0
            : left < slice ? left
                           : slice,
            panels + static_cast<size_t>(index) * panel_bytes};
  }
};

// A block whose tiles are loaded: its products, with beside() after each; and the loads of the next block, each as soon
// as its tile is free. While the tile unit works, one of the two vector ports is left, and a core has few tiles to
// rename these to: what follows all of a block's loads and products is done after them, not beside them.
template <class Tiles, class Beside>
void multiply_woven(const std::byte* next_a0, const std::byte* next_a1, const std::byte* next_b, bool is_last, bool two,
                    Beside beside) {
  Tiles::template multiply_one<Product::signed_signed, 0>();
  beside();
  Tiles::template multiply_one<Product::signed_signed, 1>();
  beside();
  if (!is_last) Tiles::load_a0(next_a0);
  if (two) Tiles::template multiply_one<Product::signed_signed, 2>();
  beside();
  if (!is_last) Tiles::load_b0(next_b);
  if (two) Tiles::template multiply_one<Product::signed_signed, 3>();
  beside();
  if (is_last) return;
  Tiles::load_b1(next_b + 1024);
  if (two) Tiles::load_a1(next_a1);
}

template <class Tiles>
void load_block(const std::byte* a0, const std::byte* a1, const std::byte* b, bool two) {
  Tiles::load_a0(a0);
  if (two) Tiles::load_a1(a1);
  Tiles::load_b(b, b + 1024);
}

// chains() for weights that are expanded: the place that comes next is, a part at a time, between the tile products of
// this one, which leave the vector units idle; the one after that is on its way from memory.
template <class Tiles, bool streamed>
void woven(const Places& places, const PackedActivations& rows, float* c, std::byte* scratch, const Epilogue* epilogue,
           const Int4Scales& scales) {
  PendingEpilogue<Int4Scales> pending(scales, epilogue);
  Expand<streamed> expand(places.matrix);
  const Matrix& matrix = places.matrix;
  const size_t data_at = matrix.head_bytes(), data_block = 2 * matrix.tile_bytes();
  const int all = places.all, pairs = (rows.m + kPair - 1) / kPair;
  const bool stays = places.by_panel || all <= places.slice;  // in the accumulators
  std::byte* w = scratch;
  std::byte* to = scratch + static_cast<size_t>(places.slice) * 2048;
  Places::Place place = places.first(), next = places.after(place);
  expand.start(place.panel, place.first, w);
  expand.blocks(place.blocks);
  Heights heights;
  Ahead ahead(matrix, rows.m);
  bool is_loaded = false;
  for (; place.blocks > 0; place = next, next = places.after(next)) {
    const int first = place.first, blocks = place.blocks;
    if (!places.by_panel) {
      const Places::Place later = places.after(next);
      ahead.start(later.panel + data_at + static_cast<size_t>(later.first) * data_block);
    }
    if (next.blocks > 0) expand.start(next.panel, next.first, to);
    const int parts = next.blocks * kParts, steps = pairs * blocks * kParts;
    int due = 0;
    auto beside = [&] {
      for (due += parts; due >= steps; due -= steps) expand.next();
    };
    for (int row = 0; row < rows.m; row += kPair) {
      const int h0 = rows.group_rows(row), h1 = row + kTile < rows.m ? rows.group_rows(row + kTile) : 0;
      heights.configure<Tiles>(h0, h1);
      const bool two = h1 > 0, is_last_pair = row + kPair >= rows.m;
      const size_t block0 = static_cast<size_t>(h0) * 64, block1 = static_cast<size_t>(h1) * 64;
      const std::byte *a0 = rows.group(row) + static_cast<size_t>(first) * block0,
                      *a1 = rows.group(row + kTile) + static_cast<size_t>(first) * block1, *b = w;
      if (!is_loaded) load_block<Tiles>(a0, a1, b, two);
      float* sums =
          c + (static_cast<size_t>(place.index) * static_cast<size_t>(rows.m) + static_cast<size_t>(row)) * kPanel;
      if (first == 0) Tiles::zero(two);
      else if (!stays) Tiles::load_c(sums, two);
      // A pair of as many rows follows, here or at the next place.
      is_loaded = is_last_pair ? parts > 0 && (pairs == 1 || rows.m % kPair == 0) : row + 2 * kPair <= rows.m;
      for (int block = 1; block <= blocks; ++block, a0 += block0, a1 += block1, b += 2048) {
        const bool is_last = block == blocks;
        if (!is_last) {
          multiply_woven<Tiles>(a0 + block0, a1 + block1, b + 2048, false, two, beside);
        } else {
          const int next_row = is_last_pair ? 0 : row + kPair;
          const auto at = static_cast<size_t>(is_last_pair ? next.first : first);
          multiply_woven<Tiles>(rows.group(next_row) + at * block0, rows.group(next_row + kTile) + at * block1,
                                is_last_pair ? to : w, !is_loaded, two, beside);
        }
        if (!places.by_panel) ahead.some();
        pending.some();
      }
      const bool is_complete = first + blocks == all;
      if (stays && !is_complete) continue;
      if (stays) sums = pending.place(sums);
      Tiles::store(sums, two);
      if (is_complete) pending.start(place.panel, place.index, row, h0 + h1, sums, stays ? all : blocks);
    }
    std::byte* const used = w;
    w = to;
    to = used;
  }
  pending.rest();
  Tiles::release();
}

template <class Tiles>
void int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
          std::byte* scratch, const Epilogue* epilogue) {
  const Int4Scales scales{rows.scale};
  const int all = matrix.blocks();
  if (rows.m <= kPair)
    return woven<Tiles, true>({matrix, panels, count, kDecodedBlocks, true}, rows, c, scratch, epilogue, scales);
  if (rows.m <= kMostWoven)
    return woven<Tiles, false>({matrix, panels, count, all <= kUncut ? all : kSlice, false}, rows, c, scratch, epilogue,
                               scales);
  Expand<false> expand(matrix);
  chains<Tiles, Product::signed_signed>(
      matrix, panels, count, rows, c, epilogue, kSlice,
      [&](const std::byte* panel, int first, int blocks) -> const std::byte* {
        expand.start(panel, first, scratch);
        expand.blocks(blocks);
        return scratch;
      },
      scales);
}

}  // namespace

void amx_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch, const Epilogue* epilogue) {
  int4<HardwareTiles>(matrix, panels, count, rows, c, scratch, epilogue);
}
void modelled_amx_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte* scratch, const Epilogue* epilogue) {
  int4<ModelTiles>(matrix, panels, count, rows, c, scratch, epilogue);
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
