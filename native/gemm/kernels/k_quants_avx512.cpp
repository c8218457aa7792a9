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
      begin(row);
      sum_[row] = _mm512_setzero_ps();
      less_[row] = _mm512_setzero_si512();
    }
    const std::byte* x = rows_.x;
#pragma GCC unroll 1
    for (int at = 0; at < kSuperblock / 64; ++at, x += rows_.block_stride) {
      two_runs<0>(at, x);
      if constexpr (kKind.run == 16) two_runs<1>(at, x);
    }
    end();
  }

 private:
  // Pair kPair of the runs of the 64 inputs `at`; x: of these, the first row's.
  template <int kPair>
  KTINJECT_INLINE void two_runs(int at, const std::byte* x) {
    constexpr int kFirst = kPair * 8, kSecond = kFirst + Tile::kQuads;
    const int pair = at * (32 / kKind.run) + kPair;
    if constexpr (!kReady) {
      tile_.prefetch(2 * at + kPair);
      if constexpr (kKind.run == 32) tile_.prefetch(2 * at + 1);
    }
    // In each 32-bit lane, s of two runs.
    const __m512i both = scales(tile_, pair);
    if constexpr (kKind.has_min) {
      const __m512i t = minima(tile_, pair);
      for (int row = 0; row < M; ++row)
        less_[row] = _mm512_dpwssd_epi32(less_[row], t, _mm512_set1_epi32(offsets_[row][pair]));
    }
    // As fp32, 2^16 times as large: so nothing need be moved down.
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    using Quads = std::make_integer_sequence<int, Tile::kQuads>;
    one_run<kFirst>(2 * pair, at, x, _mm512_cvtepi32_ps(_mm512_slli_epi32(both, 16)), Quads());
    one_run<kSecond>(2 * pair + 1, at, x, _mm512_cvtepi32_ps(_mm512_and_si512(both, upper)), Quads());
  }

  // Of quad kQuad of the 64 inputs `at`.
  template <int kQuad>
  __m512i codes(int at) const {
    if constexpr (kReady) return load(bytes_ + (at * 16 + kQuad) * 64);
    else return codes_of<kFormat, kQuad % 8>(tile_.codes(2 * at + kQuad / 8));
  }

  // What a row adds to the sums of the block whatever its codes are: with minima, the sums of its runs, two to be
  // multiplied at once; else what a run's products begin with.
  KTINJECT_INLINE void begin(int row) {
    const int32_t* sums = rows_.sums + row * rows_.groups;
    if constexpr (kKind.has_min && Tile::kRuns == 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(offsets_[row]), _mm512_cvtepi32_epi16(_mm512_loadu_si512(sums)));
    else if constexpr (kKind.has_min)
      _mm_store_si128(reinterpret_cast<__m128i*>(offsets_[row]),
                      _mm256_cvtepi32_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums))));
    else if constexpr (Tile::kRuns == 16)
      _mm512_store_si512(offsets_[row], _mm512_mullo_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(-kZero)));
    else
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(offsets_[row]),
          _mm256_mullo_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums)), _mm256_set1_epi32(-kZero)));
  }

  template <int kFirst, int... kAt>
  KTINJECT_INLINE void one_run(int run, int at, const std::byte* x, __m512 s, std::integer_sequence<int, kAt...>) {
    __m512i products[M];
    for (int row = 0; row < M; ++row)
      products[row] = kKind.has_min ? _mm512_setzero_si512() : _mm512_set1_epi32(offsets_[row][run]);
    auto quad = [&]<int kQuad>(std::integral_constant<int, kQuad>) __attribute__((always_inline)) {
      const __m512i w = codes<kQuad>(at);
      for (int row = 0; row < M; ++row) {
        const auto* a = reinterpret_cast<const int32_t*>(x + row * 64 + kQuad * 4);
        products[row] = _mm512_dpbusd_epi32(products[row], w, _mm512_set1_epi32(*a));
      }
    };
    (quad(std::integral_constant<int, kFirst + kAt>()), ...);
    for (int row = 0; row < M; ++row) sum_[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[row]), s, sum_[row]);
  }

  KTINJECT_INLINE void end() const {
    const __m512 d = _mm512_mul_ps(_mm512_cvtph_ps(load_half(tile_.d())), _mm512_set1_ps(0x1p-16f));
    for (int row = 0; row < M; ++row) {
      __m512 value = _mm512_mul_ps(d, sum_[row]);
      if constexpr (kKind.has_min)
        value = _mm512_fnmadd_ps(_mm512_cvtph_ps(load_half(tile_.m())), _mm512_cvtepi32_ps(less_[row]), value);
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
  alignas(64) int32_t offsets_[M][16];
};

// The same of q8_0: a run's sum is multiplied by its d. Codes are made unsigned, for which a run begins with the sum of
// its activations, -128 times. kReady: the tile was asked for already.
template <int M, bool kReady>
class Rows<Format::q8_0, M, kReady> {
  using Tile = KTile<Format::q8_0>;

 public:
  Rows(const Tile& tile, const KRows& rows, const std::byte*) : tile_(tile), rows_(rows) {}

  KTINJECT_INLINE void run() const {
    if constexpr (!kReady) tile_.prefetch_head();
    __m512 value[M];
    for (auto& row : value) row = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (int run = 0; run < Tile::kRuns; ++run) {
      if constexpr (!kReady) tile_.prefetch(run);
      one_run(run, value);
    }
    for (int row = 0; row < M; ++row) {
      float* to = rows_.c + row * kPanel;
      const __m512 scale = _mm512_set1_ps(rows_.scale[row * rows_.scales]);
      _mm512_storeu_ps(
          to, rows_.add ? _mm512_fmadd_ps(scale, value[row], _mm512_loadu_ps(to)) : _mm512_mul_ps(scale, value[row]));
    }
  }

 private:
  KTINJECT_INLINE void one_run(int run, __m512 (&value)[M]) const {
    const std::byte* codes = tile_.codes(run);
    const std::byte* x = rows_.quad(0, run * 32);
    __m512i sum[M];
    for (int row = 0; row < M; ++row) sum[row] = _mm512_set1_epi32(-128 * rows_.sums[row * rows_.groups + run]);
#pragma GCC unroll 8
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      const __m512i w = _mm512_xor_si512(load(codes + quad * 64), _mm512_set1_epi8(static_cast<char>(0x80)));
      for (int row = 0; row < M; ++row) {
        const auto* a = reinterpret_cast<const int32_t*>(x + row * 64 + quad * 4);
        sum[row] = _mm512_dpbusd_epi32(sum[row], w, _mm512_set1_epi32(*a));
      }
    }
    const __m512 d = _mm512_cvtph_ps(load_half(tile_.d(run)));
    for (int row = 0; row < M; ++row) value[row] = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(sum[row]), value[row]);
  }

  const Tile tile_;
  const KRows rows_;
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
