// From checkpoint weights to the packed panels of gemm/layout.hpp, and back.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "gemm/layout.hpp"
#include "gemm/vector_ops.hpp"

namespace ktinject::runtime {
class ThreadPool;
}

namespace ktinject::gemm {

// A weight as it comes from a checkpoint: [n, k], element strides of any kind, so that transposed and interleaved
// parameters are packed from a view.
struct Source {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  int n = 0;
  int k = 0;
  ptrdiff_t n_stride = 0;
  ptrdiff_t k_stride = 0;
};

// An fp8 weight as it is stored: e4m3 codes [n, k], and a scale [ceil(n / 128), ceil(k / 128)] for each block; or [n,
// 1] for each output, of fp8_channel; or [n, ceil(k / 32)], powers of two, of mxfp8.
struct Fp8Source {
  const uint8_t* codes = nullptr;
  int n = 0;
  int k = 0;
  ptrdiff_t n_stride = 0;
  ptrdiff_t k_stride = 0;
  const float* scales = nullptr;  // contiguous
  int scale_rows = 0;
  int scale_columns = 0;
};

// An NVFP4 weight as it is stored: e2m1 codes [n, k / 2], an even input in the lower half of a byte, e4m3 scales
// [n, k / 16], and what multiplies them all.
struct Nvfp4Source {
  const uint8_t* codes = nullptr;
  int n = 0;
  int k = 0;  // inputs
  ptrdiff_t n_stride = 0;
  ptrdiff_t k_stride = 0;  // of bytes
  const uint8_t* scales = nullptr;
  int groups = 0;
  ptrdiff_t scale_n_stride = 0;
  ptrdiff_t scale_k_stride = 0;
  float factor = 1.0f;
};

// A weight in integers as it is stored: codes [n, k] of 4 or 8 bits, of which the middle, 8 or 128, is zero where there
// are no zero points; a scale, and perhaps a zero point, [n, groups] contiguous. groups = ceil(k / inputs a group).
struct IntegerSource {
  const uint8_t* codes = nullptr;
  int n = 0;
  int k = 0;
  ptrdiff_t n_stride = 0;
  ptrdiff_t k_stride = 0;
  const float* scales = nullptr;
  const uint8_t* zeros = nullptr;  // int4 alone
  int groups = 0;
  ptrdiff_t row_stride = 0;  // of scales and zeros
};

// Of the packed bytes: raised whenever the same weights are packed to other bytes than before, be it that layout.hpp or
// that a quantiser has changed. Packed caches of another version are not read.
inline constexpr int kPackedVersion = 1;

// std::invalid_argument unless 1 <= value <= most.
void check_size(const char* name, int value, int most);
// The longest row: 255 * 127 * 65536 is the longest int32 sum that cannot overflow.
inline constexpr int kMostInputs = 65536;
// std::invalid_argument for a group size that int4 has not, and for zero points of another format.
void check_format(Format format, int group_size, bool symmetric);
// The same for a number of inputs that the format cannot have.
void check_inputs(const char* name, Format format, int inputs);

// Where 16 outputs lie: tile `second` (0 or 1) of panel `panel`.
struct TileAt {
  int panel;
  int second;
};
// Tile t of a projection → its place among the panels.
using TileMap = TileAt (*)(int t);

inline TileAt paired_tiles(int t) { return {t / 2, t % 2}; }  // one matrix alone
inline TileAt first_tiles(int t) { return {t, 0}; }           // gate, beside up
inline TileAt second_tiles(int t) { return {t, 1}; }          // up, beside gate

// Panels [first, first + panels) of a matrix, one after the other at `data`. Runs follow each other; of several, the
// i-th lies on the i-th node.
struct PanelRun {
  int first;
  int panels;
  std::byte* data;
};

// Packs `source` to the panels of `runs`, in parallel. `what` names it in the std::domain_error that a NaN or an
// infinity is when the format has scales.
void pack_matrix(runtime::ThreadPool& workers, const Matrix& matrix, const VectorOps& ops, const Source& source,
                 TileMap place, std::span<const PanelRun> runs, const std::string& what);
inline void pack_matrix(runtime::ThreadPool& workers, const Matrix& matrix, const VectorOps& ops, const Source& source,
                        TileMap place, std::byte* panels, const std::string& what) {
  const PanelRun whole[] = {{0, matrix.panels, panels}};
  pack_matrix(workers, matrix, ops, source, place, whole, what);
}

// The same from fp8 codes, for an fp8, fp8_channel or mxfp8 matrix: they are kept bit by bit, and scales, too.
// std::domain_error for a NaN and for scales out of range, too.
void pack_fp8(runtime::ThreadPool& workers, const Matrix& matrix, const Fp8Source& source, TileMap place,
              std::span<const PanelRun> runs, const std::string& what);

// The same from NVFP4 codes, for an nvfp4 matrix; those of a group with a scale of zero become zeros. std::domain_error
// for scales that are negative or NaN, and a factor out of range, too.
void pack_nvfp4(runtime::ThreadPool& workers, const Matrix& matrix, const Nvfp4Source& source, TileMap place,
                std::span<const PanelRun> runs, const std::string& what);

// The same from integers, for an int4 matrix of as many groups or an int8 matrix: codes and zero points are kept,
// scales rounded to what the format has, bf16 in int4. std::domain_error for a scale that is not finite, too.
void pack_integers(runtime::ThreadPool& workers, const Matrix& matrix, const IntegerSource& source, TileMap place,
                   std::span<const PanelRun> runs, const std::string& what);

// out [n, matrix.k] fp32 = the dequantised outputs 0..n-1, in parallel.
void unpack_matrix(runtime::ThreadPool& workers, const Matrix& matrix, std::span<const PanelRun> runs, TileMap place,
                   int n, float* out);
inline void unpack_matrix(runtime::ThreadPool& workers, const Matrix& matrix, std::byte* panels, TileMap place, int n,
                          float* out) {
  const PanelRun whole[] = {{0, matrix.panels, panels}};
  unpack_matrix(workers, matrix, whole, place, n, out);
}

}  // namespace ktinject::gemm
