// The K-quants of GGUF files as packed weights: every code, scale and minimum is the file's.
//
// Of 256 inputs of an output, d and m are fp16. Runs of 16 or 32 of these inputs share s and t. A weight of code q is
//
//   q2_k    2 bits    runs of 16   d * s * q - m * t
//   q3_k    3 bits    runs of 16   d * s * (q - 4)
//   q4_k    4 bits    runs of 32   d * s * q - m * t
//   q5_k    5 bits    runs of 32   d * s * q - m * t
//   q6_k    6 bits    runs of 16   d * s * (q - 32)
//   iq4_xs  4 bits    runs of 32   d * s * kIq4Values[q]
//
// Q8_0 is kept in the same way. It has d for each run of 32 inputs, and no s:
//
//   q8_0    8 bits    runs of 32   d * q, q signed
//
// A block of 256 inputs of a panel's 32 outputs is a sequence of rows of 64 bytes:
//
//   d                 fp16 of output 0, of output 1, ...
//   m                 the same, in formats that have it
//   s                 a row for two runs: the bytes of both for output 0, for output 1, ...; signed, without the offset
//                     of 32 that the file adds in q3_k and iq4_xs; in q2_k s | t << 4
//   t                 the same, in q4_k and q5_k
//   codes of tile 0   of 32 inputs after another: the rows of the lower bits, then those of the upper ones
//   codes of tile 1
//
// 32 inputs are eight quads. Byte 4 j + i of a row belongs to output j of the tile and the i-th input of each quad that
// the row holds: of four bits two quads, the first one in the lower bits, of two bits four, of one bit all eight.
//
// So a dot product is two sums of integers for 256 inputs: of s times (codes times activations), and of t, or s, times
// the sum of the activations of a run. A panel is read from end to end.
//
// A block of q8_0 is of 128 inputs: d of each of its four runs, a row each, then the codes. Its dot product is one sum
// of integers for each run, times d. Inputs are padded to 128 with codes and d of zero.
//
// Source: ggml's block_q*_K, block_iq4_xs and block_q8_0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "gemm/layout.hpp"
#include "gemm/pack.hpp"

namespace ktinject::gemm {

inline constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// The same as unsigned operands of a dot product: 128 more.
inline constexpr int kIq4Offset = 128;

// Inputs of a block in a file.
constexpr int k_file_inputs(Format format) { return format == Format::q8_0 ? 32 : kSuperblock; }

// Bytes of a block in a file; 0 for a format that is no K-quant.
constexpr size_t k_file_bytes(Format format) {
  switch (format) {
    case Format::q2_k:
      return 84;
    case Format::q3_k:
      return 110;
    case Format::q4_k:
      return 144;
    case Format::q5_k:
      return 176;
    case Format::q6_k:
      return 210;
    case Format::iq4_xs:
      return 136;
    case Format::q8_0:
      return 34;
    default:
      return 0;
  }
}

// Rows of a file's blocks: [n] rows, `stride` bytes apart, each with k / k_file_inputs blocks.
struct KSource {
  const uint8_t* data = nullptr;
  int n = 0;
  size_t row_bytes = 0;
  ptrdiff_t stride = 0;
};

// What block `block` of a panel says of weight (column, k), k from 0 to 255; of q8_0 to 127.
class KBlock {
 public:
  KBlock(const Matrix& matrix, const std::byte* panel, int block)
      : format_(matrix.format), data_(panel + static_cast<size_t>(block) * 2 * matrix.tile_bytes()) {}
  float d(int column, int run = 0) const { return half(run * kPanel + column); }  // run: of q8_0
  float m(int column) const { return half(kPanel + column); }
  int s(int column, int run) const;
  int t(int column, int run) const;
  int code(int column, int k) const;  // of iq4_xs: its value; of q8_0 signed
  float value(int column, int k) const;

 private:
  float half(int index) const;
  uint8_t byte(int row, int at) const { return static_cast<uint8_t>(data_[row * 64 + at]); }

  Format format_;
  const std::byte* data_;
};

// Packs rows of blocks, in parallel, code by code. std::domain_error for another format, and for rows of another
// length.
void pack_k_quants(runtime::ThreadPool& workers, const Matrix& matrix, const KSource& source, TileMap place,
                   std::span<const PanelRun> runs, const std::string& what);

}  // namespace ktinject::gemm
