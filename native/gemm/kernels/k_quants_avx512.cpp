// K-quants with AVX-512 VNNI: the sum of a run is one of integers, multiplied by s as fp32.
#include <immintrin.h>

#include <utility>

#include "gemm/backends.hpp"
#include "gemm/k_quants.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")

namespace ktinject::gemm {
namespace {

#include "gemm/kernels/k_quants.inl"

constexpr int kMostRows = 8;

inline __m512i load(const std::byte* p) { return _mm512_load_si512(p); }
inline __m256i load_half(const std::byte* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }

// `bits` bits from bit `from` on of each byte, brought to bit `to`.
template <int bits, int from, int to>
inline __m512i field(__m512i v) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << bits) - 1) << to));
  if constexpr (from > to) v = _mm512_srli_epi16(v, from - to);
  if constexpr (from < to) v = _mm512_slli_epi16(v, to - from);
  return _mm512_and_si512(v, mask);
}

// Codes of quad `kQuad` of 32 inputs, for 16 outputs; of iq4_xs their values, and kIq4Offset.
template <Format kFormat, int kQuad>
inline __m512i codes_of(const std::byte* rows) {
  constexpr KQuant kKind = k_quant(kFormat);
  constexpr int kLowQuads = 8 / kKind.low;
  __m512i code = field<kKind.low, kQuad % kLowQuads * kKind.low, 0>(load(rows + kQuad / kLowQuads * 64));
  if constexpr (kKind.high > 0) {
    constexpr int kHighQuads = 8 / kKind.high;
    const __m512i high = load(rows + (kKind.low + kQuad / kHighQuads) * 64);
    code = _mm512_or_si512(code, field<kKind.high, kQuad % kHighQuads * kKind.high, kKind.low>(high));
  }
  if constexpr (kFormat == Format::iq4_xs) {
    const __m128i values = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kIq4Values)),
                                        _mm_set1_epi8(static_cast<char>(kIq4Offset)));
    code = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), code);
  }
  return code;
}

template <Format kFormat, int... kQuad>
inline void unpack_chunk(const std::byte* rows, std::byte* to, std::integer_sequence<int, kQuad...>) {
  (_mm512_store_si512(to + kQuad * 64, codes_of<kFormat, kQuad>(rows)), ...);
}

template <Format kFormat, int M, bool kReady>
class Rows {
  using Tile = KTile<kFormat>;
  static constexpr KQuant kKind = Tile::kKind;
  static constexpr int kZero = kFormat == Format::iq4_xs ? kIq4Offset : kKind.zero;

 public:
  Rows(const Tile& tile, const KRows& rows, const std::byte* bytes) : tile_(tile), rows_(rows), bytes_(bytes) {}

  KTINJECT_INLINE void run() {
    for (int row = 0; row < M; ++row) {
      sum_[row] = _mm512_setzero_ps();
      less_[row] = _mm512_setzero_si512();
    }
#pragma GCC unroll 1
    for (int pair = 0; pair < Tile::kPairs; ++pair) {
      // In each 32-bit lane, s of two runs.
      const __m512i both = scales(pair), other = kKind.has_min ? minima(pair) : both;
      for (int row = 0; row < M; ++row)
        less_[row] =
            _mm512_add_epi32(less_[row], _mm512_madd_epi16(other, _mm512_set1_epi32(rows_.sum_pair(row, pair))));
      const __m512 first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16));
      const __m512 second = _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 16));
      if constexpr (kKind.run == 32) {
        if constexpr (!kReady) tile_.prefetch(2 * pair), tile_.prefetch(2 * pair + 1);
        one_run<0>(2 * pair, first, std::make_integer_sequence<int, 8>());
        one_run<0>(2 * pair + 1, second, std::make_integer_sequence<int, 8>());
      } else {
        if constexpr (!kReady) tile_.prefetch(pair);
        one_run<0>(pair, first, std::make_integer_sequence<int, 4>());
        one_run<4>(pair, second, std::make_integer_sequence<int, 4>());
      }
    }
    end();
  }

 private:
  __m512i scales(int pair) const {
    const __m256i bytes = load_half(tile_.s(pair));
    if constexpr (kFormat == Format::q2_k) return _mm512_and_si512(_mm512_cvtepu8_epi16(bytes), _mm512_set1_epi16(15));
    else return _mm512_cvtepi8_epi16(bytes);
  }
  __m512i minima(int pair) const {
    const __m512i bytes = _mm512_cvtepu8_epi16(load_half(tile_.t(pair)));
    return kFormat == Format::q2_k ? _mm512_srli_epi16(bytes, 4) : bytes;
  }

  template <int kQuad>
  __m512i codes(int chunk) const {
    if constexpr (kReady) return load(bytes_ + (chunk * 8 + kQuad) * 64);
    else return codes_of<kFormat, kQuad>(tile_.codes(chunk));
  }

  template <int kFirst, int... kAt>
  KTINJECT_INLINE void one_run(int chunk, __m512 s, std::integer_sequence<int, kAt...>) {
    __m512i products[M];
    for (auto& product : products) product = _mm512_setzero_si512();
    auto quad = [&]<int kQuad>(std::integral_constant<int, kQuad>) __attribute__((always_inline)) {
      const __m512i w = codes<kQuad>(chunk);
      for (int row = 0; row < M; ++row) {
        const auto* a = reinterpret_cast<const int32_t*>(rows_.quad(row, chunk * 32 + kQuad * 4));
        products[row] = _mm512_dpbusd_epi32(products[row], w, _mm512_set1_epi32(*a));
      }
    };
    (quad(std::integral_constant<int, kFirst + kAt>()), ...);
    for (int row = 0; row < M; ++row) sum_[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[row]), s, sum_[row]);
  }

  KTINJECT_INLINE void end() const {
    const __m512 d = _mm512_cvtph_ps(load_half(tile_.d()));
    __m512 m = _mm512_mul_ps(d, _mm512_set1_ps(static_cast<float>(kZero)));
    if constexpr (kKind.has_min) m = _mm512_cvtph_ps(load_half(tile_.m()));
    for (int row = 0; row < M; ++row) {
      const __m512 value = _mm512_fnmadd_ps(m, _mm512_cvtepi32_ps(less_[row]), _mm512_mul_ps(d, sum_[row]));
      float* to = rows_.c + row * kPanel;
      const __m512 scale = _mm512_set1_ps(rows_.scale[row * rows_.scales]);
      _mm512_storeu_ps(to,
                       rows_.add ? _mm512_fmadd_ps(scale, value, _mm512_loadu_ps(to)) : _mm512_mul_ps(scale, value));
    }
  }

  const Tile tile_;
  const KRows rows_;
  const std::byte* const bytes_;
  __m512 sum_[M];
  __m512i less_[M];
};

}  // namespace

KTINJECT_K_QUANTS(avx512, kMostRows)

}  // namespace ktinject::gemm

#pragma GCC pop_options
