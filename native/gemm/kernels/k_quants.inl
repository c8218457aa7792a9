// What the kernels of K-quants share: where the parts of a block lie, and the loops around them. An instruction set
// adds `unpack_chunk`, a class Rows<kFormat, M, kReady> whose run() computes M rows of a tile, and multiply<kFormat>().
//
// A few rows take codes apart as they pass. For more rows, the codes of a tile of 256 inputs are first written as bytes
// to scratch, which stays in the L1 cache while all rows pass by.
//
// Included by k_quants_<isa>.cpp inside its target region and an unnamed namespace, as gemm/vector_ops.inl is.

// Sums stay in registers only if all that is done with them is in one function.
#define KTINJECT_INLINE __attribute__((always_inline)) inline

// How far ahead of the loads weights are asked for: see avx512.cpp.
constexpr int kPrefetchBytes = 4096;

// Of one block and one of its tiles.
template <Format kFormat>
struct KTile {
  static constexpr KQuant kKind = k_quant(kFormat);
  static constexpr int kInputs = k_inputs(kFormat), kChunks = kInputs / 32;
  static constexpr int kRuns = kInputs / kKind.run, kPairs = kRuns / 2, kQuads = kKind.run / 4;
  static constexpr int kCodeRows = k_code_rows(kFormat);
  static constexpr size_t kBytes = static_cast<size_t>(k_block_rows(kFormat)) * 64;

  const std::byte* block;
  int tile;

  const std::byte* d(int run = 0) const { return block + run * 64 + tile * 32; }  // run: of q8_0
  const std::byte* m() const { return block + 64 + tile * 32; }
  const std::byte* s(int pair) const { return block + (k_factor_rows(kFormat) + pair) * 64 + tile * 32; }
  const std::byte* t(int pair) const {
    return kFormat == Format::q2_k ? s(pair) : s(pair) + k_scale_rows(kFormat) * 64;
  }
  // Of 32 inputs.
  const std::byte* codes(int chunk) const {
    return block + (k_head_rows(kFormat) + (tile * kChunks + chunk) * kCodeRows) * 64;
  }
  // The tile's half of the rows before the codes: with those of the codes, all lines are asked for in the order in
  // which they lie. Left out, they broke the stream at each block (Zen 3, q4_k: 15 GB/s instead of 21).
  KTINJECT_INLINE void prefetch_head() const {
    constexpr int kHalf = (k_head_rows(kFormat) + 1) / 2;
    for (int row = 0; row < kHalf; ++row)
      _mm_prefetch(reinterpret_cast<const char*>(block + (tile * kHalf + row) * 64 + kPrefetchBytes), _MM_HINT_T0);
  }
  KTINJECT_INLINE void prefetch(int chunk) const {
    for (int row = 0; row < kCodeRows; ++row)
      _mm_prefetch(reinterpret_cast<const char*>(codes(chunk) + row * 64 + kPrefetchBytes), _MM_HINT_T0);
  }
};

// Some rows of activations in a group, and where their results go.
struct KRows {
  const std::byte* x;   // of the first row and the block's first input
  size_t block_stride;  // between 64 inputs of a row
  const int32_t* sums;  // of the first row and the block's first run
  int groups;           // sums of a row
  const float* scale;   // of the first row and the block
  int scales;           // of a row
  float* c;             // [M, 32]
  bool add;             // to what is there

  // The sums of two runs, as two 16-bit lanes.
  int32_t sum_pair(int row, int pair) const {
    const int32_t* of = sums + row * groups + 2 * pair;
    return static_cast<int32_t>((static_cast<uint32_t>(of[0]) & 0xffffu) | static_cast<uint32_t>(of[1]) << 16);
  }
  // Four inputs of a row.
  const std::byte* quad(int row, int input) const {
    return x + static_cast<size_t>(input / 64) * block_stride + row * 64 + input % 64;
  }
};

// Calls run(tile, rows, take, is_ready) for kMost rows of a group, or half as many, and so on, until none is left; with
// more rows than that, after unpack(tile).
template <Format kFormat, int kMost, class Unpack, class Run>
void for_k_rows(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                Unpack&& unpack, Run&& run) {
  const int blocks = matrix.blocks(), groups = matrix.groups();
  constexpr int kRuns = KTile<kFormat>::kRuns;
  const bool is_ready = rows.m > kMost;
  for (int p = 0; p < count; ++p, panels += matrix.panel_bytes(), c += static_cast<size_t>(rows.m) * kPanel)
    for (int b = 0; b < blocks; ++b)
      for (int t = 0; t < 2; ++t) {
        const KTile<kFormat> tile{panels + static_cast<size_t>(b) * KTile<kFormat>::kBytes, t};
        if (is_ready) unpack(tile);
        for (int group = 0; group < rows.m; group += kTile) {
          const int height = rows.group_rows(group);
          const size_t block_stride = static_cast<size_t>(height) * 64;
          const std::byte* x = rows.group(group) + static_cast<size_t>(b) * (k_inputs(kFormat) / 64) * block_stride;
          for (int at = 0; at < height;) {
            int take = kMost;
            while (take > height - at) take /= 2;
            const int row = group + at;
            run(tile,
                KRows{x + at * 64, block_stride,
                      rows.group_sum + static_cast<size_t>(row) * static_cast<size_t>(groups) + b * kRuns, groups,
                      rows.scale + static_cast<size_t>(row) * static_cast<size_t>(blocks) + b, blocks,
                      c + static_cast<size_t>(row) * kPanel + t * kTile, b > 0},
                take, is_ready);
            at += take;
          }
        }
      }
}

// to [8 quads][64 bytes]: the codes of 32 inputs.
template <Format kFormat, int... kQuad>
inline void unpack_chunk(const std::byte* rows, std::byte* to, std::integer_sequence<int, kQuad...>);

// to [64 quads][64 bytes]; of q8_0 nothing, as its codes are bytes
template <Format kFormat>
void unpack(const KTile<kFormat>& tile, [[maybe_unused]] std::byte* to) {
  tile.prefetch_head();
  if constexpr (kFormat == Format::q8_0) {
    for (int chunk = 0; chunk < tile.kChunks; ++chunk) tile.prefetch(chunk);
  } else {
    for (int chunk = 0; chunk < 8; ++chunk, to += 512) {
      tile.prefetch(chunk);
      unpack_chunk<kFormat>(tile.codes(chunk), to, std::make_integer_sequence<int, 8>());
    }
  }
}

template <Format kFormat, template <Format, int, bool> class Rows, int kTake, bool kReady>
inline void run(const KTile<kFormat>& tile, const KRows& rows, int take, const std::byte* bytes) {
  if constexpr (kTake == 1) Rows<kFormat, 1, kReady>(tile, rows, bytes).run();
  else if (take == kTake) Rows<kFormat, kTake, kReady>(tile, rows, bytes).run();
  else run<kFormat, Rows, kTake / 2, kReady>(tile, rows, take, bytes);
}

#define KTINJECT_K_QUANT(ISA, FORMAT)                                                                          \
  void ISA##_##FORMAT(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, \
                      float* c, std::byte* scratch, const Epilogue*) {                                         \
    multiply<Format::FORMAT>(matrix, panels, count, rows, c, scratch);                                         \
  }
// The kernels of an instruction set; outside of the unnamed namespace.
#define KTINJECT_K_QUANTS(ISA)  \
  KTINJECT_K_QUANT(ISA, q2_k)   \
  KTINJECT_K_QUANT(ISA, q3_k)   \
  KTINJECT_K_QUANT(ISA, q4_k)   \
  KTINJECT_K_QUANT(ISA, q5_k)   \
  KTINJECT_K_QUANT(ISA, q6_k)   \
  KTINJECT_K_QUANT(ISA, iq4_xs) \
  KTINJECT_K_QUANT(ISA, q8_0)
