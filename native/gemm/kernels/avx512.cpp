// AVX-512 kernels: BF16 dot products for bf16, VNNI for int8 and int4.
//
// Register tile: M rows x 32 outputs, M up to 12 (int4: 6, which needs a second set of accumulators for its groups).
// Each 64-byte row of a packed tile is one vector operand; the matching pair or quad of inputs of a row of activations
// is broadcast from memory. Wide M amortises the weight loads; for M = 1 the loop is a stream at memory speed.
#include <immintrin.h>

#include "gemm/kernels/dequantise.hpp"
#include "gemm/kernels/head.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")

namespace ktinject::gemm {
namespace {

// Far enough ahead that a single stream keeps the memory busy, across the end of a panel too; the more a kernel has to
// do between two loads, the further. The processor's own prefetchers do not notice such a stream (Zen 5 at eight rows:
// 14 GB/s without, 34 with). Where a panel is read again for more rows, it comes from the L2 cache sooner. They are
// asked for in the order of memory, and not in that of the loads, which go to and fro between the tiles of a block: the
// processor's own prefetchers follow the first (Zen 3, one row of bf16: 21 GB/s where it was 13, a plain read 23).
constexpr int prefetch_bytes(int rows) { return rows <= 3 ? 4096 : 8192; }
inline void prefetch(const std::byte* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

inline __m512i load(const std::byte* p) { return _mm512_load_si512(p); }
inline __m512i broadcast(const std::byte* p) { return _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(p)); }

// In all of these: x is the first of M rows in a group, whose blocks lie block_stride bytes apart and whose rows 64.

// c [M, 32] = x times blocks of bf16 weights; on top of c, if `add`. `streamed`: they come from memory; else they were
// decoded to where they are, in the L1 cache.
template <int M, bool streamed>
void bf16_rows(int blocks, const std::byte* w, const std::byte* x, size_t block_stride, bool add, float* c) {
  // Two chains per accumulator when M is small, to cover the latency of the dot product.
  constexpr int kChains = M <= 2 ? 2 : 1;
  __m512 sum[kChains][M][2];
  for (int row = 0; row < M; ++row)
    for (int t = 0; t < 2; ++t) {
      sum[0][row][t] = add ? _mm512_loadu_ps(c + row * kPanel + t * kTile) : _mm512_setzero_ps();
      if constexpr (kChains == 2) sum[1][row][t] = _mm512_setzero_ps();
    }
  for (int block = 0; block < blocks; ++block, w += 2048, x += block_stride) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      if constexpr (streamed) {
        prefetch(w + prefetch_bytes(M) + r * 128);
        prefetch(w + prefetch_bytes(M) + r * 128 + 64);
      }
      const auto w0 = reinterpret_cast<__m512bh>(load(w + r * 64));
      const auto w1 = reinterpret_cast<__m512bh>(load(w + 1024 + r * 64));
#pragma GCC unroll 16
      for (int row = 0; row < M; ++row) {
        const auto a = reinterpret_cast<__m512bh>(broadcast(x + row * 64 + r * 4));
        auto& target = sum[r % kChains][row];
        target[0] = _mm512_dpbf16_ps(target[0], w0, a);
        target[1] = _mm512_dpbf16_ps(target[1], w1, a);
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int t = 0; t < 2; ++t) {
      __m512 total = sum[0][row][t];
      if constexpr (kChains == 2) total = _mm512_add_ps(total, sum[1][row][t]);
      _mm512_storeu_ps(c + row * kPanel + t * kTile, total);
    }
}

template <int M>
void int8_rows(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride,
               const float* scale, float* c) {
  constexpr int kChains = M <= 2 ? 2 : 1;
  const Int8Head& head = int8_head(panel);
  __m512i sum[kChains][M][2];
  for (auto& chain : sum)
    for (auto& row : chain) row[0] = row[1] = _mm512_setzero_si512();
  for (int t = 0; t < 2; ++t) {
    const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(head.offset + t * kTile));
    for (int row = 0; row < M; ++row) sum[0][row][t] = start;
  }
  const std::byte* w = panel + matrix.head_bytes();
  const int blocks = matrix.blocks();
  for (int block = 0; block < blocks; ++block, w += 2048, x += block_stride) {
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      prefetch(w + prefetch_bytes(M) + r * 128);
      prefetch(w + prefetch_bytes(M) + r * 128 + 64);
      const __m512i w0 = load(w + r * 64), w1 = load(w + 1024 + r * 64);
#pragma GCC unroll 16
      for (int row = 0; row < M; ++row) {
        const __m512i a = broadcast(x + row * 64 + r * 4);
        auto& target = sum[r % kChains][row];
        target[0] = _mm512_dpbusd_epi32(target[0], a, w0);
        target[1] = _mm512_dpbusd_epi32(target[1], a, w1);
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int t = 0; t < 2; ++t) {
      __m512i total = sum[0][row][t];
      if constexpr (kChains == 2) total = _mm512_add_epi32(total, sum[1][row][t]);
      const __m512 factor = _mm512_mul_ps(_mm512_loadu_ps(head.scale + t * kTile), _mm512_set1_ps(scale[row]));
      _mm512_storeu_ps(c + row * kPanel + t * kTile, _mm512_mul_ps(_mm512_cvtepi32_ps(total), factor));
    }
}

inline __m512 widen_scale(const uint16_t* scales) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

inline __m512 widen_zero(const uint8_t* zeros) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros))));
}

template <int M, bool symmetric>
void int4_rows(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride,
               const float* scale, const int32_t* group_sum, float* c) {
  const int groups = matrix.groups();
  const uint16_t* scales = int4_scales(panel);
  const uint8_t* zeros = int4_zeros(matrix, panel);
  const __m512i low_nibbles = _mm512_set1_epi8(15);
  __m512 total[M][2];
  for (auto& row : total) row[0] = row[1] = _mm512_setzero_ps();
  const std::byte *w = panel + matrix.head_bytes(), *const end = panel + matrix.panel_bytes();
  const int halves = matrix.group_size / 32;  // half blocks: four 64-byte rows of both tiles
  int left = matrix.blocks() * 2;
  bool is_second = false;
  for (int g = 0; g < groups; ++g, scales += kPanel, zeros += kPanel, ++group_sum) {
    __m512i sum[M][2];
#pragma GCC unroll 16
    for (int row = 0; row < M; ++row) {
      const int32_t inputs = symmetric ? group_sum[static_cast<size_t>(row) * static_cast<size_t>(groups)] : 0;
      sum[row][0] = sum[row][1] = _mm512_set1_epi32(-8 * inputs);
    }
    // Of the next panel: the head a line a group, so that the weights are always the same distance ahead.
    prefetch(reinterpret_cast<const std::byte*>(scales) + matrix.panel_bytes());
    if constexpr (!symmetric) prefetch(reinterpret_cast<const std::byte*>(zeros) + matrix.panel_bytes());
    for (int half = halves < left ? halves : left; half > 0; --half, --left) {
      const std::byte* ahead = w + prefetch_bytes(2 * M);  // twice as much to do as for int8
      if (ahead >= end) ahead += matrix.head_bytes();
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        prefetch(ahead + r * 64);
        prefetch(ahead + 512 + r * 64);
        const __m512i pair0 = load(w + r * 64), pair1 = load(w + 512 + r * 64);
        const __m512i low0 = _mm512_and_si512(pair0, low_nibbles);
        const __m512i low1 = _mm512_and_si512(pair1, low_nibbles);
        const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(pair0, 4), low_nibbles);
        const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(pair1, 4), low_nibbles);
#pragma GCC unroll 16
        for (int row = 0; row < M; ++row) {
          const std::byte* a = x + row * 64 + r * 8;
          const __m512i a0 = broadcast(a), a1 = broadcast(a + 4);
          sum[row][0] = _mm512_dpbusd_epi32(sum[row][0], low0, a0);
          sum[row][1] = _mm512_dpbusd_epi32(sum[row][1], low1, a0);
          sum[row][0] = _mm512_dpbusd_epi32(sum[row][0], high0, a1);
          sum[row][1] = _mm512_dpbusd_epi32(sum[row][1], high1, a1);
        }
      }
      w += is_second ? 768 : 256;
      x += is_second ? block_stride - 32 : 32;
      is_second = !is_second;
    }
    const __m512 scale0 = widen_scale(scales), scale1 = widen_scale(scales + kTile);
#pragma GCC unroll 16
    for (int row = 0; row < M; ++row) {
      total[row][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[row][0]), scale0, total[row][0]);
      total[row][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[row][1]), scale1, total[row][1]);
    }
    if constexpr (!symmetric) {
      const __m512 zero0 = _mm512_mul_ps(widen_zero(zeros), scale0);
      const __m512 zero1 = _mm512_mul_ps(widen_zero(zeros + kTile), scale1);
#pragma GCC unroll 16
      for (int row = 0; row < M; ++row) {
        const __m512 inputs =
            _mm512_set1_ps(static_cast<float>(group_sum[static_cast<size_t>(row) * static_cast<size_t>(groups)]));
        total[row][0] = _mm512_fnmadd_ps(inputs, zero0, total[row][0]);
        total[row][1] = _mm512_fnmadd_ps(inputs, zero1, total[row][1]);
      }
    }
  }
  for (int row = 0; row < M; ++row)
    for (int t = 0; t < 2; ++t)
      _mm512_storeu_ps(c + row * kPanel + t * kTile, _mm512_mul_ps(total[row][t], _mm512_set1_ps(scale[row])));
}

// One row or two, tile by tile: the weights come in the order in which they lie in memory, which the processor's
// prefetchers follow. The products of the high nibbles have sums of their own, and are 16 times too large until the
// group ends: that spares their shift and covers the latency of the dot product.
template <int M, bool symmetric>
void int4_few(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride, const float* scale,
              const int32_t* group_sum, float* c) {
  const int groups = matrix.groups(), blocks = matrix.blocks();
  const uint16_t* scales = int4_scales(panel);
  const uint8_t* zeros = int4_zeros(matrix, panel);
  const __m512i low_nibbles = _mm512_set1_epi8(15), high_nibbles = _mm512_set1_epi8(static_cast<char>(0xf0));
  const std::byte *w = panel + matrix.head_bytes(), *const panel_end = panel + matrix.panel_bytes();
  __m512 total[M][2];
  for (auto& row : total) row[0] = row[1] = _mm512_setzero_ps();
  __m512i low[M][2], high[M][2];
  auto sum_of = [&](int row, int g) { return group_sum[row * groups + g]; };
  auto begin = [&](int t, int g) {
    if (t == 0) prefetch(reinterpret_cast<const std::byte*>(scales + g * kPanel) + matrix.panel_bytes());
    for (int row = 0; row < M; ++row) {
      low[row][t] = _mm512_set1_epi32(symmetric ? -8 * sum_of(row, g) : 0);
      high[row][t] = _mm512_setzero_si512();
    }
  };
  // 64-byte rows `first` ... of tile t of a block.
  auto add = [&](int t, int first, int count) {
    const std::byte* ahead = w + prefetch_bytes(2 * M);
    if (ahead >= panel_end) ahead += matrix.head_bytes();
#pragma GCC unroll 8
    for (int r = first; r < first + count; ++r, w += 64, ahead += 64) {
      prefetch(ahead);
      const __m512i pair = load(w);
      const __m512i q0 = _mm512_and_si512(pair, low_nibbles), q1 = _mm512_and_si512(pair, high_nibbles);
      for (int row = 0; row < M; ++row) {
        low[row][t] = _mm512_dpbusd_epi32(low[row][t], q0, broadcast(x + row * 64 + r * 8));
        high[row][t] = _mm512_dpbusd_epi32(high[row][t], q1, broadcast(x + row * 64 + r * 8 + 4));
      }
    }
  };
  auto end = [&](int t, int g) {
    const __m512 by = widen_scale(scales + g * kPanel + t * kTile);
    for (int row = 0; row < M; ++row) {
      const __m512i sum = _mm512_add_epi32(low[row][t], _mm512_srai_epi32(high[row][t], 4));
      total[row][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), by, total[row][t]);
      if constexpr (!symmetric)
        total[row][t] = _mm512_fnmadd_ps(_mm512_set1_ps(static_cast<float>(sum_of(row, g))),
                                         _mm512_mul_ps(widen_zero(zeros + g * kPanel + t * kTile), by), total[row][t]);
    }
  };
  if (matrix.group_size < 64) {
    for (int block = 0; block < blocks; ++block, x += block_stride)
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const int t = part / 2, half = part % 2;
        begin(t, 2 * block + half);
        add(t, half * 4, 4);
        end(t, 2 * block + half);
      }
  } else {
    const int run = matrix.group_size / 64;
    for (int g = 0, block = 0; block < blocks; ++g) {
      begin(0, g), begin(1, g);
      for (const int last = block + run < blocks ? block + run : blocks; block < last; ++block, x += block_stride) {
        add(0, 0, 8);
        add(1, 0, 8);
      }
      end(0, g), end(1, g);
    }
  }
  for (int row = 0; row < M; ++row)
    for (int t = 0; t < 2; ++t)
      _mm512_storeu_ps(c + row * kPanel + t * kTile, _mm512_mul_ps(total[row][t], _mm512_set1_ps(scale[row])));
}

template <int M, bool symmetric>
void int4_run(const Matrix& matrix, const std::byte* panel, const std::byte* x, size_t block_stride, const float* scale,
              const int32_t* group_sum, float* c) {
  if constexpr (M <= 2) int4_few<M, symmetric>(matrix, panel, x, block_stride, scale, group_sum, c);
  else int4_rows<M, symmetric>(matrix, panel, x, block_stride, scale, group_sum, c);
}

// Calls run(panel, x, block_stride, first, take, c) for runs of at most Most rows that lie in one group, each of a
// number of rows the kernel has an instance for.
template <int Most, class Run>
void for_runs(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              Run&& run) {
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel)
    for (int group = 0; group < rows.m; group += kTile) {
      const int height = rows.group_rows(group);
      // Even runs beat full ones and a sliver.
      const int runs = (height + Most - 1) / Most;
      for (int i = 0, at = 0; i < runs; ++i) {
        const int take = (height - at + runs - i - 1) / (runs - i);
        run(panels, rows.group(group) + at * 64, static_cast<size_t>(height) * 64, group + at, take,
            c + (group + at) * kPanel);
        at += take;
      }
    }
}

#define KTINJECT_ROWS(CALL) \
  switch (take) {           \
    case 1:                 \
      CALL(1);              \
    case 2:                 \
      CALL(2);              \
    case 3:                 \
      CALL(3);              \
    case 4:                 \
      CALL(4);              \
    case 5:                 \
      CALL(5);              \
    case 6:                 \
      CALL(6);              \
    default:                \
      break;                \
  }
#define KTINJECT_MORE_ROWS(CALL) \
  switch (take) {                \
    case 7:                      \
      CALL(7);                   \
    case 8:                      \
      CALL(8);                   \
    case 9:                      \
      CALL(9);                   \
    case 10:                     \
      CALL(10);                  \
    case 11:                     \
      CALL(11);                  \
    case 12:                     \
      CALL(12);                  \
    default:                     \
      break;                     \
  }

// A slice of a panel is decoded once for all rows, which then add its share to c.
void decoded(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
             std::byte* scratch, Decode decode) {
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel) {
    for (int first = 0; first < matrix.blocks(); first += kDecodedBlocks) {
      const int blocks = matrix.blocks() - first < kDecodedBlocks ? matrix.blocks() - first : kDecodedBlocks;
      decode(matrix, panels, first, blocks, kDecodeAhead, scratch);
      for_runs<12>(matrix, panels, 1, rows, c,
                   [&](const std::byte*, const std::byte* x, size_t block_stride, int, int take, float* out) {
                     x += static_cast<size_t>(first) * block_stride;
#define CALL(M) return bf16_rows<M, false>(blocks, scratch, x, block_stride, first > 0, out)
                     KTINJECT_ROWS(CALL)
                     KTINJECT_MORE_ROWS(CALL)
#undef CALL
                   });
    }
    multiply_by_factors(matrix, panels, rows.m, c);
  }
}

}  // namespace

void avx512_bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                 std::byte*, const Epilogue*) {
  for_runs<12>(matrix, panels, count, rows, c,
               [&](const std::byte* panel, const std::byte* x, size_t block_stride, int, int take, float* out) {
#define CALL(M) return bf16_rows<M, true>(matrix.blocks(), panel, x, block_stride, false, out)
                 KTINJECT_ROWS(CALL)
                 KTINJECT_MORE_ROWS(CALL)
#undef CALL
               });
}

void avx512_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                 std::byte*, const Epilogue*) {
  for_runs<12>(matrix, panels, count, rows, c,
               [&](const std::byte* panel, const std::byte* x, size_t block_stride, int first, int take, float* out) {
#define CALL(M) return int8_rows<M>(matrix, panel, x, block_stride, rows.scale + first, out)
                 KTINJECT_ROWS(CALL)
                 KTINJECT_MORE_ROWS(CALL)
#undef CALL
               });
}

void avx512_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                 std::byte*, const Epilogue*) {
  const auto groups = static_cast<size_t>(matrix.groups());
  for_runs<6>(matrix, panels, count, rows, c,
              [&](const std::byte* panel, const std::byte* x, size_t block_stride, int first, int take, float* out) {
                const int32_t* sums = rows.group_sum + static_cast<size_t>(first) * groups;
                if (matrix.symmetric) {
#define CALL(M) return int4_run<M, true>(matrix, panel, x, block_stride, rows.scale + first, sums, out)
                  KTINJECT_ROWS(CALL)
#undef CALL
                } else {
#define CALL(M) return int4_run<M, false>(matrix, panel, x, block_stride, rows.scale + first, sums, out)
                  KTINJECT_ROWS(CALL)
#undef CALL
                }
              });
}

void avx512_fp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx512_decode_fp8);
}

void avx512_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                  std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx512_decode_mxfp4);
}

void avx512_nvfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                  std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx512_decode_nvfp4);
}

void avx512_mxfp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                  std::byte* scratch, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, scratch, avx512_decode_mxfp8);
}

}  // namespace ktinject::gemm

#pragma GCC pop_options
