// Integers of a checkpoint to packed panels, code by code.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "gemm/kernels/head.hpp"
#include "gemm/pack.hpp"
#include "gemm/packed_tiles.hpp"

namespace ktinject::gemm {
namespace {

constexpr uint8_t kMiddle4 = 8;

// What one output has; nothing, if it is padding: then its weights are zero.
struct Row {
  uint8_t* codes;  // [padded_k]; those past the last input are not looked at
  const float* scales;
  const uint8_t* zeros;
  int groups;
};

void pack_int4_column(const Matrix& matrix, std::byte* panel, int column, const Row& row) {
  auto* levels = reinterpret_cast<float*>(panel);
  auto* packed_scales = reinterpret_cast<uint16_t*>(panel + kInt4ScalesAt);
  auto* packed_zeros = reinterpret_cast<uint8_t*>(panel + int4_zeros_at(matrix.groups()));
  float most = 0;
  for (int g = 0; g < matrix.groups(); ++g) {
    const int start = g * matrix.group_size, end = std::min(start + matrix.group_size, matrix.padded_k());
    const bool is_padding = g >= row.groups;
    const uint8_t zero = row.zeros == nullptr || is_padding ? kMiddle4 : row.zeros[g];
    const uint16_t scale = is_padding ? uint16_t{0} : float_to_bf16(row.scales[g]);
    for (int k = is_padding ? start : std::max(start, matrix.k); k < end; ++k) row.codes[k] = zero;
    packed_scales[g * kPanel + column] = scale;
    if (!matrix.symmetric) packed_zeros[g * kPanel + column] = zero;
    most = std::max(most, std::abs(bf16_to_float(scale)) * static_cast<float>(std::max<int>(zero, 15 - zero)));
  }
  levels[column] = most / 127.0f;
  std::byte* data = panel + matrix.head_bytes();
  for (int k = 0; k < matrix.padded_k(); k += 8)
    for (int i = 0; i < 4; ++i)
      data[weight_at(matrix.format, column, k + i).byte] =
          static_cast<std::byte>(row.codes[k + i] | row.codes[k + 4 + i] << 4);
}

void pack_int8_column(const Matrix& matrix, std::byte* panel, int column, const Row& row) {
  auto& head = *reinterpret_cast<Int8Head*>(panel);
  uint8_t* codes = row.codes;
  std::fill(codes + (row.groups == 0 ? 0 : matrix.k), codes + matrix.padded_k(), uint8_t{128});
  int32_t sum = 0;
  for (int k = 0; k < matrix.padded_k(); ++k) {
    codes[k] ^= 128;  // as int8
    sum += static_cast<int8_t>(codes[k]);
  }
  head.scale[column] = row.groups == 0 ? 0.0f : row.scales[0];
  head.offset[column] = 128 * sum;
  std::byte* data = panel + matrix.head_bytes();
  for (int k = 0; k < matrix.padded_k(); k += 4)
    std::memcpy(data + weight_at(matrix.format, column, k).byte, codes + k, 4);
}

void check(const Matrix& matrix, const IntegerSource& source, const std::string& what) {
  auto refuse = [&](const std::string& why) { throw std::domain_error(what + ": " + why); };
  if (matrix.format != Format::int4 && matrix.format != Format::int8)
    refuse(std::string("integers for ") + format_name(matrix.format) + " weights; decode them first");
  const int groups = matrix.format == Format::int8 ? 1 : (matrix.k + matrix.group_size - 1) / matrix.group_size;
  if (source.groups != groups)
    refuse("found " + std::to_string(source.groups) + " groups; expected " + std::to_string(groups));
  if (source.zeros != nullptr && (matrix.format == Format::int8 || matrix.symmetric))
    refuse("found zero points; these weights have none");
  const int most = matrix.format == Format::int4 ? 15 : 255;
  for (int row = 0; row < source.n; ++row) {
    for (int g = 0; g < groups; ++g) {
      const float scale = source.scales[row * source.row_stride + g];
      if (!std::isfinite(scale)) refuse("the scale of output row " + std::to_string(row) + " is not finite");
      if (source.zeros != nullptr && source.zeros[row * source.row_stride + g] > most)
        refuse("the zero point of output row " + std::to_string(row) + " is above " + std::to_string(most));
    }
  }
}

}  // namespace

void pack_integers(runtime::ThreadPool& workers, const Matrix& matrix, const IntegerSource& source, TileMap place,
                   std::span<const PanelRun> runs, const std::string& what) {
  check(matrix, source, what);
  const auto padded_k = static_cast<size_t>(matrix.padded_k());
  const int most = matrix.format == Format::int4 ? 15 : 255;
  std::byte* buffers = workers.buffer(0, static_cast<size_t>(workers.threads()) * padded_k);
  each_tile(workers, runs, place, [&](int t, int worker) {
    const TileAt at = place(t);
    std::byte* panel = panel_of(matrix, runs, at.panel);
    auto* codes = reinterpret_cast<uint8_t*>(buffers) + static_cast<size_t>(worker) * padded_k;
    for (int j = 0; j < kTile; ++j) {
      const int output = t * kTile + j, column = at.second * kTile + j;
      Row row{codes, nullptr, nullptr, 0};
      if (output < source.n) {
        for (int k = 0; k < source.k; ++k) codes[k] = source.codes[output * source.n_stride + k * source.k_stride];
        if (*std::max_element(codes, codes + source.k) > most)
          throw std::domain_error(what + ": a code of output row " + std::to_string(output) + " is above " +
                                  std::to_string(most));
        row.scales = source.scales + output * source.row_stride;
        row.zeros = source.zeros == nullptr ? nullptr : source.zeros + output * source.row_stride;
        row.groups = source.groups;
      }
      if (matrix.format == Format::int4) pack_int4_column(matrix, panel, column, row);
      else pack_int8_column(matrix, panel, column, row);
    }
  });
}

}  // namespace ktinject::gemm
