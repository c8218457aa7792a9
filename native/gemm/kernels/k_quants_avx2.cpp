// K-quants with AVX2. Codes are unsigned bytes and activations signed ones, as vpmaddubsw takes them: it adds two
// products in 16 bits, where so many more fit that several quads are added up before they are multiplied by s.
//
// A few rows read the codes as they lie; for more, ReadyTile takes a tile apart once and ReadyRows passes it.
#include <immintrin.h>

#include <algorithm>
#include <utility>

#include "gemm/backends.hpp"
#include "gemm/k_quants.hpp"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace ktinject::gemm {
namespace {

#include "gemm/kernels/k_quants.inl"

// Rows at once: of more, accumulators would not fit the registers.
constexpr int kMostRows = 4;

inline __m256i load(const std::byte* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m128i load_half(const std::byte* p) { return _mm_load_si128(reinterpret_cast<const __m128i*>(p)); }

// `bits` bits from bit `from` on of each byte, brought to bit `to`.
template <int bits, int from, int to>
inline __m256i field(__m256i v) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << bits) - 1) << to));
  if constexpr (from > to) v = _mm256_srli_epi16(v, from - to);
  if constexpr (from < to) v = _mm256_slli_epi16(v, to - from);
  return _mm256_and_si256(v, mask);
}

// Codes of quad `kQuad` of 32 inputs, for 8 outputs; of iq4_xs their values.
template <Format kFormat, int kQuad>
inline __m256i codes_of(const std::byte* rows) {
  constexpr KQuant kKind = k_quant(kFormat);
  constexpr int kLowQuads = 8 / kKind.low;
  __m256i code = field<kKind.low, kQuad % kLowQuads * kKind.low, 0>(load(rows + kQuad / kLowQuads * 64));
  if constexpr (kKind.high > 0) {
    constexpr int kHighQuads = 8 / kKind.high;
    const __m256i high = load(rows + (kKind.low + kQuad / kHighQuads) * 64);
    code = _mm256_or_si256(code, field<kKind.high, kQuad % kHighQuads * kKind.high, kKind.low>(high));
  }
  if constexpr (kFormat == Format::iq4_xs) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values));
    code = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), code);
  }
  return code;
}

template <Format kFormat, int... kQuad>
inline void unpack_chunk(const std::byte* rows, std::byte* to, std::integer_sequence<int, kQuad...>) {
  for (int half = 0; half < 64; half += 32)
    (_mm256_store_si256(reinterpret_cast<__m256i*>(to + kQuad * 64 + half), codes_of<kFormat, kQuad>(rows + half)),
     ...);
}

// Quads whose products fit 16 bits together.
template <Format kFormat>
constexpr int kTogether = [] {
  constexpr KQuant kKind = k_quant(kFormat);
  if (kFormat == Format::iq4_xs) return 1;
  const int most = 32767 / (((1 << (kKind.low + kKind.high)) - 1) * 127 * 2);
  int quads = kKind.run / 4;
  while (quads > most) quads /= 2;
  return quads;
}();

// In each 32-bit lane, s of two runs, of outputs 8 half ... of the tile.
template <Format kFormat>
inline __m256i scales_of(const KTile<kFormat>& tile, int pair, int half) {
  const __m128i bytes = load_half(tile.s(pair) + half * 16);
  if constexpr (kFormat == Format::q2_k) return _mm256_and_si256(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(15));
  else return _mm256_cvtepi8_epi16(bytes);
}
// The same of t.
template <Format kFormat>
inline __m256i minima_of(const KTile<kFormat>& tile, int pair, int half) {
  const __m256i bytes = _mm256_cvtepu8_epi16(load_half(tile.t(pair) + half * 16));
  return kFormat == Format::q2_k ? _mm256_srli_epi16(bytes, 4) : bytes;
}
// Of one of the two runs, which: twice in each 32-bit lane.
inline __m256i first_of_pair() { return _mm256_set1_epi32(0x01000100); }
inline __m256i second_of_pair() { return _mm256_set1_epi32(0x03020302); }
inline __m256i spread(__m256i both, __m256i which) {
  const __m256i lanes = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
  return _mm256_shuffle_epi8(both, _mm256_or_si256(lanes, which));
}

// `value` of outputs 8 half ... becomes, or is added to, the result of a row.
inline void put(const KRows& rows, int row, int half, __m256 value) {
  float* to = rows.c + row * kPanel + half * 8;
  const __m256 scale = _mm256_set1_ps(rows.scale[row * rows.scales]);
  _mm256_storeu_ps(to, rows.add ? _mm256_fmadd_ps(scale, value, _mm256_loadu_ps(to)) : _mm256_mul_ps(scale, value));
}

// M rows of a tile, and its codes as they lie.
template <Format kFormat, int M, bool>
class Rows {
  using Tile = KTile<kFormat>;
  static constexpr KQuant kKind = Tile::kKind;

 public:
  Rows(const Tile& tile, const KRows& rows, const std::byte*) : tile_(tile), rows_(rows) {}

  KTINJECT_INLINE void run() {
    tile_.prefetch_head();
    minima();
    for (auto& row : sum_) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int pair = 0; pair < Tile::kPairs; ++pair) {
      __m256i both[2];
      for (int h = 0; h < 2; ++h) both[h] = scales(pair, h);
      if constexpr (kKind.run == 32) {
        tile_.prefetch(2 * pair), tile_.prefetch(2 * pair + 1);
        one_run<0>(2 * pair, both, first_of_pair());
        one_run<0>(2 * pair + 1, both, second_of_pair());
      } else {
        tile_.prefetch(pair);
        one_run<0>(pair, both, first_of_pair());
        one_run<4>(pair, both, second_of_pair());
      }
    }
    end();
  }

 private:
  __m256i scales(int pair, int h) const { return scales_of(tile_, pair, h); }
  __m256i offsets(int pair, int h) const {
    if constexpr (kKind.has_min) return minima_of(tile_, pair, h);
    else return scales(pair, h);
  }

  // What does not depend on the codes: t, or s, times the sums of the activations.
  KTINJECT_INLINE void minima() {
    if constexpr (!kKind.has_min && kKind.zero == 0) return;
    for (auto& row : less_) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int pair = 0; pair < Tile::kPairs; ++pair)
      for (int h = 0; h < 2; ++h) {
        const __m256i by = offsets(pair, h);
        for (int row = 0; row < M; ++row)
          less_[row][h] =
              _mm256_add_epi32(less_[row][h], _mm256_madd_epi16(by, _mm256_set1_epi32(rows_.sum_pair(row, pair))));
      }
  }

  template <int kQuad>
  __m256i codes(int chunk, int h) const {
    return codes_of<kFormat, kQuad>(tile_.codes(chunk) + h * 32);
  }

  // kTogether quads from kFirst on, times s.
  template <int kFirst, int... kAt>
  KTINJECT_INLINE void together(int chunk, const __m256i* s, std::integer_sequence<int, kAt...>) {
    __m256i products[M][2];
    auto quad = [&]<int kStep>(std::integral_constant<int, kStep>) __attribute__((always_inline)) {
      const __m256i w[2] = {codes<kFirst + kStep>(chunk, 0), codes<kFirst + kStep>(chunk, 1)};
      for (int row = 0; row < M; ++row) {
        const __m256i a =
            _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(rows_.quad(row, chunk * 32 + (kFirst + kStep) * 4)));
        for (int h = 0; h < 2; ++h) {
          const __m256i product = kFormat == Format::iq4_xs
                                      ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(a, w[h]))
                                      : _mm256_maddubs_epi16(w[h], a);
          products[row][h] = kStep == 0 ? product : _mm256_add_epi16(products[row][h], product);
        }
      }
    };
    (quad(std::integral_constant<int, kAt>()), ...);
    for (int row = 0; row < M; ++row)
      for (int h = 0; h < 2; ++h)
        sum_[row][h] = _mm256_add_epi32(sum_[row][h], _mm256_madd_epi16(products[row][h], s[h]));
  }

  template <int kFirst>
  KTINJECT_INLINE void one_run(int chunk, const __m256i* both, __m256i which) {
    const __m256i s[2] = {spread(both[0], which), spread(both[1], which)};
    constexpr int kStep = kTogether<kFormat>;
    [&]<int... kAt>(std::integer_sequence<int, kAt...>) __attribute__((always_inline)) {
      (together<kFirst + kAt * kStep>(chunk, s, std::make_integer_sequence<int, kStep>()), ...);
    }(std::make_integer_sequence<int, Tile::kQuads / kStep>());
  }

  KTINJECT_INLINE void end() const {
    for (int h = 0; h < 2; ++h) {
      const __m256 d = _mm256_cvtph_ps(load_half(tile_.d() + h * 16));
      __m256 m = d;
      if constexpr (kKind.has_min) m = _mm256_cvtph_ps(load_half(tile_.m() + h * 16));
      for (int row = 0; row < M; ++row) {
        __m256i sum = sum_[row][h];
        if constexpr (kKind.zero != 0)
          sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(less_[row][h], _mm256_set1_epi32(kKind.zero)));
        __m256 value = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum));
        if constexpr (kKind.has_min) value = _mm256_fnmadd_ps(m, _mm256_cvtepi32_ps(less_[row][h]), value);
        put(rows_, row, h, value);
      }
    }
  }

  const Tile tile_;
  const KRows rows_;
  __m256i sum_[M][2], less_[M][2];
};

// M rows of a tile of q8_0. Codes are signed bytes as activations are, so their signs go to these; two products of 128
// and 127 fill 16 bits, and are added up in 32. kReady: the tile was asked for already.
template <int M, bool kReady>
class Rows<Format::q8_0, M, kReady> {
  using Tile = KTile<Format::q8_0>;

 public:
  Rows(const Tile& tile, const KRows& rows, const std::byte*) : tile_(tile), rows_(rows) {}

  KTINJECT_INLINE void run() const {
    if constexpr (!kReady) tile_.prefetch_head();
    __m256 value[M][2];
    for (auto& row : value) row[0] = row[1] = _mm256_setzero_ps();
#pragma GCC unroll 1
    for (int run = 0; run < Tile::kRuns; ++run) {
      if constexpr (!kReady) tile_.prefetch(run);
      one_run(run, value);
    }
    for (int row = 0; row < M; ++row)
      for (int h = 0; h < 2; ++h) put(rows_, row, h, value[row][h]);
  }

 private:
  KTINJECT_INLINE void one_run(int run, __m256 (&value)[M][2]) const {
    const std::byte* codes = tile_.codes(run);
    const std::byte* x = rows_.quad(0, run * 32);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[M][2];
    for (auto& row : sum) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      const __m256i w[2] = {load(codes + quad * 64), load(codes + quad * 64 + 32)};
      const __m256i size[2] = {_mm256_abs_epi8(w[0]), _mm256_abs_epi8(w[1])};
      for (int row = 0; row < M; ++row) {
        const __m256i a = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x + row * 64 + quad * 4));
        for (int h = 0; h < 2; ++h) {
          const __m256i two = _mm256_maddubs_epi16(size[h], _mm256_sign_epi8(a, w[h]));
          sum[row][h] = _mm256_add_epi32(sum[row][h], _mm256_madd_epi16(two, ones));
        }
      }
    }
    for (int h = 0; h < 2; ++h) {
      const __m256 d = _mm256_cvtph_ps(load_half(tile_.d(run) + h * 16));
      for (int row = 0; row < M; ++row)
        value[row][h] = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(sum[row][h]), value[row][h]);
    }
  }

  const Tile tile_;
  const KRows rows_;
};

// A tile of 256 inputs, taken apart: it stays in the L1 cache while all rows pass by.
template <Format kFormat>
struct alignas(64) ReadyTile {
  using Tile = KTile<kFormat>;
  static constexpr bool kHasMin = Tile::kKind.has_min;

  std::byte codes[64][64];                           // of a quad
  int16_t s[Tile::kRuns][kTile * 2];                 // twice for each output
  int16_t t[kHasMin ? Tile::kPairs : 1][kTile * 2];  // of two runs for each output
  float d[kTile], m[kTile];

  void read(const Tile& tile) {
    unpack(tile, codes[0]);
    for (int h = 0; h < 2; ++h) {
      for (int pair = 0; pair < Tile::kPairs; ++pair) {
        const __m256i both = scales_of(tile, pair, h);
        store(s[2 * pair], h, spread(both, first_of_pair()));
        store(s[2 * pair + 1], h, spread(both, second_of_pair()));
        if constexpr (kHasMin) store(t[pair], h, minima_of(tile, pair, h));
      }
      _mm256_store_ps(d + h * 8, _mm256_cvtph_ps(load_half(tile.d() + h * 16)));
      if constexpr (kHasMin) _mm256_store_ps(m + h * 8, _mm256_cvtph_ps(load_half(tile.m() + h * 16)));
    }
  }
  static __m256i half(const int16_t* of, int h) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(of) + h); }

 private:
  static void store(int16_t* to, int h, __m256i v) { _mm256_store_si256(reinterpret_cast<__m256i*>(to) + h, v); }
};

// What a row of activations adds to the sums of a block whatever its codes are, as two 16-bit lanes each:
//   formats with minima     the sums of two runs, for each pair of runs
//   with codes from -zero   -zero times its sums over inputs 0, 1 and 2, 3 of the quads of a run, for each run: with
//                           these a run's products stay within 16 bits, as 8 * zero * 127 does
//   iq4_xs                  nothing
template <Format kFormat>
class RowOffsets {
  using Tile = KTile<kFormat>;
  static constexpr KQuant kKind = Tile::kKind;
  static_assert(kKind.zero == 0 || (kKind.run == 16 && 8 * kKind.zero * 127 < 32768));

 public:
  static constexpr int kCount = kKind.has_min ? Tile::kPairs : kKind.zero != 0 ? Tile::kRuns : 0;

  // x: the row's first input of the block, sums: of its first run; to [kCount].
  static void write(const std::byte* x, size_t block_stride, const int32_t* sums, int32_t* to) {
    if constexpr (kKind.has_min) {
      for (int run = 0; run < Tile::kRuns; run += 8) {
        const auto* eight = reinterpret_cast<const __m128i*>(sums + run);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + run / 2),
                         _mm_packs_epi32(_mm_loadu_si128(eight), _mm_loadu_si128(eight + 1)));
      }
    } else if constexpr (kKind.zero != 0) {
      for (int run = 0; run < Tile::kRuns; ++run) {
        const __m128i a = load_half(x + static_cast<size_t>(run / 4) * block_stride + run % 4 * 16);
        __m128i two = _mm_maddubs_epi16(_mm_set1_epi8(kKind.zero), a);
        two = _mm_add_epi16(two, _mm_unpackhi_epi64(two, two));
        two = _mm_add_epi16(two, _mm_shuffle_epi32(two, 1));
        to[run] = _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), two));
      }
    }
  }
};

// M rows of a tile that was taken apart.
template <Format kFormat, int M>
class ReadyRows {
  using Tile = KTile<kFormat>;
  static constexpr KQuant kKind = Tile::kKind;
  static constexpr int kOffsets = RowOffsets<kFormat>::kCount;
  // Quads whose products are added up in 16 bits, modulo 2^16 where the sum begins with an offset.
  static constexpr int kQuads = kKind.zero != 0 ? Tile::kQuads : kTogether<kFormat>;

 public:
  // offsets [M][kOffsets]
  ReadyRows(const ReadyTile<kFormat>& tile, const KRows& rows, const int32_t* offsets)
      : tile_(tile), rows_(rows), offsets_(offsets) {}

  KTINJECT_INLINE void run() const {
    __m256i sum[M][2];
    for (auto& row : sum) row[0] = row[1] = _mm256_setzero_si256();
    // Pointers that move on leave the registers to sums and products.
    const std::byte* x = rows_.x;
    const std::byte* codes = tile_.codes[0];
    const int16_t* s = tile_.s[0];
    const int32_t* offsets = offsets_;
    constexpr int kRuns = 64 / kKind.run;
#pragma GCC unroll 1
    for (int at = 0; at < kSuperblock; at += 64) {
      [&]<int... kAt>(std::integer_sequence<int, kAt...>) __attribute__((always_inline)) {
        (together<kAt * kQuads>(x, codes, s, offsets, sum), ...);
      }(std::make_integer_sequence<int, 16 / kQuads>());
      x += rows_.block_stride, codes += 16 * 64, s += kRuns * kTile * 2, offsets += kRuns;
    }
    end(sum);
  }

 private:
  // From here on the value is in a register. Left alone, the compiler holds all additions back, adds up as a tree and
  // spills the products on the way: 0.6 times the speed.
  static KTINJECT_INLINE void keep(__m256i& value) { asm("" : "+x"(value)); }

  // Quads kFirst ... of 64 inputs, times s.
  template <int kFirst>
  static KTINJECT_INLINE void together(const std::byte* x, const std::byte* codes, const int16_t* s,
                                       const int32_t* offsets, __m256i (&sum)[M][2]) {
    constexpr int kRun = kFirst * 4 / kKind.run;
    __m256i products[M][2];
    if constexpr (kKind.zero != 0)
      for (int row = 0; row < M; ++row)
        products[row][0] = products[row][1] = _mm256_set1_epi32(offsets[row * kOffsets + kRun]);
    auto quad = [&]<int kAt>(std::integral_constant<int, kAt>) __attribute__((always_inline)) {
      constexpr int kQuad = kFirst + kAt;
      __m256i w[2] = {load(codes + kQuad * 64), load(codes + kQuad * 64 + 32)};
      keep(w[0]), keep(w[1]);
      for (int row = 0; row < M; ++row) {
        const __m256i a = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x + row * 64 + kQuad * 4));
        for (int h = 0; h < 2; ++h) {
          const __m256i product = kFormat == Format::iq4_xs
                                      ? _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(a, w[h]))
                                      : _mm256_maddubs_epi16(w[h], a);
          __m256i& of = products[row][h];
          of = kAt == 0 && kKind.zero == 0 ? product : _mm256_add_epi16(of, product);
          keep(of);
          if constexpr (kAt == kQuads - 1) {
            const __m256i by = ReadyTile<kFormat>::half(s + kRun * kTile * 2, h);
            sum[row][h] = _mm256_add_epi32(sum[row][h], _mm256_madd_epi16(of, by));
            keep(sum[row][h]);
          }
        }
      }
    };
    [&]<int... kAt>(std::integer_sequence<int, kAt...>) __attribute__((always_inline)) {
      (quad(std::integral_constant<int, kAt>()), ...);
    }(std::make_integer_sequence<int, kQuads>());
  }

  KTINJECT_INLINE void end(const __m256i (&sum)[M][2]) const {
    for (int h = 0; h < 2; ++h) {
      const __m256 d = _mm256_load_ps(tile_.d + h * 8);
      for (int row = 0; row < M; ++row) {
        __m256 value = _mm256_mul_ps(d, _mm256_cvtepi32_ps(sum[row][h]));
        if constexpr (kKind.has_min) {
          __m256i less = _mm256_setzero_si256();
          for (int pair = 0; pair < Tile::kPairs; ++pair)
            less = _mm256_add_epi32(less, _mm256_madd_epi16(ReadyTile<kFormat>::half(tile_.t[pair], h),
                                                            _mm256_set1_epi32(offsets_[row * kOffsets + pair])));
          value = _mm256_fnmadd_ps(_mm256_load_ps(tile_.m + h * 8), _mm256_cvtepi32_ps(less), value);
        }
        put(rows_, row, h, value);
      }
    }
  }

  const ReadyTile<kFormat>& tile_;
  const KRows rows_;
  const int32_t* const offsets_;
};

template <Format kFormat>
void multiply_many(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                   std::byte* scratch) {
  using Offsets = RowOffsets<kFormat>;
  constexpr size_t kOffsetBytes = size_t{128} << 10;
  constexpr int kRowsAtOnce = 1024;  // a multiple of a group's
  static_assert(kRowsAtOnce * Offsets::kCount * sizeof(int32_t) <= kOffsetBytes);
  auto& tile = *reinterpret_cast<ReadyTile<kFormat>*>(scratch);
  auto* offsets = reinterpret_cast<int32_t*>(scratch + sizeof tile);
  const int blocks = matrix.blocks(), groups = matrix.groups();
  for (int first = 0; first < rows.m; first += kRowsAtOnce) {
    const int m = std::min(kRowsAtOnce, rows.m - first);
    // Blocks whose offsets fit.
    const int fit = static_cast<int>(kOffsetBytes / sizeof(int32_t)) / (m * std::max(1, Offsets::kCount));
    for (int begin = 0; begin < blocks; begin += fit) {
      const int end = std::min(blocks, begin + fit);
      auto offsets_of = [&](int row, int block) {
        return offsets + ((block - begin) * m + row - first) * Offsets::kCount;
      };
      // use(rows, first of them, how many), at most kMostRows a time and about as many each time
      auto for_rows = [&](int block, float* to, auto&& use) {
        for (int group = first; group < first + m; group += kTile) {
          const int height = rows.group_rows(group);
          const size_t stride = static_cast<size_t>(height) * 64;
          const std::byte* x = rows.group(group) + static_cast<size_t>(block) * 4 * stride;
          for (int at = 0, left = (height + kMostRows - 1) / kMostRows; left > 0; --left) {
            const int take = (height - at + left - 1) / left, row = group + at;
            use(KRows{x + at * 64, stride,
                      rows.group_sum + static_cast<size_t>(row) * static_cast<size_t>(groups) +
                          block * KTile<kFormat>::kRuns,
                      groups, rows.scale + static_cast<size_t>(row) * static_cast<size_t>(blocks) + block, blocks,
                      to + static_cast<size_t>(row) * kPanel, block > 0},
                row, take);
            at += take;
          }
        }
      };
      for (int block = begin; block < end; ++block)
        for_rows(block, c, [&](const KRows& some, int row, int take) {
          for (int i = 0; i < take; ++i)
            Offsets::write(some.x + i * 64, some.block_stride, some.sums + i * groups, offsets_of(row + i, block));
        });
      for (int p = 0; p < count; ++p) {
        const std::byte* panel = panels + static_cast<size_t>(p) * matrix.panel_bytes();
        float* to = c + static_cast<size_t>(p) * static_cast<size_t>(rows.m) * kPanel;
        for (int block = begin; block < end; ++block)
          for (int t = 0; t < 2; ++t) {
            tile.read({panel + static_cast<size_t>(block) * KTile<kFormat>::kBytes, t});
            for_rows(block, to + t * kTile, [&](const KRows& some, int row, int take) {
              const int32_t* own = offsets_of(row, block);
              static_assert(kMostRows == 4);
              if (take == 4) ReadyRows<kFormat, 4>(tile, some, own).run();
              else if (take == 3) ReadyRows<kFormat, 3>(tile, some, own).run();
              else if (take == 2) ReadyRows<kFormat, 2>(tile, some, own).run();
              else ReadyRows<kFormat, 1>(tile, some, own).run();
            });
          }
      }
    }
  }
}

template <Format kFormat>
void multiply(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch) {
  if constexpr (kFormat == Format::q8_0) {
    for_k_rows<kFormat, kMostRows>(
        matrix, panels, count, rows, c, [&](const KTile<kFormat>& tile) { unpack(tile, scratch); },
        [](const KTile<kFormat>& tile, const KRows& some, int take, bool is_ready) {
          if (is_ready) run<kFormat, Rows, kMostRows, true>(tile, some, take, nullptr);
          else run<kFormat, Rows, kMostRows, false>(tile, some, take, nullptr);
        });
  } else if (rows.m > kMostRows) {
    multiply_many<kFormat>(matrix, panels, count, rows, c, scratch);
  } else {
    for_k_rows<kFormat, kMostRows>(
        matrix, panels, count, rows, c, [](const KTile<kFormat>&) {},
        [](const KTile<kFormat>& tile, const KRows& some, int take, bool) {
          run<kFormat, Rows, kMostRows, false>(tile, some, take, nullptr);
        });
  }
}

}  // namespace

KTINJECT_K_QUANTS(avx2)

}  // namespace ktinject::gemm

#pragma GCC pop_options
