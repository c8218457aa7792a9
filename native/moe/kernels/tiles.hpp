// Two tile units with one interface: the CPU's, and a software model of it.
//
// The kernels of amx.cpp use eight tiles in fixed roles: 0..3 accumulate a 2 x 2 block (accumulator 2a + b = A tile a times B tile
// b), 4 and 5 hold A (activations, up to 16 rows each), 6 and 7 hold B (packed weights, 16 outputs each).
//
// Include inside a target region that has AVX-512 (and AMX for HardwareTiles), after <immintrin.h>, <cstring> and <stdexcept>.
// Source: Intel Architecture Instruction Set Extensions Programming Reference, chapter on AMX, whose pseudo-code the model follows.
#pragma once

namespace ktinject {

// One 64-byte tile configuration: palette 1, rows and bytes a row of the eight tiles.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_a_row[16] = {};
  uint8_t rows[16] = {};

  // m0, m1: rows of the two A tiles (m1 may be 0: tiles 2, 3 and 5 are then not used). k_bytes: 64, or 32 for half a block.
  TileShapes(int m0, int m1, int k_bytes) {
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

#ifdef KTINJECT_HARDWARE_TILES
struct HardwareTiles {
  static void configure(const TileShapes& shapes) { _tile_loadconfig(&shapes); }
  static void release() { _tile_release(); }
  static void load_a0(const void* p, size_t stride) { _tile_loadd(4, p, stride); }
  static void load_a1(const void* p, size_t stride) { _tile_loadd(5, p, stride); }
  static void load_b(const void* p0, const void* p1) {
    _tile_loadd(6, p0, 64);
    _tile_loadd(7, p1, 64);
  }
  static void zero(bool two) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  // c: 32 rows of 32 four-byte values; only the configured rows are written.
  static void store(void* c, bool two) {
    auto* bytes = static_cast<char*>(c);
    _tile_stored(0, bytes, 128);
    _tile_stored(1, bytes + 64, 128);
    if (two) {
      _tile_stored(2, bytes + 16 * 128, 128);
      _tile_stored(3, bytes + 16 * 128 + 64, 128);
    }
  }
  static void bf16(bool two) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static void unsigned_signed(bool two) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    if (two) {
      _tile_dpbusd(2, 5, 6);
      _tile_dpbusd(3, 5, 7);
    }
  }
  static void signed_signed(bool two) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    if (two) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
};
#endif

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
  static void load_a0(const void* p, size_t stride) { load(4, p, stride); }
  static void load_a1(const void* p, size_t stride) { load(5, p, stride); }
  static void load_b(const void* p0, const void* p1) {
    load(6, p0, 64);
    load(7, p1, 64);
  }
  static void zero(bool two) {
    check(state().configured, "tile zero without a configuration");
    std::memset(state().data, 0, sizeof(State::data[0]) * (two ? 4 : 2));
  }
  static void store(void* c, bool two) {
    State& s = state();
    check(s.configured, "tile store without a configuration");
    for (int tile = 0; tile < (two ? 4 : 2); ++tile)
      for (int r = 0; r < s.rows[tile]; ++r)
        std::memcpy(static_cast<char*>(c) + (tile / 2 * 16 + r) * 128 + tile % 2 * 64, s.data[tile][r], s.bytes[tile]);
  }

  // TMUL's shape rules: dst.rows == a.rows, dst.bytes == b.bytes, a.bytes == 4 * b.rows.
  template <class Step>
  static void multiply(bool two, Step step) {
    State& s = state();
    check(s.configured, "tile product without a configuration");
    for (int c = 0; c < (two ? 4 : 2); ++c) {
      const int a = 4 + c / 2, b = 6 + c % 2;
      check(s.rows[c] == s.rows[a] && s.bytes[c] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b], "tile product: shapes do not fit");
      for (int m = 0; m < s.rows[c]; ++m)
        for (int k = 0; k < s.bytes[a] / 4; ++k)
          for (int n = 0; n < s.bytes[c] / 4; ++n) step(&s.data[c][m][n * 4], &s.data[a][m][k * 4], &s.data[b][k][n * 4]);
    }
  }
  static float wide(const uint8_t* p) {
    uint32_t bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
    if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;  // denormal inputs count as zero
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static void bf16(bool two) {
    multiply(two, [](uint8_t* c, const uint8_t* a, const uint8_t* b) {
      float sum;
      std::memcpy(&sum, c, sizeof sum);
      sum += wide(a) * wide(b);
      sum += wide(a + 2) * wide(b + 2);
      std::memcpy(c, &sum, sizeof sum);
    });
  }
  template <class A, class B>
  static void bytes(bool two) {
    multiply(two, [](uint8_t* c, const uint8_t* a, const uint8_t* b) {
      int32_t sum;
      std::memcpy(&sum, c, sizeof sum);
      for (int i = 0; i < 4; ++i) sum += int32_t{static_cast<A>(a[i])} * int32_t{static_cast<B>(b[i])};
      std::memcpy(c, &sum, sizeof sum);
    });
  }
  static void unsigned_signed(bool two) { bytes<uint8_t, int8_t>(two); }
  static void signed_signed(bool two) { bytes<int8_t, int8_t>(two); }
};

}  // namespace ktinject
