// K-quants with AVX2. Codes are unsigned bytes and activations signed ones, as vpmaddubsw takes them: it adds two
// products in 16 bits, where so many more fit that several quads are added up before they are multiplied by s.
#include <immintrin.h>

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

template <Format kFormat, int M, bool kReady>
class Rows {
  using Tile = KTile<kFormat>;
  static constexpr KQuant kKind = Tile::kKind;

 public:
  Rows(const Tile& tile, const KRows& rows, const std::byte* bytes) : tile_(tile), rows_(rows), bytes_(bytes) {}

  KTINJECT_INLINE void run() {
    if constexpr (!kReady) tile_.prefetch_head();
    minima();
    for (auto& row : sum_) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int pair = 0; pair < Tile::kPairs; ++pair) {
      __m256i both[2];
      for (int h = 0; h < 2; ++h) both[h] = scales(pair, h);
      if constexpr (kKind.run == 32) {
        if constexpr (!kReady) tile_.prefetch(2 * pair), tile_.prefetch(2 * pair + 1);
        one_run<0>(2 * pair, both, first_of_pair());
        one_run<0>(2 * pair + 1, both, second_of_pair());
      } else {
        if constexpr (!kReady) tile_.prefetch(pair);
        one_run<0>(pair, both, first_of_pair());
        one_run<4>(pair, both, second_of_pair());
      }
    }
    end();
  }

 private:
  static __m256i first_of_pair() { return _mm256_set1_epi32(0x01000100); }
  static __m256i second_of_pair() { return _mm256_set1_epi32(0x03020302); }
  // Bytes within each 128-bit lane: a 32-bit lane has s of two runs.
  static __m256i spread(__m256i both, __m256i which) {
    const __m256i lanes = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    return _mm256_shuffle_epi8(both, _mm256_or_si256(lanes, which));
  }

  __m256i scales(int pair, int h) const {
    const __m128i bytes = load_half(tile_.s(pair) + h * 16);
    if constexpr (kFormat == Format::q2_k) return _mm256_and_si256(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(15));
    else return _mm256_cvtepi8_epi16(bytes);
  }
  __m256i offsets(int pair, int h) const {
    if constexpr (!kKind.has_min) return scales(pair, h);
    const __m256i bytes = _mm256_cvtepu8_epi16(load_half(tile_.t(pair) + h * 16));
    return kFormat == Format::q2_k ? _mm256_srli_epi16(bytes, 4) : bytes;
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
    if constexpr (kReady) return load(bytes_ + (chunk * 8 + kQuad) * 64 + h * 32);
    else return codes_of<kFormat, kQuad>(tile_.codes(chunk) + h * 32);
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
        float* to = rows_.c + row * kPanel + h * 8;
        const __m256 scale = _mm256_set1_ps(rows_.scale[row * rows_.scales]);
        _mm256_storeu_ps(to,
                         rows_.add ? _mm256_fmadd_ps(scale, value, _mm256_loadu_ps(to)) : _mm256_mul_ps(scale, value));
      }
    }
  }

  const Tile tile_;
  const KRows rows_;
  const std::byte* const bytes_;
  __m256i sum_[M][2], less_[M][2];
};

}  // namespace

KTINJECT_K_QUANTS(avx2, kMostRows)

}  // namespace ktinject::gemm

#pragma GCC pop_options
