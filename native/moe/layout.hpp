// How packed weights lie in memory. The same layout serves every ISA of a format, and does not depend on the number of
// threads or NUMA nodes.
//
// A matrix of n outputs and k inputs is cut into panels of 32 outputs. A panel is two tiles side by side, each 16
// outputs wide; for the fused gate+up matrix the first tile is 16 gate columns and the second the matching 16 up
// columns, so that one pass over a panel ends with everything the activation needs. Along k a panel is a run of blocks;
// a block of one tile is the B operand of one AMX instruction and, row by row, the operand of the AVX-512 dot products:
//
//   bf16  block of 32 inputs  16 rows x 64 bytes: row r holds inputs 2r, 2r+1 of output 0, of output 1, ...
//   int8  block of 64 inputs  16 rows x 64 bytes: row r holds inputs 4r..4r+3 of output 0, of output 1, ...
//   int4  block of 64 inputs   8 rows x 64 bytes: the low nibbles of row r are row 2r of the int8 block,
//                              the high nibbles row 2r+1; a nibble is q + 8, q in [-8, 7]
//
//   panel = [head][block 0: tile 0, tile 1][block 1: tile 0, tile 1]...
//   head    bf16: none
//           int8: float scale[32], int32 offset[32]; offset = 128 * sum of the column, see `Rows`
//           int4: float level[32], bf16 scale[groups][32]; groups = ceil(k / group_size)
//
// The level of an int4 column is its largest |scale| * 8 / 127: with it, q * scale / level fits int8, for kernels that
// run whole chains of int8.
// n and k are padded with zeros. Source: the tile shapes are Intel's (Architecture Instruction Set Extensions, AMX);
// one layout that AMX and AVX-512 share is described by KTransformers (SOSP'25).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktinject {

enum class Format { bf16, int8, int4 };

inline constexpr int kTile = 16;
inline constexpr int kPanel = 2 * kTile;

inline constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Shape of one packed matrix; the same for every expert of a layer.
struct Matrix {
  Format format = Format::bf16;
  int n = 0;           // outputs: columns of all tiles, padding left out
  int k = 0;           // inputs
  int group_size = 0;  // int4: inputs a scale
  int panels = 0;

  int block() const { return format == Format::bf16 ? 32 : 64; }
  int padded_k() const { return round_up(k, block()); }
  int blocks() const { return padded_k() / block(); }
  int groups() const { return (padded_k() + group_size - 1) / group_size; }
  size_t tile_bytes() const { return format == Format::int4 ? 512 : 1024; }
  size_t head_bytes() const {
    if (format == Format::int8) return kPanel * (sizeof(float) + sizeof(int32_t));
    if (format == Format::int4)
      return kPanel * sizeof(float) + static_cast<size_t>(groups()) * kPanel * sizeof(uint16_t);
    return 0;
  }
  size_t panel_bytes() const { return head_bytes() + static_cast<size_t>(blocks()) * 2 * tile_bytes(); }
  size_t bytes() const { return static_cast<size_t>(panels) * panel_bytes(); }
  size_t row_bytes() const { return static_cast<size_t>(padded_k()) * (format == Format::bf16 ? 2 : 1); }
};

// Activations as a kernel takes them, padded with zeros to padded_k(). Rows come in groups of 16 (the last may be
// smaller), one group after the other; a group is cut along k like the weights: for each block of 64 bytes, that block
// of each of its rows. So the A operand of an AMX instruction is one contiguous run of at most 1 KiB, and a single row
// is simply contiguous.
//
//   bf16  bf16
//   int8  uint8 = q + 128, q in [-127, 127]. The unsigned operand is what the dot product instructions want; the 128 it
//   adds to
//         every product is 128 * sum of the weight column, folded into the panel's offset when packing
//   int4  int8 = q; the weights are the unsigned operand there (nibble = q + 8), and 8 * sum of the row's group is
//   taken off
struct Rows {
  const std::byte* data = nullptr;
  size_t row_bytes = 0;
  int m = 0;
  const float* scale = nullptr;        // [m], int8 and int4
  const int32_t* group_sum = nullptr;  // [m, groups], int4: sums of q over each group

  const std::byte* group(int first) const { return data + static_cast<size_t>(first) * row_bytes; }
  int group_rows(int first) const { return m - first < kTile ? m - first : kTile; }
};

// Writes one row, contiguous, to its place among m grouped rows.
inline void place_row(std::byte* rows, size_t row_bytes, int m, int row, const std::byte* from) {
  const int first = row / kTile * kTile, height = m - first < kTile ? m - first : kTile;
  std::byte* to = rows + static_cast<size_t>(first) * row_bytes + static_cast<size_t>(row - first) * 64;
  for (size_t at = 0; at < row_bytes; at += 64, to += static_cast<size_t>(height) * 64)
    __builtin_memcpy(to, from + at, 64);
}

}  // namespace ktinject
