// Two tile units with one interface: the CPU's, and a software model of it.
//
// The kernels of amx.cpp use eight tiles in fixed roles: 0..3 accumulate a 2 x 2 block (accumulator 2a + b = A tile a
// times B tile b), 4 and 5 hold A (activations, up to 16 rows each), 6 and 7 hold B (packed weights, 16 outputs each).
//
// Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter on AMX, whose pseudo-code the
// model follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace ktinject::gemm {

// One 64-byte tile configuration: palette 1, rows and bytes a row of the eight tiles.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_a_row[16] = {};
  uint8_t rows[16] = {};

  // m0, m1: rows of the two A tiles (m1 may be 0: tiles 2, 3 and 5 are then not used). k_bytes: of a row of these.
  TileShapes(int m0, int m1, int k_bytes = 64) {
    auto set = [&](int tile, int tile_rows, int bytes) {
      rows[tile] = static_cast<uint8_t>(tile_rows);
      bytes_a_row[tile] = static_cast<uint16_t>(bytes);
    };
    const int second = m1 > 0 ? m1 : 1;
    set(0, m0, 64), set(1, m0, 64), set(2, second, 64), set(3, second, 64);
    set(4, m0, k_bytes), set(5, second, k_bytes);
    set(6, k_bytes / 4, 64), set(7, k_bytes / 4, 64);
  }
};

// What a product multiplies: pairs of bf16, or four bytes of A with four of B.
enum class Product { bf16, unsigned_signed, signed_signed };

// In assembly: the intrinsics of GCC 11 and 12 tell the compiler of 8 of the configuration's 64 bytes, and of none of
// the memory that a tile load reads, so that it may drop or move the stores before them.
struct HardwareTiles {
  template <int tile>
  static void load(const void* p, size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void load_passing(const void* p) {
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(size_t{64}), "i"(tile) : "memory");
  }
  template <int tile>
  static void store_tile(void* p) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(size_t{128}), "i"(tile) : "memory");
  }
  template <int tile>
  static void zero_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile));
  }

  static void configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
  static void release() { __asm__ volatile("tilerelease"); }
  // A passes by, B stays: with the T1 hint, A does not push B out of the L1 cache.
  // `two` tiles of rows that lie `stride` bytes apart.
  static void load_a(const void* p0, const void* p1, size_t stride, bool two) {
    load<4>(p0, stride);
    if (two) load<5>(p1, stride);
  }
  static void load_a0(const void* p) { load_passing<4>(p); }
  static void load_a1(const void* p) { load_passing<5>(p); }
  static void load_b(const void* p0, const void* p1) {
    load_b0(p0);
    load_b1(p1);
  }
  static void load_b0(const void* p) { load<6>(p, 64); }
  static void load_b1(const void* p) { load<7>(p, 64); }
  static void zero(bool two) {
    zero_tile<0>();
    zero_tile<1>();
    if (two) {
      zero_tile<2>();
      zero_tile<3>();
    }
  }
  // c: 32 rows of 32 four-byte values; only the configured rows are touched.
  static void load_c(const void* c, bool two) {
    const auto* bytes = static_cast<const char*>(c);
    load<0>(bytes, 128);
    load<1>(bytes + 64, 128);
    if (two) {
      load<2>(bytes + 16 * 128, 128);
      load<3>(bytes + 16 * 128 + 64, 128);
    }
  }
  static void store(void* c, bool two) {
    auto* bytes = static_cast<char*>(c);
    store_tile<0>(bytes);
    store_tile<1>(bytes + 64);
    if (two) {
      store_tile<2>(bytes + 16 * 128);
      store_tile<3>(bytes + 16 * 128 + 64);
    }
  }
  static void store_first(void* c, bool two) {
    auto* bytes = static_cast<char*>(c);
    store_tile<0>(bytes);
    if (two) store_tile<2>(bytes + 16 * 128);
  }
#define KTINJECT_TILE_PRODUCT(INSTRUCTION)                \
  __asm__ volatile(INSTRUCTION " %tmm6, %tmm4, %tmm0");   \
  __asm__ volatile(INSTRUCTION " %tmm7, %tmm4, %tmm1");   \
  if (two) {                                              \
    __asm__ volatile(INSTRUCTION " %tmm6, %tmm5, %tmm2"); \
    __asm__ volatile(INSTRUCTION " %tmm7, %tmm5, %tmm3"); \
  }
  static void bf16(bool two) { KTINJECT_TILE_PRODUCT("tdpbf16ps") }
  static void bf16_first(bool two) {
    __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0");
    if (two) __asm__ volatile("tdpbf16ps %tmm6, %tmm5, %tmm2");
  }
  static void unsigned_signed(bool two) { KTINJECT_TILE_PRODUCT("tdpbusd") }
  static void signed_signed(bool two) { KTINJECT_TILE_PRODUCT("tdpbssd") }
  static void signed_unsigned(bool two) { KTINJECT_TILE_PRODUCT("tdpbsud") }
#undef KTINJECT_TILE_PRODUCT
  // Into one accumulator alone.
  template <Product product, int accumulator>
  static void multiply_one() {
#define KTINJECT_ONE_PRODUCT(INSTRUCTION)                                                                            \
  __asm__ volatile(INSTRUCTION " %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(6 + accumulator % 2), "i"(4 + accumulator / 2), \
                   "i"(accumulator))
    if constexpr (product == Product::bf16) KTINJECT_ONE_PRODUCT("tdpbf16ps");
    else if constexpr (product == Product::unsigned_signed) KTINJECT_ONE_PRODUCT("tdpbusd");
    else KTINJECT_ONE_PRODUCT("tdpbssd");
#undef KTINJECT_ONE_PRODUCT
  }
};

// The same in plain C++. Where the CPU would fault, this throws std::logic_error.
struct ModelTiles {
  struct State {
    bool configured = false;
    uint8_t rows[8] = {};
    uint16_t bytes[8] = {};
    alignas(64) uint8_t data[8][16][64] = {};
  };
  static State& state() {
    static thread_local State tiles;
    return tiles;
  }
  static void check(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
  }

  static void configure(const TileShapes& shapes) {
    State& s = state();
    check(shapes.palette == 1 && shapes.start_row == 0, "tile configuration: palette 1 and start row 0 are expected");
    for (int tile = 0; tile < 8; ++tile) {
      check(shapes.rows[tile] >= 1 && shapes.rows[tile] <= 16, "tile configuration: rows must be 1 to 16");
      check(shapes.bytes_a_row[tile] >= 1 && shapes.bytes_a_row[tile] <= 64, "tile configuration: 1 to 64 bytes a row");
      s.rows[tile] = shapes.rows[tile];
      s.bytes[tile] = shapes.bytes_a_row[tile];
    }
    for (int tile = 8; tile < 16; ++tile)
      check(shapes.rows[tile] == 0 && shapes.bytes_a_row[tile] == 0, "tile configuration: there are eight tiles");
    std::memset(s.data, 0, sizeof s.data);
    s.configured = true;
  }
  static void release() { state().configured = false; }

  static void load(int tile, const void* p, size_t stride) {
    State& s = state();
    check(s.configured, "tile load without a configuration");
    std::memset(s.data[tile], 0, sizeof s.data[tile]);
    for (int r = 0; r < s.rows[tile]; ++r)
      std::memcpy(s.data[tile][r], static_cast<const char*>(p) + static_cast<size_t>(r) * stride, s.bytes[tile]);
  }
  static void load_a(const void* p0, const void* p1, size_t stride, bool two) {
    load(4, p0, stride);
    if (two) load(5, p1, stride);
  }
  static void load_a0(const void* p) { load(4, p, 64); }
  static void load_a1(const void* p) { load(5, p, 64); }
  static void load_b(const void* p0, const void* p1) {
    load(6, p0, 64);
    load(7, p1, 64);
  }
  static void load_b0(const void* p) { load(6, p, 64); }
  static void load_b1(const void* p) { load(7, p, 64); }
  static void zero(bool two) {
    check(state().configured, "tile zero without a configuration");
    std::memset(state().data, 0, sizeof(State::data[0]) * (two ? 4 : 2));
  }
  static void load_c(const void* c, bool two) {
    for (int tile = 0; tile < (two ? 4 : 2); ++tile)
      load(tile, static_cast<const char*>(c) + tile / 2 * 16 * 128 + tile % 2 * 64, 128);
  }
  static void store(void* c, bool two) {
    State& s = state();
    check(s.configured, "tile store without a configuration");
    for (int tile = 0; tile < (two ? 4 : 2); ++tile)
      for (int r = 0; r < s.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(c) + (tile / 2 * 16 + r) * 128 + tile % 2 * 64, s.data[tile][r], s.bytes[tile]);
  }
  static void store_first(void* c, bool two) {
    State& s = state();
    check(s.configured, "tile store without a configuration");
    for (int tile = 0; tile < (two ? 4 : 2); tile += 2)
      for (int r = 0; r < s.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(c) + (tile / 2 * 16 + r) * 128, s.data[tile][r], s.bytes[tile]);
  }

  // TMUL's shape rules: dst.rows == a.rows, dst.bytes == b.bytes, a.bytes == 4 * b.rows.
  template <class Step>
  static void multiply(bool two, Step step, int columns = 2) {
    for (int c = 0; c < (two ? 4 : 2); c += columns == 1 ? 2 : 1) accumulate(c, step);
  }
  template <class Step>
  static void accumulate(int c, Step step) {
    State& s = state();
    check(s.configured, "tile product without a configuration");
    const int a = 4 + c / 2, b = 6 + c % 2;
    check(s.rows[c] == s.rows[a] && s.bytes[c] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b],
          "tile product: shapes do not fit");
    for (int m = 0; m < s.rows[c]; ++m)
      for (int k = 0; k < s.bytes[a] / 4; ++k)
        for (int n = 0; n < s.bytes[c] / 4; ++n) step(&s.data[c][m][n * 4], &s.data[a][m][k * 4], &s.data[b][k][n * 4]);
  }
  static float wide(const uint8_t* p) {
    uint32_t bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
    if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;  // denormal inputs count as zero
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static void add_pairs(uint8_t* c, const uint8_t* a, const uint8_t* b) {
    float sum;
    std::memcpy(&sum, c, sizeof sum);
    sum += wide(a) * wide(b);
    sum += wide(a + 2) * wide(b + 2);
    std::memcpy(c, &sum, sizeof sum);
  }
  static void bf16(bool two) { multiply(two, add_pairs); }
  static void bf16_first(bool two) { multiply(two, add_pairs, 1); }
  template <class A, class B>
  static void add_bytes(uint8_t* c, const uint8_t* a, const uint8_t* b) {
    int32_t sum;
    std::memcpy(&sum, c, sizeof sum);
    for (int i = 0; i < 4; ++i) sum += int32_t{static_cast<A>(a[i])} * int32_t{static_cast<B>(b[i])};
    std::memcpy(c, &sum, sizeof sum);
  }
  static void unsigned_signed(bool two) { multiply(two, add_bytes<uint8_t, int8_t>); }
  static void signed_signed(bool two) { multiply(two, add_bytes<int8_t, int8_t>); }
  static void signed_unsigned(bool two) { multiply(two, add_bytes<int8_t, uint8_t>); }
  template <Product product, int accumulator>
  static void multiply_one() {
    if constexpr (product == Product::bf16) accumulate(accumulator, add_pairs);
    else if constexpr (product == Product::unsigned_signed) accumulate(accumulator, add_bytes<uint8_t, int8_t>);
    else accumulate(accumulator, add_bytes<int8_t, int8_t>);
  }
};

}  // namespace ktinject::gemm
