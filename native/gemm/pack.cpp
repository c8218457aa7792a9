#include "gemm/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "gemm/k_quants.hpp"
#include "gemm/kernels/head.hpp"
#include "gemm/packed_tiles.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::gemm {
namespace {

// Of a matrix alone, the last panel may have only its first tile: the second is packed as zeros.
int tiles_of(const Matrix& matrix, TileMap place) { return place == paired_tiles ? 2 * matrix.panels : matrix.panels; }

// Writes the words of one output, each 32 bits of consecutive inputs: along k they lie in the rows of 64 bytes that the
// blocks are made of, word i in row i.
template <class WordAt>
void place_column(const Matrix& matrix, std::byte* panel, int column, int words, WordAt&& word_at) {
  const int rows = static_cast<int>(matrix.tile_bytes() / 64);
  const size_t block_bytes = 2 * matrix.tile_bytes();
  std::byte* block = panel + matrix.head_bytes() + static_cast<size_t>(column / kTile) * matrix.tile_bytes() +
                     static_cast<size_t>(column % kTile) * sizeof(uint32_t);
  for (int first = 0; first < words; first += rows, block += block_bytes)
    for (int row = 0; row < rows; ++row) {
      const uint32_t word = word_at(first + row);
      std::memcpy(block + row * 64, &word, sizeof word);
    }
}

template <class T>
uint32_t word_of(const T* values) {
  uint32_t word;
  std::memcpy(&word, values, sizeof word);
  return word;
}

// codes [padded_k] of one output, one a byte, as checkpoints have them.
void pack_codes(const Matrix& matrix, std::byte* panel, int column, const uint8_t* codes) {
  if (has_e4m3_codes(matrix.format)) {
    place_column(matrix, panel, column, matrix.padded_k() / 4, [&](int i) {
      const uint8_t* c = codes + 4 * i;
      const auto pack = [](uint8_t code) { return static_cast<uint32_t>(Fp8::pack(code)); };
      return pack(c[0]) | pack(c[2]) << 8 | pack(c[1]) << 16 | pack(c[3]) << 24;
    });
    return;
  }
  place_column(matrix, panel, column, matrix.padded_k() / 8, [&](int i) {
    const uint8_t* c = codes + 8 * i;
    uint32_t word = 0;
    for (int j = 0; j < 4; ++j)
      word |= static_cast<uint32_t>(c[2 * j]) << (4 * j) | static_cast<uint32_t>(c[2 * j + 1]) << (16 + 4 * j);
    return word;
  });
}

// Codes and scales of one output [padded_k] of nvfp4, with the factor for which the largest scale is the largest e4m3.
void quantise_nvfp4(const Matrix& matrix, const VectorOps& ops, const float* row, std::byte* panel, int column,
                    uint8_t* codes) {
  const auto groups = static_cast<size_t>(matrix.groups());
  const float factor =
      std::clamp(ops.max_abs(row, matrix.padded_k()) / Nvfp4::kMost, Fp8::kLeastScale, Fp8::kMostScale);
  reinterpret_cast<float*>(panel)[column] = factor;
  std::vector<float> most(groups);
  std::vector<uint8_t> scales(groups);
  for (size_t g = 0; g < groups; ++g) most[g] = ops.max_abs(row + g * kNvfp4Group, kNvfp4Group);
  ops.quantise_fp8(most.data(), matrix.groups(), factor * 6.0f, scales.data());
  for (size_t g = 0; g < groups; ++g) {
    const uint8_t packed = Nvfp4::pack(scales[g]);
    const float scale = Nvfp4::scale(packed) * factor;
    ops.quantise_e2m1(row + g * kNvfp4Group, kNvfp4Group, packed == 0 ? 0.0f : 1.0f / scale, codes + g * kNvfp4Group);
    reinterpret_cast<uint8_t*>(panel)[kFactorsBytes + g * kPanel + static_cast<size_t>(column)] = packed;
  }
}

// One tile's 16 outputs x padded_k inputs, fp32, zero padded. fp8: the tile's scales are there already.
void pack_tile(const Matrix& matrix, const VectorOps& ops, const float* values, std::byte* panel, int second,
               int8_t* quantised) {
  const int padded_k = matrix.padded_k();
  if (matrix.format == Format::bf16) {
    std::vector<uint16_t> row(static_cast<size_t>(padded_k));
    for (int j = 0; j < kTile; ++j) {
      ops.round_row(values + static_cast<size_t>(j) * static_cast<size_t>(padded_k), DType::f32, padded_k, padded_k,
                    row.data());
      place_column(matrix, panel, second * kTile + j, padded_k / 2, [&](int i) { return word_of(row.data() + 2 * i); });
    }
    return;
  }
  for (int j = 0; j < kTile; ++j) {
    const float* row = values + static_cast<size_t>(j) * static_cast<size_t>(padded_k);
    const int column = second * kTile + j;
    if (matrix.format == Format::int8) {
      auto& head = *reinterpret_cast<Int8Head*>(panel);
      const float scale = ops.max_abs(row, padded_k) / 127.0f;
      ops.quantise_int8(row, padded_k, scale, quantised);
      int32_t sum = 0;
      for (int k = 0; k < padded_k; ++k) sum += quantised[k];
      head.scale[column] = scale;
      head.offset[column] = 128 * sum;
      place_column(matrix, panel, column, padded_k / 4, [&](int i) { return word_of(quantised + 4 * i); });
    } else if (matrix.format == Format::int4) {
      auto* levels = reinterpret_cast<float*>(panel);
      auto* scales = reinterpret_cast<uint16_t*>(panel + kInt4ScalesAt);
      auto* zeros = reinterpret_cast<uint8_t*>(panel + int4_zeros_at(matrix.groups()));
      float most = 0;
      for (int g = 0; g < matrix.groups(); ++g) {
        const int start = g * matrix.group_size, length = std::min(matrix.group_size, padded_k - start);
        int8_t* q = quantised + start;
        uint8_t zero = 8;
        uint16_t scale;
        if (matrix.symmetric) {
          scale = ops.quantise_int4(row + start, length, q);
          for (int k = 0; k < length; ++k) q[k] = static_cast<int8_t>(q[k] + 8);
        } else {
          scale = ops.quantise_int4_zero(row + start, length, q, &zero);
          zeros[g * kPanel + column] = zero;
        }
        scales[g * kPanel + column] = scale;
        most = std::max(most, std::abs(bf16_to_float(scale)) * static_cast<float>(std::max<int>(zero, 15 - zero)));
      }
      levels[column] = most / 127.0f;
      place_column(matrix, panel, column, padded_k / 8,
                   [&](int i) { return word_of(quantised + 8 * i) | word_of(quantised + 8 * i + 4) << 4; });
    } else if (matrix.format == Format::fp8_channel) {
      auto* codes = reinterpret_cast<uint8_t*>(quantised);
      const float factor = std::clamp(ops.max_abs(row, padded_k) / Fp8::kMost, Fp8::kLeastScale, Fp8::kMostScale);
      reinterpret_cast<float*>(panel)[column] = factor;
      ops.quantise_fp8(row, padded_k, factor, codes);
      pack_codes(matrix, panel, column, codes);
    } else if (matrix.format == Format::nvfp4) {
      auto* codes = reinterpret_cast<uint8_t*>(quantised);
      quantise_nvfp4(matrix, ops, row, panel, column, codes);
      pack_codes(matrix, panel, column, codes);
    } else {
      auto* codes = reinterpret_cast<uint8_t*>(quantised);
      for (int g = 0; g < matrix.groups(); ++g) {
        const int start = g * matrix.group_size, length = std::min(matrix.group_size, padded_k - start);
        if (matrix.format == Format::fp8) {
          ops.quantise_fp8(row + start, length, fp8_scale(panel, g, second), codes + start);
          continue;
        }
        uint8_t& scale = reinterpret_cast<uint8_t*>(panel)[g * kPanel + column];
        if (matrix.format == Format::mxfp8) {
          scale = Mxfp8::scale_for(ops.max_abs(row + start, length));
          ops.quantise_fp8(row + start, length, e8m0_value(scale), codes + start);
        } else {
          scale = ops.quantise_mxfp4(row + start, length, codes + start);
        }
      }
      pack_codes(matrix, panel, column, codes);
    }
  }
}

void unpack_column(const Matrix& matrix, const std::byte* panel, int column, float* out) {
  if (is_k_quant(matrix.format)) {
    const int inputs = matrix.block();
    for (int k = 0; k < matrix.k; ++k) out[k] = KBlock(matrix, panel, k / inputs).value(column, k % inputs);
    return;
  }
  const std::byte* data = panel + matrix.head_bytes();
  for (int k = 0; k < matrix.k; ++k) {
    const WeightAt at = weight_at(matrix.format, column, k);
    const auto byte = static_cast<uint8_t>(data[at.byte]);
    const int scale = matrix.group_size == 0 ? 0 : scale_at(matrix.format, k / matrix.group_size, column);
    if (matrix.format == Format::int8) {
      out[k] = static_cast<float>(static_cast<int8_t>(byte)) * int8_head(panel).scale[column];
    } else if (matrix.format == Format::int4) {
      const int q = (byte >> at.shift & 15) - (matrix.symmetric ? 8 : int4_zeros(matrix, panel)[scale]);
      out[k] = static_cast<float>(q) * bf16_to_float(int4_scales(panel)[scale]);
    } else {
      uint16_t lane;
      std::memcpy(&lane, data + at.byte, sizeof lane);
      const int code = lane >> at.shift;
      switch (matrix.format) {
        case Format::bf16:
          out[k] = bf16_to_float(lane);
          break;
        case Format::fp8:
          out[k] = Fp8::value(static_cast<uint8_t>(code)) * fp8_scale(panel, k / matrix.group_size, column / kTile);
          break;
        case Format::mxfp8:
          out[k] = Fp8::value(static_cast<uint8_t>(code)) * e8m0_value(e8m0_scales(panel)[scale]);
          break;
        case Format::fp8_channel:
          out[k] = Fp8::value(static_cast<uint8_t>(code)) * factors(panel)[column];
          break;
        case Format::nvfp4:
          out[k] = Mxfp4::value(code & 15) * (Nvfp4::scale(nvfp4_scales(panel)[scale]) * factors(panel)[column]);
          break;
        default:
          out[k] = Mxfp4::value(code & 15) * e8m0_value(e8m0_scales(panel)[scale]);
      }
    }
  }
}

}  // namespace

void check_size(const char* name, int value, int most) {
  if (value < 1 || value > most)
    throw std::invalid_argument(std::string(name) + ": found " + std::to_string(value) + "; allowed: 1 to " +
                                std::to_string(most));
}

void check_format(Format format, int group_size, bool symmetric) {
  if (format == Format::int4 && group_size != 32 && group_size != 64 && group_size != 128)
    throw std::invalid_argument("group_size: found " + std::to_string(group_size) + "; allowed: 32, 64, 128");
  if (format != Format::int4 && !symmetric)
    throw std::invalid_argument("symmetric: found false; only int4 weights have zero points");
}

void check_inputs(const char* name, Format format, int inputs) {
  check_size(name, inputs, kMostInputs);
  if (is_k_quant(format) && inputs % k_file_inputs(format) != 0)
    throw std::invalid_argument(std::string(name) + ": found " + std::to_string(inputs) + "; " + format_name(format) +
                                " comes in blocks of " + std::to_string(k_file_inputs(format)));
}

void pack_matrix(runtime::ThreadPool& workers, const Matrix& matrix, const VectorOps& ops, const Source& source,
                 TileMap place, std::span<const PanelRun> runs, const std::string& what) {
  if (is_k_quant(matrix.format))
    throw std::domain_error(what + ": weights: " + format_name(matrix.format) +
                            " are kept from a GGUF file that has them, and never made from other values");
  const auto padded_k = static_cast<size_t>(matrix.padded_k());
  const size_t element = dtype_bytes(source.dtype);
  const size_t values_bytes = kTile * padded_k * sizeof(float), worker_bytes = values_bytes + padded_k + 64;
  const int tiles = tiles_of(matrix, place);

  std::byte* buffers = workers.buffer(0, static_cast<size_t>(workers.threads()) * worker_bytes);
  auto widen_tile = [&](int t, float* values) {
    for (int j = 0; j < kTile; ++j) {
      float* row = values + static_cast<size_t>(j) * padded_k;
      const int output = t * kTile + j;
      std::fill(row, row + padded_k, 0.0f);
      if (output >= source.n) continue;
      const auto* start =
          static_cast<const std::byte*>(source.data) + output * source.n_stride * static_cast<ptrdiff_t>(element);
      ops.widen(start, source.dtype, source.k_stride, source.k, row);
      // A scale that is not finite would spoil the whole row; bf16 has no scales and keeps what it was given.
      if (matrix.format != Format::bf16 && !std::isfinite(ops.max_abs(row, source.k)))
        throw std::domain_error(what + ": output row " + std::to_string(output) +
                                " holds a NaN or an infinity, so it has no scale");
    }
  };
  auto own = [&](int worker) { return reinterpret_cast<float*>(buffers + static_cast<size_t>(worker) * worker_bytes); };

  // fp8: a scale belongs to eight tiles, so all of them are looked through before the first is packed.
  const auto groups = matrix.format == Format::fp8 ? static_cast<size_t>(matrix.groups()) : 0;
  std::vector<float> most(static_cast<size_t>(tiles) * groups);
  if (groups > 0)
    workers.parallel_for(tiles, [&](int t, int worker) {
      float* values = own(worker);
      widen_tile(t, values);
      for (size_t g = 0; g < groups; ++g)
        for (size_t j = 0; j < kTile; ++j) {
          const size_t start = g * kFp8Block, length = std::min<size_t>(kFp8Block, padded_k - start);
          float& found = most[static_cast<size_t>(t) * groups + g];
          found = std::max(found, ops.max_abs(values + j * padded_k + start, static_cast<int>(length)));
        }
    });
  auto fp8_block_scale = [&](int t, size_t g) {
    constexpr int kTiles = kFp8Block / kTile;
    float found = 0;
    for (int i = t / kTiles * kTiles; i < std::min(tiles, (t / kTiles + 1) * kTiles); ++i)
      found = std::max(found, most[static_cast<size_t>(i) * groups + g]);
    return std::clamp(found / Fp8::kMost, Fp8::kLeastScale, Fp8::kMostScale);
  };

  each_tile(workers, runs, place, [&](int t, int worker) {
    float* values = own(worker);
    widen_tile(t, values);
    const TileAt at = place(t);
    std::byte* panel = panel_of(matrix, runs, at.panel);
    for (size_t g = 0; g < groups; ++g)
      reinterpret_cast<float*>(panel)[g * 2 + static_cast<size_t>(at.second)] = fp8_block_scale(t, g);
    pack_tile(matrix, ops, values, panel, at.second, reinterpret_cast<int8_t*>(values) + values_bytes);
  });
}

namespace {

// The e8m0 code of a scale; -1 for what is no power of two that e8m0 has.
int e8m0_of(float scale) {
  const uint32_t bits = word_of(&scale), exponent = bits >> 23;
  if (bits == 0x00400000u) return 0;  // 2^-127
  return (bits & 0x807fffffu) != 0 || exponent == 0 || exponent == 255 ? -1 : static_cast<int>(exponent);
}

// Rows and columns of the scales that a matrix of the format has in a checkpoint.
std::pair<int, int> fp8_grid(Format format, int n, int k) {
  if (format == Format::fp8_channel) return {n, 1};
  if (format == Format::mxfp8) return {n, (k + kMxGroup - 1) / kMxGroup};
  return {(n + kFp8Block - 1) / kFp8Block, (k + kFp8Block - 1) / kFp8Block};
}

// The scales of tile t, in the head of its panel. Outputs past the last one have codes of zero, and any scale.
void place_fp8_scales(const Matrix& matrix, const Fp8Source& source, int t, std::byte* panel, int second) {
  auto* head = reinterpret_cast<float*>(panel);
  const int columns = source.scale_columns;
  if (matrix.format == Format::fp8) {
    const int row = std::min(t * kTile / kFp8Block, source.scale_rows - 1);
    for (int g = 0; g < columns; ++g) head[g * 2 + second] = source.scales[row * columns + g];
    return;
  }
  for (int j = 0; j < kTile; ++j) {
    const int column = second * kTile + j;
    const float* scales = source.scales + static_cast<ptrdiff_t>(std::min(t * kTile + j, source.n - 1)) * columns;
    if (matrix.format == Format::fp8_channel) head[column] = *scales;
    else
      for (int g = 0; g < columns; ++g)
        reinterpret_cast<uint8_t*>(panel)[g * kPanel + column] = static_cast<uint8_t>(e8m0_of(scales[g]));
  }
}

}  // namespace

void pack_fp8(runtime::ThreadPool& workers, const Matrix& matrix, const Fp8Source& source, TileMap place,
              std::span<const PanelRun> runs, const std::string& what) {
  auto refuse = [&](const std::string& why) { throw std::domain_error(what + ": " + why); };
  if (!has_e4m3_codes(matrix.format))
    refuse(std::string("fp8 codes for ") + format_name(matrix.format) + " weights; decode them first");
  const auto [rows, columns] = fp8_grid(matrix.format, source.n, source.k);
  if (source.scale_rows != rows || source.scale_columns != columns)
    refuse("found scales [" + std::to_string(source.scale_rows) + ", " + std::to_string(source.scale_columns) +
           "]; expected [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
  const bool is_mx = matrix.format == Format::mxfp8;
  for (int i = 0; i < rows * columns; ++i) {
    const float scale = source.scales[i];
    if (is_mx ? e8m0_of(scale) < 0 : !(scale >= Fp8::kLeastScale && scale <= Fp8::kMostScale))
      refuse("the scale of block [" + std::to_string(i / columns) + ", " + std::to_string(i % columns) + "] is " +
             std::to_string(scale) + "; allowed: " + (is_mx ? "powers of two" : "2^-100 to 2^100"));
  }
  const auto padded_k = static_cast<size_t>(matrix.padded_k());
  std::byte* buffers = workers.buffer(0, static_cast<size_t>(workers.threads()) * padded_k);
  each_tile(workers, runs, place, [&](int t, int worker) {
    const TileAt at = place(t);
    std::byte* panel = panel_of(matrix, runs, at.panel);
    place_fp8_scales(matrix, source, t, panel, at.second);
    auto* codes = reinterpret_cast<uint8_t*>(buffers) + static_cast<size_t>(worker) * padded_k;
    for (int j = 0; j < kTile; ++j) {
      const int output = t * kTile + j, column = at.second * kTile + j;
      std::fill(codes, codes + padded_k, uint8_t{0});
      if (output < source.n)
        for (int k = 0; k < source.k; ++k) {
          codes[k] = source.codes[output * source.n_stride + k * source.k_stride];
          if (Fp8::is_nan(codes[k])) refuse("output row " + std::to_string(output) + " holds a NaN");
        }
      for (int g = 0; is_mx && g < columns; ++g) {
        const int scale = e8m0_scales(panel)[g * kPanel + column];
        const bool is_used = std::any_of(codes + g * kMxGroup, codes + (g + 1) * kMxGroup,
                                         [](uint8_t code) { return (code & 0x7f) != 0; });
        if (is_used && (scale < Mxfp8::kLeastScale || scale > Mxfp8::kMostScale))
          refuse("the scale of output row " + std::to_string(output) + ", group " + std::to_string(g) + " is 2^" +
                 std::to_string(scale - 127) + "; allowed: 2^-117 to 2^119. Choose weights: bf16");
      }
      pack_codes(matrix, panel, column, codes);
    }
  });
}

void pack_nvfp4(runtime::ThreadPool& workers, const Matrix& matrix, const Nvfp4Source& source, TileMap place,
                std::span<const PanelRun> runs, const std::string& what) {
  auto refuse = [&](const std::string& why) { throw std::domain_error(what + ": " + why); };
  if (matrix.format != Format::nvfp4)
    refuse(std::string("NVFP4 codes for ") + format_name(matrix.format) + " weights; decode them first");
  if (source.groups != source.k / kNvfp4Group || source.k % kNvfp4Group != 0)
    refuse("found " + std::to_string(source.groups) + " groups for " + std::to_string(source.k) +
           " inputs; 16 share a scale");
  if (!(source.factor >= Fp8::kLeastScale && source.factor <= Fp8::kMostScale))
    refuse("the scale of all is " + std::to_string(source.factor) + "; allowed: 2^-100 to 2^100");
  const auto padded_k = static_cast<size_t>(matrix.padded_k());
  std::byte* buffers = workers.buffer(0, static_cast<size_t>(workers.threads()) * padded_k);
  each_tile(workers, runs, place, [&](int t, int worker) {
    const TileAt at = place(t);
    std::byte* panel = panel_of(matrix, runs, at.panel);
    auto* codes = reinterpret_cast<uint8_t*>(buffers) + static_cast<size_t>(worker) * padded_k;
    for (int j = 0; j < kTile; ++j) {
      const int output = t * kTile + j, column = at.second * kTile + j;
      auto* scales = reinterpret_cast<uint8_t*>(panel) + kFactorsBytes + column;
      reinterpret_cast<float*>(panel)[column] = source.factor;
      std::fill(codes, codes + padded_k, uint8_t{0});
      for (int g = 0; g < matrix.groups(); ++g) {
        const bool is_padding = output >= source.n || g >= source.groups;
        uint8_t scale = is_padding ? 0 : source.scales[output * source.scale_n_stride + g * source.scale_k_stride];
        if (scale == 0x80) scale = 0;
        if (scale > 0x7e)
          refuse("the scale of output row " + std::to_string(output) + ", group " + std::to_string(g) +
                 " is negative or NaN");
        scales[g * kPanel] = Nvfp4::pack(scale);
        if (scale == 0) continue;
        for (int i = 0; i < kNvfp4Group; i += 2) {
          const int k = g * kNvfp4Group + i;
          const uint8_t pair = source.codes[output * source.n_stride + k / 2 * source.k_stride];
          codes[k] = pair & 15;
          codes[k + 1] = pair >> 4;
        }
      }
      pack_codes(matrix, panel, column, codes);
    }
  });
}

void unpack_matrix(runtime::ThreadPool& workers, const Matrix& matrix, std::span<const PanelRun> runs, TileMap place,
                   int n, float* out) {
  workers.parallel_for((n + kTile - 1) / kTile, [&](int t, int) {
    const TileAt at = place(t);
    for (int row = t * kTile; row < std::min(n, (t + 1) * kTile); ++row)
      unpack_column(matrix, panel_of(matrix, runs, at.panel), at.second * kTile + row % kTile,
                    out + static_cast<size_t>(row) * static_cast<size_t>(matrix.k));
  });
}

}  // namespace ktinject::gemm
