#include "moe/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "moe/experts.hpp"
#include "moe/kernels/head.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject {
namespace {

const char* name_of(Projection projection) {
  return projection == Projection::gate ? "gate" : projection == Projection::up ? "up" : "down";
}

// Where a projection's outputs lie.
TileMap tiles_of(const ExpertsConfig& config, Projection projection) {
  if (projection == Projection::down || !config.activation.has_gate) return paired_tiles;
  return projection == Projection::up ? second_tiles : first_tiles;
}

std::string title(Projection projection, int expert) {
  return "expert " + std::to_string(expert) + ", " + name_of(projection);
}

// One tile's 16 outputs x padded_k inputs, fp32, zero padded; `rows` of the outputs exist.
void pack_tile(const Matrix& matrix, const Stages& stages, const float* values, std::byte* panel, int second,
               int8_t* quantised) {
  const int padded_k = matrix.padded_k();
  std::byte* data = panel + matrix.head_bytes() + static_cast<size_t>(second) * matrix.tile_bytes();
  const size_t block_stride = 2 * matrix.tile_bytes();
  if (matrix.format == Format::bf16) {
    std::vector<uint16_t> row(static_cast<size_t>(padded_k));
    for (int j = 0; j < kTile; ++j) {
      stages.round_row(values + static_cast<size_t>(j) * static_cast<size_t>(padded_k), DType::f32, padded_k, padded_k,
                       row.data());
      for (int k = 0; k < padded_k; k += 2)
        std::memcpy(data + static_cast<size_t>(k / 32) * block_stride + static_cast<size_t>(k % 32 / 2 * 64 + j * 4),
                    row.data() + k, 4);
    }
    return;
  }
  for (int j = 0; j < kTile; ++j) {
    const float* row = values + static_cast<size_t>(j) * static_cast<size_t>(padded_k);
    const int column = second * kTile + j;
    if (matrix.format == Format::int8) {
      auto& head = *reinterpret_cast<Int8Head*>(panel);
      const float scale = stages.max_abs(row, padded_k) / 127.0f;
      stages.quantise_int8(row, padded_k, scale, quantised);
      int32_t sum = 0;
      for (int k = 0; k < padded_k; ++k) sum += quantised[k];
      head.scale[column] = scale;
      head.offset[column] = 128 * sum;
      for (int k = 0; k < padded_k; k += 4)
        std::memcpy(data + static_cast<size_t>(k / 64) * block_stride + static_cast<size_t>(k % 64 / 4 * 64 + j * 4),
                    quantised + k, 4);
    } else {
      auto* levels = reinterpret_cast<float*>(panel);
      auto* scales = reinterpret_cast<uint16_t*>(levels + kPanel);
      float most = 0;
      for (int g = 0; g < matrix.groups(); ++g) {
        const int start = g * matrix.group_size, length = std::min(matrix.group_size, padded_k - start);
        const uint16_t scale = stages.quantise_int4(row + start, length, quantised + start);
        scales[g * kPanel + column] = scale;
        most = std::max(most, std::abs(bf16_to_float(scale)));
      }
      levels[column] = most * 8.0f / 127.0f;
      for (int k = 0; k < padded_k; k += 8)
        for (int i = 0; i < 4; ++i)
          data[static_cast<size_t>(k / 64) * block_stride + static_cast<size_t>(k % 64 / 8 * 64 + j * 4 + i)] =
              static_cast<std::byte>((quantised[k + i] + 8) | (quantised[k + 4 + i] + 8) << 4);
    }
  }
}

void unpack_column(const Matrix& matrix, const std::byte* panel, int column, float* out) {
  const std::byte* data = panel + matrix.head_bytes() + static_cast<size_t>(column / kTile) * matrix.tile_bytes();
  const size_t block_stride = 2 * matrix.tile_bytes();
  const int j = column % kTile;
  for (int k = 0; k < matrix.k; ++k) {
    if (matrix.format == Format::bf16) {
      uint16_t bits;
      std::memcpy(
          &bits,
          data + static_cast<size_t>(k / 32) * block_stride + static_cast<size_t>(k % 32 / 2 * 64 + j * 4 + k % 2 * 2),
          2);
      out[k] = bf16_to_float(bits);
    } else if (matrix.format == Format::int8) {
      const auto q = static_cast<int8_t>(
          data[static_cast<size_t>(k / 64) * block_stride + static_cast<size_t>(k % 64 / 4 * 64 + j * 4 + k % 4)]);
      out[k] = static_cast<float>(q) * int8_head(panel).scale[column];
    } else {
      const auto pair = static_cast<uint8_t>(
          data[static_cast<size_t>(k / 64) * block_stride + static_cast<size_t>(k % 64 / 8 * 64 + j * 4 + k % 4)]);
      const int q = (k % 8 < 4 ? pair & 15 : pair >> 4) - 8;
      out[k] = static_cast<float>(q) * bf16_to_float(int4_scales(panel)[k / matrix.group_size * kPanel + column]);
    }
  }
}

}  // namespace

void pack_matrix(const Matrix& matrix, const Stages& stages, const Source& source, TileMap place, std::byte* panels,
                 const std::string& what) {
  const auto padded_k = static_cast<size_t>(matrix.padded_k());
  const size_t element = dtype_bytes(source.dtype);
  const size_t values_bytes = kTile * padded_k * sizeof(float), worker_bytes = values_bytes + padded_k + 64;
  // Of a matrix alone, the last panel may have only its first tile: the second is packed as zeros.
  const int tiles = place == paired_tiles ? 2 * matrix.panels : matrix.panels;

  const auto workers = pool();
  const auto session = workers->session();
  std::byte* buffers = workers->buffer(0, static_cast<size_t>(workers->threads()) * worker_bytes);
  workers->parallel_for(tiles, [&](int t, int worker) {
    auto* values = reinterpret_cast<float*>(buffers + static_cast<size_t>(worker) * worker_bytes);
    auto* quantised = reinterpret_cast<int8_t*>(values) + values_bytes;
    for (int j = 0; j < kTile; ++j) {
      float* row = values + static_cast<size_t>(j) * padded_k;
      const int output = t * kTile + j;
      std::fill(row, row + padded_k, 0.0f);
      if (output >= source.n) continue;
      const auto* start =
          static_cast<const std::byte*>(source.data) + output * source.n_stride * static_cast<ptrdiff_t>(element);
      stages.widen(start, source.dtype, source.k_stride, source.k, row);
      // A scale that is not finite would spoil the whole row; bf16 has no scales and keeps what it was given.
      if (matrix.format != Format::bf16 && !std::isfinite(stages.max_abs(row, source.k)))
        throw std::domain_error(what + ": output row " + std::to_string(output) +
                                " holds a NaN or an infinity, so it has no scale");
    }
    const TileAt at = place(t);
    pack_tile(matrix, stages, values, panels + static_cast<size_t>(at.panel) * matrix.panel_bytes(), at.second,
              quantised);
  });
}

void unpack_matrix(const Matrix& matrix, const std::byte* panels, TileMap place, int n, float* out) {
  const auto workers = pool();
  const auto session = workers->session();
  workers->parallel_for((n + kTile - 1) / kTile, [&](int t, int) {
    const TileAt at = place(t);
    for (int row = t * kTile; row < std::min(n, (t + 1) * kTile); ++row)
      unpack_column(matrix, panels + static_cast<size_t>(at.panel) * matrix.panel_bytes(),
                    at.second * kTile + row % kTile, out + static_cast<size_t>(row) * static_cast<size_t>(matrix.k));
  });
}

int Experts::rows_of(Projection projection) const {
  return projection == Projection::down ? config_.hidden_size : config_.intermediate_size;
}
int Experts::inputs_of(Projection projection) const {
  return projection == Projection::down ? config_.intermediate_size : config_.hidden_size;
}

void Experts::check(Projection projection, int expert, const Source& source, bool bias) const {
  auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(title(projection, expert) + (bias ? " bias" : "") + ": " + why);
  };
  if (gate_up_data_.data() == nullptr) refuse("allocate() was not called");
  if (expert < 0 || expert >= config_.experts)
    refuse("there is no such expert; allowed: 0 to " + std::to_string(config_.experts - 1));
  if (projection == Projection::gate && !config_.activation.has_gate) refuse("these experts have no gate; use up");
  if (bias && !config_.has_bias) refuse("these experts were built without biases");
  const int n = rows_of(projection), k = bias ? 1 : inputs_of(projection);
  if (source.n != n || source.k != k)
    refuse("found shape [" + std::to_string(source.n) + ", " + std::to_string(source.k) + "]; expected [" +
           std::to_string(n) + ", " + std::to_string(k) + "]");
}

void Experts::load(Projection projection, int expert, const Source& source) {
  check(projection, expert, source, false);
  const Matrix& matrix = projection == Projection::down ? down_ : gate_up_;
  const Block& block = projection == Projection::down ? down_data_ : gate_up_data_;
  pack_matrix(matrix, *stages_, source, tiles_of(config_, projection),
              block.data() + static_cast<size_t>(expert) * matrix.bytes(), title(projection, expert));
  loaded_[(static_cast<size_t>(expert) * 3 + static_cast<size_t>(projection)) * 2] = 1;
}

void Experts::load_bias(Projection projection, int expert, const Source& source) {
  check(projection, expert, source, true);
  const Matrix& matrix = projection == Projection::down ? down_ : gate_up_;
  auto* bias = reinterpret_cast<float*>((projection == Projection::down ? down_bias_ : gate_up_bias_).data()) +
               static_cast<size_t>(expert) * static_cast<size_t>(matrix.panels) * kPanel;
  const TileMap place = tiles_of(config_, projection);
  std::vector<float> values(static_cast<size_t>(source.n));
  stages_->widen(source.data, source.dtype, source.n_stride, source.n, values.data());
  for (int n = 0; n < source.n; ++n) {
    const TileAt at = place(n / kTile);
    bias[at.panel * kPanel + at.second * kTile + n % kTile] = values[static_cast<size_t>(n)];
  }
  loaded_[(static_cast<size_t>(expert) * 3 + static_cast<size_t>(projection)) * 2 + 1] = 1;
}

std::vector<std::string> Experts::absent(size_t limit) const {
  std::vector<std::string> names;
  for (int expert = 0; expert < config_.experts; ++expert)
    for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
      if (projection == Projection::gate && !config_.activation.has_gate) continue;
      const size_t at = (static_cast<size_t>(expert) * 3 + static_cast<size_t>(projection)) * 2;
      const std::string name = "expert " + std::to_string(expert) + " " + name_of(projection);
      if (!loaded_[at]) names.push_back(name);
      if (config_.has_bias && !loaded_[at + 1]) names.push_back(name + " bias");
      if (names.size() >= limit) return names;
    }
  return names;
}

void Experts::unpack(Projection projection, int expert, float* out) const {
  Source shape;
  shape.n = rows_of(projection);
  shape.k = inputs_of(projection);
  check(projection, expert, shape, false);
  const Matrix& matrix = projection == Projection::down ? down_ : gate_up_;
  const Block& block = projection == Projection::down ? down_data_ : gate_up_data_;
  unpack_matrix(matrix, panel(matrix, block, expert, 0), tiles_of(config_, projection), shape.n, out);
}

void Experts::unpack_bias(Projection projection, int expert, float* out) const {
  Source shape;
  shape.n = rows_of(projection);
  shape.k = 1;
  check(projection, expert, shape, true);
  const Matrix& matrix = projection == Projection::down ? down_ : gate_up_;
  const auto* bias =
      reinterpret_cast<const float*>((projection == Projection::down ? down_bias_ : gate_up_bias_).data()) +
      static_cast<size_t>(expert) * static_cast<size_t>(matrix.panels) * kPanel;
  const TileMap place = tiles_of(config_, projection);
  for (int n = 0; n < shape.n; ++n) {
    const TileAt at = place(n / kTile);
    out[n] = bias[at.panel * kPanel + at.second * kTile + n % kTile];
  }
}

std::vector<PackedRun> Experts::packed() const {
  return {{gate_up_, false, 0, gate_up_.panels, gate_up_data_.data()},
          {down_, true, 0, down_.panels, down_data_.data()}};
}

}  // namespace ktinject
