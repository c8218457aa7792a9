// Scalar kernels for any x86-64: slow, and short enough to be read as the definition of the packed layout.
#include "gemm/k_quants.hpp"
#include "gemm/kernels/head.hpp"
#include "gemm/vector_ops.hpp"

namespace ktinject::gemm {
namespace {

// The byte, or the first of two, that holds the weight of output j and input k.
const std::byte* at(const Matrix& matrix, const std::byte* panel, int j, int k) {
  return panel + matrix.head_bytes() + weight_at(matrix.format, j, k).byte;
}

// Byte b of row `row`.
const std::byte* of_row(const PackedActivations& rows, int row, int b) {
  const int first = row / kTile * kTile;
  return rows.group(first) + static_cast<size_t>(b / 64 * rows.group_rows(first) + row - first) * 64 +
         static_cast<size_t>(b % 64);
}

// Calls one(panel, row, j) for every value of c and stores what it returns.
template <class One>
void for_each(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
              One one) {
  for (int p = 0; p < count; ++p)
    for (int row = 0; row < rows.m; ++row)
      for (int j = 0; j < kPanel; ++j) *c++ = one(panels + static_cast<size_t>(p) * matrix.panel_bytes(), row, j);
}

}  // namespace

void reference_bf16(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                    std::byte*, const Epilogue*) {
  for_each(matrix, panels, count, rows, c, [&](const std::byte* panel, int row, int j) {
    float sum = 0;
    for (int k = 0; k < matrix.padded_k(); ++k) {
      uint16_t w, x;
      __builtin_memcpy(&w, at(matrix, panel, j, k), 2);
      __builtin_memcpy(&x, of_row(rows, row, 2 * k), 2);
      sum += bf16_to_float(x) * bf16_to_float(w);
    }
    return sum;
  });
}

void reference_int8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                    std::byte*, const Epilogue*) {
  for_each(matrix, panels, count, rows, c, [&](const std::byte* panel, int row, int j) {
    const Int8Head& head = int8_head(panel);
    int32_t sum = -head.offset[j];
    for (int k = 0; k < matrix.padded_k(); ++k) {
      const auto w = static_cast<int8_t>(*at(matrix, panel, j, k));
      sum += int32_t{static_cast<uint8_t>(*of_row(rows, row, k))} * w;
    }
    return static_cast<float>(sum) * (rows.scale[row] * head.scale[j]);
  });
}

void reference_int4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                    std::byte*, const Epilogue*) {
  for_each(matrix, panels, count, rows, c, [&](const std::byte* panel, int row, int j) {
    float sum = 0;
    for (int g = 0; g < matrix.groups(); ++g) {
      const int zero = matrix.symmetric ? 8 : int4_zeros(matrix, panel)[g * kPanel + j];
      int32_t products = -zero * rows.group_sum[row * matrix.groups() + g];
      const int end = (g + 1) * matrix.group_size < matrix.padded_k() ? (g + 1) * matrix.group_size : matrix.padded_k();
      for (int k = g * matrix.group_size; k < end; ++k) {
        const auto pair = static_cast<uint8_t>(*at(matrix, panel, j, k));
        const int code = pair >> weight_at(matrix.format, j, k).shift & 15;
        products += int32_t{static_cast<int8_t>(*of_row(rows, row, k))} * code;
      }
      sum += static_cast<float>(products) * bf16_to_float(int4_scales(panel)[g * kPanel + j]);
    }
    return sum * rows.scale[row];
  });
}

namespace {

// The 16-bit lane of packed fp8, mxfp4 and their like in which input k of output j lies, from its lowest code on.
uint32_t lane_of(const Matrix& matrix, const std::byte* panel, int k, int j) {
  uint16_t lane;
  __builtin_memcpy(&lane, at(matrix, panel, j, k), 2);
  return uint32_t{lane} >> weight_at(matrix.format, j, k).shift;
}

// c = rows of bf16 times weight(panel, k, j), rounded to bf16.
template <class Weight>
void decoded(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
             Weight weight) {
  const bool scaled = has_factors(matrix.format);
  for_each(matrix, panels, count, rows, c, [&](const std::byte* panel, int row, int j) {
    float sum = 0;
    for (int k = 0; k < matrix.padded_k(); ++k) {
      uint16_t x;
      __builtin_memcpy(&x, of_row(rows, row, 2 * k), 2);
      sum += bf16_to_float(x) * bf16_to_float(float_to_bf16(weight(panel, k, j)));
    }
    return scaled ? sum * factors(panel)[j] : sum;
  });
}

}  // namespace

void reference_fp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                   std::byte*, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, [&](const std::byte* panel, int k, int j) {
    const auto code = static_cast<uint8_t>(lane_of(matrix, panel, k, j));
    return Fp8::value(code) * fp8_scale(panel, k / kFp8Block, j / kTile);
  });
}

void reference_mxfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                     std::byte*, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, [&](const std::byte* panel, int k, int j) {
    const uint8_t scale = e8m0_scales(panel)[k / kMxGroup * kPanel + j];
    return Mxfp4::value(static_cast<int>(lane_of(matrix, panel, k, j) & 15)) * e8m0_value(scale);
  });
}

void reference_mxfp8(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                     std::byte*, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, [&](const std::byte* panel, int k, int j) {
    const auto code = static_cast<uint8_t>(lane_of(matrix, panel, k, j));
    return Fp8::value(code) * e8m0_value(e8m0_scales(panel)[k / kMxGroup * kPanel + j]);
  });
}

void reference_fp8_channel(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                           float* c, std::byte*, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, [&](const std::byte* panel, int k, int j) {
    return Fp8::value(static_cast<uint8_t>(lane_of(matrix, panel, k, j)));
  });
}

void reference_nvfp4(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                     std::byte*, const Epilogue*) {
  decoded(matrix, panels, count, rows, c, [&](const std::byte* panel, int k, int j) {
    const uint8_t scale = nvfp4_scales(panel)[k / kNvfp4Group * kPanel + j];
    return Mxfp4::value(static_cast<int>(lane_of(matrix, panel, k, j) & 15)) * Nvfp4::scale(scale);
  });
}

void reference_k_quant(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows,
                       float* c, std::byte*, const Epilogue*) {
  const KQuant kind = k_quant(matrix.format);
  for_each(matrix, panels, count, rows, c, [&](const std::byte* panel, int row, int j) {
    float total = 0;
    for (int b = 0; b < matrix.blocks(); ++b) {
      const KBlock block(matrix, panel, b);
      int32_t sum = 0, less = 0;
      for (int run = 0; run < kSuperblock / kind.run; ++run) {
        int32_t products = 0;
        for (int k = run * kind.run; k < (run + 1) * kind.run; ++k)
          products +=
              (block.code(j, k) - kind.zero) * int32_t{static_cast<int8_t>(*of_row(rows, row, b * kSuperblock + k))};
        sum += products * block.s(j, run);
        if (kind.has_min)
          less += block.t(j, run) * rows.group_sum[row * matrix.groups() + b * (kSuperblock / kind.run) + run];
      }
      const float value = block.d(j) * static_cast<float>(sum);
      total += rows.scale[row * matrix.blocks() + b] *
               (kind.has_min ? value - block.m(j) * static_cast<float>(less) : value);
    }
    return total;
  });
}

void reference_q8_0(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                    std::byte*, const Epilogue*) {
  constexpr int kRun = k_quant(Format::q8_0).run;
  for_each(matrix, panels, count, rows, c, [&](const std::byte* panel, int row, int j) {
    float total = 0;
    for (int b = 0; b < matrix.blocks(); ++b) {
      const KBlock block(matrix, panel, b);
      float value = 0;
      for (int run = 0; run < kQ8Inputs / kRun; ++run) {
        int32_t products = 0;
        for (int k = run * kRun; k < (run + 1) * kRun; ++k)
          products += block.code(j, k) * int32_t{static_cast<int8_t>(*of_row(rows, row, b * kQ8Inputs + k))};
        value += block.d(j, run) * static_cast<float>(products);
      }
      total += rows.scale[row * matrix.blocks() + b] * value;
    }
    return total;
  });
}

}  // namespace ktinject::gemm
