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
//                              the high nibbles row 2r+1; a nibble is q + zero, zero 8 where symmetric
//   fp8   block of 32 inputs   8 rows x 64 bytes: the even bytes of row r are row 2r of the bf16 block, the odd bytes
//                              row 2r+1; a byte is e4m3 with its sign moved below the exponent's upper bits, see `Fp8`
//   mxfp4 block of 32 inputs   4 rows x 64 bytes: nibble i of the 16-bit lanes of row r is row 4r+i of the bf16 block;
//                              a nibble is e2m1
//   fp8_channel, mxfp8, nvfp4  blocks as those of fp8, fp8 and mxfp4
//
//   K-quants  block of 256 inputs (q8_0: 128), both tiles together: codes, scales and minima of a GGUF file, see
//             gemm/k_quants.hpp
//
//   panel = [head][block 0: tile 0, tile 1][block 1: tile 0, tile 1]...
//   head    bf16, K-quants: none
//           int8: float scale[32], int32 offset[32]; offset = 128 * sum of the column, see `PackedActivations`
//           int4: float level[32], bf16 scale[groups][32], and if not symmetric uint8 zero[groups][32];
//                 groups = ceil(k / group_size)
//           fp8: float scale[groups][2], one for each tile and 128 inputs; the 128 outputs of a block share it
//           mxfp4: uint8 scale[groups][32], e8m0: 2^(scale - 127), one for each output and 32 inputs
//           mxfp8: scales as those of mxfp4
//           fp8_channel: float factor[32]
//           nvfp4: float factor[32], uint8 scale[groups][32], one for each output and 16 inputs, see `Nvfp4`
//
// The level of an int4 column is its largest |(q - zero) * scale| / 127 that could be: with it, (q - zero) * scale /
// level fits int8, for kernels that run whole chains of int8.
// fp8, mxfp4 and mxfp8 weights are multiplied as bf16: code * scale, rounded to bf16 (which only fp8 needs). So are
// those of fp8_channel and nvfp4, without the factor: code, and code * scale, fit bf16, and the factor multiplies the
// sums. n and k are padded with zeros. Source: the tile shapes are Intel's (Architecture Instruction Set Extensions,
// AMX); one layout that AMX and AVX-512 share is described by KTransformers (SOSP'25).
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "runtime/host_device.hpp"

namespace ktinject::gemm {

enum class Format {
  bf16,
  int8,
  int4,
  fp8,
  mxfp4,
  fp8_channel,
  nvfp4,
  mxfp8,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_xs,
  q8_0
};

struct FormatName {
  Format format;
  const char* name;
};
inline constexpr FormatName kFormatNames[] = {
    {Format::bf16, "bf16"},   {Format::int8, "int8"},     {Format::int4, "int4"},
    {Format::fp8, "fp8"},     {Format::mxfp4, "mxfp4"},   {Format::fp8_channel, "fp8_channel"},
    {Format::nvfp4, "nvfp4"}, {Format::mxfp8, "mxfp8"},   {Format::q2_k, "q2_k"},
    {Format::q3_k, "q3_k"},   {Format::q4_k, "q4_k"},     {Format::q5_k, "q5_k"},
    {Format::q6_k, "q6_k"},   {Format::iq4_xs, "iq4_xs"}, {Format::q8_0, "q8_0"}};
inline constexpr int kFormats = std::size(kFormatNames);
inline const char* format_name(Format format) { return kFormatNames[static_cast<int>(format)].name; }

// The K-quants, and IQ4_XS and Q8_0, which are kept like them.
KTINJECT_HOST_DEVICE constexpr bool is_k_quant(Format format) { return format >= Format::q2_k; }

// Whether activations are int8 with scales; for the other formats they are bf16.
KTINJECT_HOST_DEVICE constexpr bool has_int8_rows(Format format) {
  return format == Format::int8 || format == Format::int4 || is_k_quant(format);
}
// Whether kernels want the sums of the activations over each group of inputs.
constexpr bool has_group_sums(Format format) { return format == Format::int4 || is_k_quant(format); }
// Whether a panel's head begins with a factor for each output, which multiplies its sums.
KTINJECT_HOST_DEVICE constexpr bool has_factors(Format format) {
  return format == Format::fp8_channel || format == Format::nvfp4;
}
// Whether codes are e4m3, in blocks as fp8 has them.
KTINJECT_HOST_DEVICE constexpr bool has_e4m3_codes(Format format) {
  return format == Format::fp8 || format == Format::fp8_channel || format == Format::mxfp8;
}
// Whether scales are e8m0, one for each output and 32 inputs.
KTINJECT_HOST_DEVICE constexpr bool has_e8m0_scales(Format format) {
  return format == Format::mxfp4 || format == Format::mxfp8;
}
// Whether a scale is for a whole row, of which outliers are taken out.
constexpr bool has_outliers(Format format) { return format == Format::int8 || format == Format::int4; }

inline constexpr int kTile = 16;
inline constexpr int kPanel = 2 * kTile;

inline constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Outputs and inputs that share a scale in fp8.
inline constexpr int kFp8Block = 128;
// Inputs that share a scale in mxfp4 and mxfp8.
inline constexpr int kMxGroup = 32;
// The same in nvfp4.
inline constexpr int kNvfp4Group = 16;

// Inputs of a block of a K-quant, and of an activation's scale beside them.
inline constexpr int kSuperblock = 256;
// The same of q8_0: four blocks of a file. Widths that are no multiple of it are padded.
inline constexpr int kQ8Inputs = 128;
KTINJECT_HOST_DEVICE constexpr int k_inputs(Format format) { return format == Format::q8_0 ? kQ8Inputs : kSuperblock; }

// A K-quant: bits of its codes that lie together, those above them (0: none), inputs of a run, which share s and t;
// whether there are m and t; what is taken off a code.
struct KQuant {
  int low;
  int high;
  int run;
  bool has_min;
  int zero;
};
KTINJECT_HOST_DEVICE constexpr KQuant k_quant(Format format) {
  switch (format) {
    case Format::q2_k:
      return {2, 0, 16, true, 0};
    case Format::q3_k:
      return {2, 1, 16, false, 4};
    case Format::q4_k:
      return {4, 0, 32, true, 0};
    case Format::q5_k:
      return {4, 1, 32, true, 0};
    case Format::q6_k:
      return {4, 2, 16, false, 32};
    case Format::q8_0:
      return {8, 0, 32, false, 0};
    default:  // iq4_xs
      return {4, 0, 32, false, 0};
  }
}
// Rows of 64 bytes of a block of both tiles: d and m, or d of each run; s, or s and t; 32 inputs of a tile; all.
KTINJECT_HOST_DEVICE constexpr int k_factor_rows(Format format) {
  if (format == Format::q8_0) return kQ8Inputs / k_quant(format).run;
  return k_quant(format).has_min ? 2 : 1;
}
KTINJECT_HOST_DEVICE constexpr int k_scale_rows(Format format) {
  return format == Format::q8_0 ? 0 : kSuperblock / k_quant(format).run / 2;
}
KTINJECT_HOST_DEVICE constexpr int k_head_rows(Format format) {
  const bool apart = k_quant(format).has_min && format != Format::q2_k;
  return k_factor_rows(format) + k_scale_rows(format) * (apart ? 2 : 1);
}
KTINJECT_HOST_DEVICE constexpr int k_code_rows(Format format) { return k_quant(format).low + k_quant(format).high; }
KTINJECT_HOST_DEVICE constexpr int k_block_rows(Format format) {
  return k_head_rows(format) + 2 * (k_inputs(format) / 32) * k_code_rows(format);
}

// Inputs that share a scale: int4 has the choice; 0 where that is all of them.
inline constexpr int scale_group(Format format, int group_size) {
  return format == Format::fp8     ? kFp8Block
         : has_e8m0_scales(format) ? kMxGroup
         : format == Format::nvfp4 ? kNvfp4Group
         : is_k_quant(format)      ? k_quant(format).run
                                   : group_size;
}

// Inputs of a block, and bytes of one tile of it.
KTINJECT_HOST_DEVICE constexpr int block_inputs(Format format) {
  return is_k_quant(format) ? k_inputs(format) : has_int8_rows(format) ? 64 : 32;
}
KTINJECT_HOST_DEVICE constexpr size_t tile_bytes(Format format) {
  if (is_k_quant(format)) return static_cast<size_t>(k_block_rows(format)) * 32;
  if (format == Format::mxfp4 || format == Format::nvfp4) return 256;
  return format == Format::int4 || has_e4m3_codes(format) ? 512 : 1024;
}

// Where the weight of output `column` of a panel and input k lies: bytes after the panel's head, and the bit it starts
// at. fp8, mxfp4 and their like: of a 16-bit lane.
struct WeightAt {
  size_t byte;
  int shift;
};
KTINJECT_HOST_DEVICE constexpr WeightAt weight_at(Format format, int column, int k) {
  const int within = k % block_inputs(format), j = column % kTile;
  const size_t tile =
      (static_cast<size_t>(k / block_inputs(format)) * 2 + static_cast<size_t>(column / kTile)) * tile_bytes(format);
  if (format == Format::int8) return {tile + static_cast<size_t>(within / 4 * 64 + j * 4 + within % 4), 0};
  if (format == Format::int4)
    return {tile + static_cast<size_t>(within / 8 * 64 + j * 4 + within % 4), within % 8 < 4 ? 0 : 4};
  const int rows = static_cast<int>(1024 / tile_bytes(format));  // of the bf16 block in a packed one
  const int row = within / 2;
  return {tile + static_cast<size_t>(row / rows * 64 + j * 4 + within % 2 * 2), row % rows * 16 / rows};
}

// In the head. Of int4: bytes before the scales and, of a matrix with zero points, before them.
inline constexpr size_t kInt4ScalesAt = kPanel * sizeof(float);
KTINJECT_HOST_DEVICE constexpr size_t int4_zeros_at(int groups) {
  return kInt4ScalesAt + static_cast<size_t>(groups) * kPanel * sizeof(uint16_t);
}
// Of factors, in bytes.
inline constexpr size_t kFactorsBytes = kPanel * sizeof(float);
// Which scale (int4: and zero point) an output's weights of a group have.
KTINJECT_HOST_DEVICE constexpr int scale_at(Format format, int group, int column) {
  return format == Format::fp8 ? group * 2 + column / kTile : group * kPanel + column;
}

// Shape of one packed matrix; the same for every expert of a layer.
struct Matrix {
  Format format = Format::bf16;
  int n = 0;           // outputs: columns of all tiles, padding left out
  int k = 0;           // inputs
  int group_size = 0;  // inputs a scale: int4, fp8, mxfp4, mxfp8, nvfp4, K-quants
  int panels = 0;
  bool symmetric = true;  // int4: no zero points

  int block() const { return block_inputs(format); }
  int padded_k() const { return round_up(k, block()); }
  int blocks() const { return padded_k() / block(); }
  int groups() const { return (padded_k() + group_size - 1) / group_size; }
  size_t tile_bytes() const { return gemm::tile_bytes(format); }
  size_t head_bytes() const {
    if (format == Format::bf16 || is_k_quant(format)) return 0;
    if (format == Format::int8) return kPanel * (sizeof(float) + sizeof(int32_t));
    if (format == Format::fp8_channel) return kFactorsBytes;
    const auto g = static_cast<size_t>(groups());
    const size_t bytes = format == Format::fp8     ? g * 2 * sizeof(float)
                         : has_e8m0_scales(format) ? g * kPanel
                         : format == Format::nvfp4 ? kFactorsBytes + g * kPanel
                                                   : kPanel * sizeof(float) + g * kPanel * (symmetric ? 2 : 3);
    return (bytes + 63) / 64 * 64;
  }
  size_t panel_bytes() const { return head_bytes() + static_cast<size_t>(blocks()) * 2 * tile_bytes(); }
  size_t bytes() const { return static_cast<size_t>(panels) * panel_bytes(); }
  // Scales of a row of activations; int8 and int4 have one.
  int row_scales() const { return is_k_quant(format) ? blocks() : 1; }
  size_t row_bytes() const { return static_cast<size_t>(padded_k()) * (has_int8_rows(format) ? 1 : 2); }
};

// The values of a row that are multiplied apart from its int8 values, in fp32, where they count as zero. One scale a
// row gives a row with a few large values steps as large as these need, and published models have such channels. So n
// more values are taken out of a row if its scale becomes n times smaller without them; see `quantise_row`.
// Source: the decomposition of Dettmers et al., LLM.int8() (arXiv 2208.07339), with a threshold of the row's own.
struct Outliers {
  static constexpr int kMost = 16;
  static constexpr int kLeastInputs = 16;  // of a row, for each outlier

  int32_t count = 0;
  uint16_t at[kMost];  // ascending
  float value[kMost];
};

// Activations as a kernel takes them, padded with zeros to padded_k(). Rows come in groups of 16 (the last may be
// smaller), one group after the other; a group is cut along k like the weights: for each block of 64 bytes, that block
// of each of its rows. So the A operand of an AMX instruction is one contiguous run of at most 1 KiB, and a single row
// is simply contiguous.
//
//   bf16, fp8, mxfp4 and their like  bf16
//   int8  uint8 = q + 128, q in [-127, 127]. The unsigned operand is what the dot product instructions want; the 128 it
//   adds to
//         every product is 128 * sum of the weight column, folded into the panel's offset when packing
//   int4  int8 = q; the weights are the unsigned operand there (nibble = q + zero), and zero * sum of the row's group
//   is taken off
//   K-quants  int8 = q, with a scale for each 256 inputs, as ggml has it; q8_0: for each 128
struct PackedActivations {
  const std::byte* data = nullptr;
  size_t row_bytes = 0;
  int m = 0;
  const float* scale = nullptr;        // [m, scales], int8, int4 and K-quants
  const int32_t* group_sum = nullptr;  // [m, groups], int4 and K-quants: sums of q over each group
  const Outliers* outliers = nullptr;  // [m], int8 and int4: whoever calls the kernel adds them to its results
  int scales = 1;                      // of a row

  const std::byte* group(int first) const { return data + static_cast<size_t>(first) * row_bytes; }
  int group_rows(int first) const { return m - first < kTile ? m - first : kTile; }
  // `count` rows from a multiple of 16 on: they are laid out like rows of their own.
  PackedActivations part(int first, int count, int groups) const {
    const auto at = static_cast<size_t>(first);
    return {group(first),
            row_bytes,
            count,
            scale == nullptr ? nullptr : scale + at * static_cast<size_t>(scales),
            group_sum == nullptr ? nullptr : group_sum + at * static_cast<size_t>(groups),
            outliers == nullptr ? nullptr : outliers + at,
            scales};
  }
};

// Writes one row, contiguous, to its place among m grouped rows.
inline void place_row(std::byte* rows, size_t row_bytes, int m, int row, const std::byte* from) {
  const int first = row / kTile * kTile, height = m - first < kTile ? m - first : kTile;
  std::byte* to = rows + static_cast<size_t>(first) * row_bytes + static_cast<size_t>(row - first) * 64;
  for (size_t at = 0; at < row_bytes; at += 64, to += static_cast<size_t>(height) * 64)
    __builtin_memcpy(to, from + at, 64);
}

}  // namespace ktinject::gemm
