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

// The loops below run along bytes of the file and of the codes, so that the compiler makes vectors of them.

// codes |= two bits each of inputs 32 apart, for 128 inputs a time, moved to bit `to`.
void add_two_bits(const uint8_t* p, int to, uint8_t* codes) {
  for (int half = 0; half < 2; ++half)
    for (int run = 0; run < 4; ++run)
      for (int i = 0; i < 32; ++i)
        codes[half * 128 + run * 32 + i] |= static_cast<uint8_t>((p[half * 32 + i] >> 2 * run & 3) << to);
}

// codes |= bit r of byte i for input i of run r of 32, moved to bit `to`.
void add_one_bit(const uint8_t* p, int to, uint8_t* codes) {
  for (int run = 0; run < 8; ++run)
    for (int i = 0; i < 32; ++i) codes[run * 32 + i] |= static_cast<uint8_t>((p[i] >> run & 1) << to);
}

// codes = nibbles of inputs kRun apart, for 2 kRun inputs a time.
template <int kRun>
void set_nibbles(const uint8_t* p, uint8_t* codes) {
  for (int first = 0; first < kSuperblock; first += 2 * kRun, p += kRun)
    for (int i = 0; i < kRun; ++i) {
      codes[first + i] = p[i] & 15;
      codes[first + kRun + i] = p[i] >> 4;
    }
}

void read_q2(const uint8_t* p, Block& block) {
  for (int run = 0; run < 16; ++run) {
    block.s[run] = static_cast<int8_t>(p[run] & 15);
    block.t[run] = p[run] >> 4;
  }
  std::memset(block.codes, 0, sizeof block.codes);
  add_two_bits(p + 16, 0, block.codes);
  block.d = half_at(p + 80), block.m = half_at(p + 82);
}

void read_q3(const uint8_t* p, Block& block) {
  std::memset(block.codes, 0, sizeof block.codes);
  add_two_bits(p + 32, 0, block.codes);
  add_one_bit(p, 2, block.codes);
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

void read_q4(const uint8_t* p, Block& block) {
  block.d = half_at(p), block.m = half_at(p + 2);
  read_runs(p + 4, block);
  set_nibbles<32>(p + 16, block.codes);
}

void read_q5(const uint8_t* p, Block& block) {
  block.d = half_at(p), block.m = half_at(p + 2);
  read_runs(p + 4, block);
  set_nibbles<32>(p + 48, block.codes);
  add_one_bit(p + 16, 4, block.codes);
}

void read_q6(const uint8_t* p, Block& block) {
  set_nibbles<64>(p, block.codes);
  add_two_bits(p + 128, 4, block.codes);
  std::memcpy(block.s, p + 192, sizeof block.s);
  block.d = half_at(p + 208);
}

void read_iq4(const uint8_t* p, Block& block) {
  block.d = half_at(p);
  const int high = half_at(p + 2);
  for (int run = 0; run < 8; ++run) {
    const int low = p[4 + run / 2] >> run % 2 * 4 & 15;
    block.s[run] = static_cast<int8_t>((low | (high >> 2 * run & 3) << 4) - 32);
  }
  set_nibbles<16>(p + 8, block.codes);
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

// kBits bits from bit kFrom on of the codes of 32 inputs: a row of 64 bytes has 8 / kBits quads of 16 outputs.
template <int kBits, int kFrom>
void write_plane(const Block* outputs, int first, std::byte* to) {
  constexpr int kQuads = 8 / kBits;
  constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
  for (int quad = 0; quad < 8; quad += kQuads, to += 64)
    for (int j = 0; j < kTile; ++j) {
      uint32_t word = 0;
      for (int i = 0; i < kQuads; ++i) {
        uint32_t four;
        std::memcpy(&four, outputs[j].codes + first + (quad + i) * 4, 4);
        word |= (four >> kFrom & kMask) << i * kBits;
      }
      std::memcpy(to + j * 4, &word, 4);
    }
}

// A block of a tile's 16 outputs of q8_0: runs `first` ... of `runs` in the rows that begin at `rows`.
void write_q8_tile(const KSource& source, int output, int first, int runs, std::byte* to, int tile) {
  constexpr size_t kFileBytes = k_file_bytes(Format::q8_0);
  constexpr int kRuns = k_factor_rows(Format::q8_0), kQuads = k_code_rows(Format::q8_0);
  std::byte* codes = to + (kRuns + tile * kRuns * kQuads) * 64;
  for (int j = 0; j < kTile; ++j)
    for (int run = 0; run < kRuns; ++run) {
      uint8_t padding[kFileBytes] = {};
      const uint8_t* from = padding;
      if (output + j < source.n && first + run < runs)
        from = source.data + (output + j) * source.stride + static_cast<size_t>(first + run) * kFileBytes;
      std::memcpy(to + run * 64 + (tile * kTile + j) * 2, from, 2);
      for (int quad = 0; quad < kQuads; ++quad)
        std::memcpy(codes + (run * kQuads + quad) * 64 + j * 4, from + 2 + quad * 4, 4);
    }
}

// A block of a tile's 16 outputs.
void write_tile(Format format, const Block* outputs, std::byte* to, int tile) {
  const KQuant kind = k_quant(format);
  const int scales = k_factor_rows(format), minima = scales + k_scale_rows(format);
  for (int j = 0; j < kTile; ++j) {
    const Block& from = outputs[j];
    const int column = tile * kTile + j;
    std::memcpy(to + column * 2, &from.d, 2);
    if (kind.has_min) std::memcpy(to + 64 + column * 2, &from.m, 2);
    for (int run = 0; run < kSuperblock / kind.run; ++run) {
      const int at = run / 2 * 64 + column * 2 + run % 2;
      const auto s = static_cast<uint8_t>(from.s[run]);
      to[scales * 64 + at] = std::byte{format == Format::q2_k ? static_cast<uint8_t>(s | from.t[run] << 4) : s};
      if (kind.has_min && format != Format::q2_k) to[minima * 64 + at] = std::byte{from.t[run]};
    }
  }
  std::byte* codes = to + (k_head_rows(format) + tile * kChunks * k_code_rows(format)) * 64;
  for (int first = 0; first < kSuperblock; first += 32, codes += k_code_rows(format) * 64) {
    if (kind.low == 4) write_plane<4, 0>(outputs, first, codes);
    else write_plane<2, 0>(outputs, first, codes);
    std::byte* high = codes + kind.low * 64;
    if (kind.high == 2) write_plane<2, 4>(outputs, first, high);
    else if (kind.high == 1 && kind.low == 4) write_plane<1, 4>(outputs, first, high);
    else if (kind.high == 1) write_plane<1, 2>(outputs, first, high);
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
  const int chunk = column / kTile * (k_inputs(format_) / 32) + k / 32, quad = k % 32 / 4,
            at = column % kTile * 4 + k % 4;
  const int first = k_head_rows(format_) + chunk * k_code_rows(format_);
  const BitsAt low = bits_at(kind.low, first, quad);
  int code = byte(low.row, at) >> low.shift & ((1 << kind.low) - 1);
  if (kind.high > 0) {
    const BitsAt high = bits_at(kind.high, first + kind.low, quad);
    code |= (byte(high.row, at) >> high.shift & ((1 << kind.high) - 1)) << kind.low;
  }
  if (format_ == Format::q8_0) return static_cast<int8_t>(code);
  return format_ == Format::iq4_xs ? kIq4Values[code] : code;
}

// In ggml's order.
float KBlock::value(int column, int k) const {
  const KQuant kind = k_quant(format_);
  const int run = k / kind.run;
  if (format_ == Format::q8_0) return d(column, run) * static_cast<float>(code(column, k));
  const float product =
      d(column) * static_cast<float>(s(column, run)) * static_cast<float>(code(column, k) - kind.zero);
  return kind.has_min ? product - m(column) * static_cast<float>(t(column, run)) : product;
}

void pack_k_quants(runtime::ThreadPool& workers, const Matrix& matrix, const KSource& source, TileMap place,
                   std::span<const PanelRun> runs, const std::string& what) {
  if (!is_k_quant(matrix.format))
    throw std::domain_error(what + ": blocks of a GGUF file for " + format_name(matrix.format) +
                            " weights; decode them first");
  const size_t file_bytes = k_file_bytes(matrix.format),
               expected = static_cast<size_t>(matrix.k / k_file_inputs(matrix.format)) * file_bytes;
  if (source.row_bytes != expected)
    throw std::domain_error(what + ": found rows of " + std::to_string(source.row_bytes) + " bytes; " +
                            format_name(matrix.format) + " needs " + std::to_string(expected));
  each_tile(workers, runs, place, [&](int t, int) {
    const TileAt at = place(t);
    std::byte* panel = panel_of(matrix, runs, at.panel);
    if (matrix.format == Format::q8_0) {
      constexpr int kRuns = k_factor_rows(Format::q8_0);
      for (int b = 0; b < matrix.blocks(); ++b)
        write_q8_tile(source, t * kTile, b * kRuns, matrix.k / k_file_inputs(Format::q8_0),
                      panel + static_cast<size_t>(b) * 2 * matrix.tile_bytes(), at.second);
      return;
    }
    Block outputs[kTile];
    for (int b = 0; b < matrix.blocks(); ++b) {
      for (int j = 0; j < kTile; ++j) {
        const int output = t * kTile + j;
        if (output < source.n)
          read(matrix.format, source.data + output * source.stride + static_cast<size_t>(b) * file_bytes, outputs[j]);
      }
      write_tile(matrix.format, outputs, panel + static_cast<size_t>(b) * 2 * matrix.tile_bytes(), at.second);
    }
  });
}

}  // namespace ktinject::gemm
