// From the blocks of a GGUF file to packed panels, and back.
#include "gemm/k_quants.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "gemm/packed_tiles.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::gemm {
namespace {

constexpr int kChunks = kSuperblock / 32;

// A block of a file, taken apart.
struct Block {
  uint16_t d = 0, m = 0;  // fp16
  int8_t s[16] = {};
  uint8_t t[16] = {};
  uint8_t codes[kSuperblock] = {};
};

uint16_t half_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

// Two bits each of inputs 32 apart, for 128 inputs a time.
int two_bits(const uint8_t* p, int k) { return p[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3; }

void read_q2(const uint8_t* p, Block& block) {
  for (int run = 0; run < 16; ++run) {
    block.s[run] = static_cast<int8_t>(p[run] & 15);
    block.t[run] = p[run] >> 4;
  }
  for (int k = 0; k < kSuperblock; ++k) block.codes[k] = static_cast<uint8_t>(two_bits(p + 16, k));
  block.d = half_at(p + 80), block.m = half_at(p + 82);
}

void read_q3(const uint8_t* p, Block& block) {
  for (int k = 0; k < kSuperblock; ++k)
    block.codes[k] = static_cast<uint8_t>(two_bits(p + 32, k) | (p[k % 32] >> k / 32 & 1) << 2);
  for (int run = 0; run < 16; ++run) {
    const int low = p[96 + run % 8] >> run / 8 * 4 & 15, high = p[104 + run % 4] >> run / 4 * 2 & 3;
    block.s[run] = static_cast<int8_t>((low | high << 4) - 32);
  }
  block.d = half_at(p + 108);
}

// s and t of Q4_K and Q5_K: six bits each, eight of both in twelve bytes.
void read_runs(const uint8_t* p, Block& block) {
  for (int i = 0; i < 4; ++i) {
    block.s[i] = static_cast<int8_t>(p[i] & 63);
    block.t[i] = p[4 + i] & 63;
    block.s[4 + i] = static_cast<int8_t>((p[8 + i] & 15) | p[i] >> 6 << 4);
    block.t[4 + i] = static_cast<uint8_t>(p[8 + i] >> 4 | p[4 + i] >> 6 << 4);
  }
}

// Nibbles of inputs 32 apart, for 64 inputs a time.
int nibble(const uint8_t* p, int k) { return p[k / 64 * 32 + k % 32] >> (k % 64 / 32 * 4) & 15; }

void read_q4(const uint8_t* p, Block& block) {
  block.d = half_at(p), block.m = half_at(p + 2);
  read_runs(p + 4, block);
  for (int k = 0; k < kSuperblock; ++k) block.codes[k] = static_cast<uint8_t>(nibble(p + 16, k));
}

void read_q5(const uint8_t* p, Block& block) {
  block.d = half_at(p), block.m = half_at(p + 2);
  read_runs(p + 4, block);
  for (int k = 0; k < kSuperblock; ++k)
    block.codes[k] = static_cast<uint8_t>(nibble(p + 48, k) | (p[16 + k % 32] >> k / 32 & 1) << 4);
}

void read_q6(const uint8_t* p, Block& block) {
  for (int k = 0; k < kSuperblock; ++k) {
    const int low = p[k / 128 * 64 + k % 64] >> (k % 128 / 64 * 4) & 15;
    block.codes[k] = static_cast<uint8_t>(low | two_bits(p + 128, k) << 4);
  }
  std::memcpy(block.s, p + 192, sizeof block.s);
  block.d = half_at(p + 208);
}

void read_iq4(const uint8_t* p, Block& block) {
  block.d = half_at(p);
  const int high = half_at(p + 2);
  for (int run = 0; run < 8; ++run) {
    const int low = p[4 + run / 2] >> run % 2 * 4 & 15;
    block.s[run] = static_cast<int8_t>((low | (high >> 2 * run & 3) << 4) - 32);
    for (int i = 0; i < 16; ++i) {
      const uint8_t pair = p[8 + run * 16 + i];
      block.codes[run * 32 + i] = pair & 15;
      block.codes[run * 32 + 16 + i] = pair >> 4;
    }
  }
}

void read(Format format, const uint8_t* p, Block& block) {
  switch (format) {
    case Format::q2_k:
      return read_q2(p, block);
    case Format::q3_k:
      return read_q3(p, block);
    case Format::q4_k:
      return read_q4(p, block);
    case Format::q5_k:
      return read_q5(p, block);
    case Format::q6_k:
      return read_q6(p, block);
    default:
      return read_iq4(p, block);
  }
}

// Where bits of a code lie: row among those of the 32 inputs, and the bit it starts at.
struct BitsAt {
  int row;
  int shift;
};
BitsAt bits_at(int bits, int first_row, int quad) {
  const int quads = 8 / bits;  // in a byte
  return {first_row + quad / quads, quad % quads * bits};
}

void write(Format format, const Block& from, std::byte* to, int column) {
  const KQuant kind = k_quant(format);
  auto byte = [&](int row, int at) -> uint8_t& { return reinterpret_cast<uint8_t*>(to)[row * 64 + at]; };
  std::memcpy(to + column * 2, &from.d, 2);
  if (kind.has_min) std::memcpy(to + 64 + column * 2, &from.m, 2);
  const int scales = k_factor_rows(format), minima = scales + k_scale_rows(format);
  for (int run = 0; run < kSuperblock / kind.run; ++run) {
    const int at = column * 2 + run % 2;
    const auto s = static_cast<uint8_t>(from.s[run]);
    byte(scales + run / 2, at) = format == Format::q2_k ? static_cast<uint8_t>(s | from.t[run] << 4) : s;
    if (kind.has_min && format != Format::q2_k) byte(minima + run / 2, at) = from.t[run];
  }
  const int codes = k_head_rows(format) + column / kTile * kChunks * k_code_rows(format);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int first = codes + chunk * k_code_rows(format);
    for (int row = 0; row < k_code_rows(format); ++row)
      for (int i = 0; i < 4; ++i) byte(first + row, column % kTile * 4 + i) = 0;
    for (int k = 0; k < 32; ++k) {
      const int code = from.codes[chunk * 32 + k], at = column % kTile * 4 + k % 4;
      auto put = [&](BitsAt where, int bits) {
        uint8_t& target = byte(where.row, at);
        target = static_cast<uint8_t>(target | bits << where.shift);
      };
      put(bits_at(kind.low, first, k / 4), code & ((1 << kind.low) - 1));
      if (kind.high > 0) put(bits_at(kind.high, first + kind.low, k / 4), code >> kind.low);
    }
  }
}

float widen_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude =
      exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                    : static_cast<float>(1024 + mantissa) * 0x1p-25f * static_cast<float>(uint32_t{1} << exponent);
  return bits & 0x8000 ? -magnitude : magnitude;
}

}  // namespace

float KBlock::half(int index) const {
  uint16_t bits;
  std::memcpy(&bits, data_ + index * 2, 2);
  return widen_half(bits);
}

int KBlock::s(int column, int run) const {
  const auto found = static_cast<int8_t>(byte(k_factor_rows(format_) + run / 2, column * 2 + run % 2));
  return format_ == Format::q2_k ? found & 15 : found;
}

int KBlock::t(int column, int run) const {
  if (format_ == Format::q2_k) return byte(k_factor_rows(format_) + run / 2, column * 2 + run % 2) >> 4;
  return byte(k_factor_rows(format_) + k_scale_rows(format_) + run / 2, column * 2 + run % 2);
}

int KBlock::code(int column, int k) const {
  const KQuant kind = k_quant(format_);
  const int chunk = column / kTile * kChunks + k / 32, quad = k % 32 / 4, at = column % kTile * 4 + k % 4;
  const int first = k_head_rows(format_) + chunk * k_code_rows(format_);
  const BitsAt low = bits_at(kind.low, first, quad);
  int code = byte(low.row, at) >> low.shift & ((1 << kind.low) - 1);
  if (kind.high > 0) {
    const BitsAt high = bits_at(kind.high, first + kind.low, quad);
    code |= (byte(high.row, at) >> high.shift & ((1 << kind.high) - 1)) << kind.low;
  }
  return format_ == Format::iq4_xs ? kIq4Values[code] : code;
}

// In ggml's order.
float KBlock::value(int column, int k) const {
  const KQuant kind = k_quant(format_);
  const int run = k / kind.run;
  const float product =
      d(column) * static_cast<float>(s(column, run)) * static_cast<float>(code(column, k) - kind.zero);
  return kind.has_min ? product - m(column) * static_cast<float>(t(column, run)) : product;
}

void pack_k_quants(runtime::ThreadPool& workers, const Matrix& matrix, const KSource& source, TileMap place,
                   std::span<const PanelRun> runs, const std::string& what) {
  if (!is_k_quant(matrix.format))
    throw std::domain_error(what + ": blocks of a GGUF file for " + format_name(matrix.format) +
                            " weights; decode them first");
  const size_t file_bytes = k_file_bytes(matrix.format), expected = static_cast<size_t>(matrix.blocks()) * file_bytes;
  if (source.row_bytes != expected)
    throw std::domain_error(what + ": found rows of " + std::to_string(source.row_bytes) + " bytes; " +
                            format_name(matrix.format) + " needs " + std::to_string(expected));
  each_tile(workers, runs, place, [&](int t, int) {
    const TileAt at = place(t);
    std::byte* panel = panel_of(matrix, runs, at.panel);
    for (int j = 0; j < kTile; ++j) {
      const int output = t * kTile + j;
      Block block;
      for (int b = 0; b < matrix.blocks(); ++b) {
        if (output < source.n)
          read(matrix.format, source.data + output * source.stride + static_cast<size_t>(b) * file_bytes, block);
        write(matrix.format, block, panel + static_cast<size_t>(b) * 2 * matrix.tile_bytes(), at.second * kTile + j);
      }
    }
  });
}

}  // namespace ktinject::gemm
