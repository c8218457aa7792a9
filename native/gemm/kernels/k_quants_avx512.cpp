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
#include "gemm/kernels/k_quants_avx512.inl"

constexpr int kMostRows = 8;

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
    if constexpr (!kReady) tile_.prefetch_head();
    for (int row = 0; row < M; ++row) {
      sum_[row] = _mm512_setzero_ps();
      less_[row] = _mm512_setzero_si512();
    }
#pragma GCC unroll 1
    for (int pair = 0; pair < Tile::kPairs; ++pair) {
      // In each 32-bit lane, s of two runs.
      const __m512i both = scales(tile_, pair), other = kKind.has_min ? minima(tile_, pair) : both;
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
    const __m512 d = _mm512_cvtph_ps(load_half(tile_.d())), zero = _mm512_set1_ps(static_cast<float>(kZero));
    for (int row = 0; row < M; ++row) {
      const __m512 less = _mm512_cvtepi32_ps(less_[row]);
      __m512 value;
      if constexpr (kKind.has_min)
        value = _mm512_fnmadd_ps(_mm512_cvtph_ps(load_half(tile_.m())), less, _mm512_mul_ps(d, sum_[row]));
      else value = _mm512_mul_ps(d, _mm512_fnmadd_ps(zero, less, sum_[row]));
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

template <Format kFormat>
void multiply(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              std::byte* scratch) {
  for_k_rows<kFormat, kMostRows>(
      matrix, panels, count, rows, c, [&](const KTile<kFormat>& tile) { unpack(tile, scratch); },
      [&](const KTile<kFormat>& tile, const KRows& some, int take, bool is_ready) {
        if (is_ready) run<kFormat, Rows, kMostRows, true>(tile, some, take, scratch);
        else run<kFormat, Rows, kMostRows, false>(tile, some, take, scratch);
      });
}

}  // namespace

KTINJECT_K_QUANTS(avx512)

}  // namespace ktinject::gemm

#pragma GCC pop_options
