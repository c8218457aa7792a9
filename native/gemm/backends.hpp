// The backends: for each instruction set its products of packed panels, and the loops that run beside them. One ordered
// table, best first, and two overrides, an instruction level and a kernel; nothing else in the native core decides what
// a CPU runs.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gemm/layout.hpp"
#include "gemm/step_ops.hpp"
#include "gemm/vector_ops.hpp"

namespace ktinject::gemm {

// What is done with results as they leave a kernel: c [count, 32] = rows `row` ... of panel `panel`, counted from the
// first of the call; it may be written to.
struct Epilogue {
  void (*take)(void* context, int panel, int row, int count, float* c);
  void* context;
};

// c [count, m, 32] fp32, contiguous, 64-byte aligned = rows [m, k] times each of `count` panels [32, k] transposed, all
// scales applied. The panels follow each other in memory. `scratch` holds at least scratch_bytes(matrix) bytes, 64-byte
// aligned. With an epilogue, for backends that have one, all results go there and c is working memory.
using Multiply = void(const Matrix& matrix, const std::byte* panels, int count, const PackedActivations& rows, float* c,
                      std::byte* scratch, const Epilogue* epilogue);

// A backend's product for one weight format.
struct Gemm {
  uint32_t isa = 0;              // beyond the backend's
  int min_rows = 0;              // with fewer rows an expert, a backend further down the table is faster
  Multiply* multiply = nullptr;  // null: the backend has none
};

struct Backend {
  const char* name;
  uint32_t isa;       // what the CPU must have
  bool automatic;     // false: only when asked for by name, or by a level that is_modelled
  bool has_epilogue;  // what is done with results hides between tile products
  const VectorOps* vector_ops;
  const StepOps* step_ops;
  Gemm gemm[kFormats];  // by Format
};

// A product with all that its table row says.
struct Kernel {
  std::string name;  // <backend>_<format>
  Format format;
  uint32_t isa;  // all that the CPU must have
  int min_rows;
  Multiply* multiply;
  const Backend* backend;
};

// All products, those of the best backend first.
std::span<const Kernel> kernel_table();

// Bytes of scratch any kernel may use for this matrix.
size_t scratch_bytes(const Matrix& matrix);

// Rounds or quantises a row x [matrix.k] to `out`, contiguous, with matrix.row_scales() scales and the sums of its
// groups where the format has them (see PackedActivations).
void pack_row(const VectorOps& ops, const Matrix& matrix, const void* x, DType dtype, std::byte* out, float* scale,
              int32_t* group_sum, Outliers* outliers);

// Whether rows that pack_row() quantises from now on lose their outliers, as they do; for measurements.
void take_outliers(bool take);

// The two kernels a layer runs with: `many` for experts with at least many->min_rows rows, `few` for the rest.
struct Kernels {
  const Kernel* many;
  const Kernel* few;
  const Kernel& operator()(int rows) const { return rows >= many->min_rows ? *many : *few; }
  // What packs the weights and prepares the activations: every kernel of the layer takes the same bits.
  const VectorOps& vector_ops() const { return *few->backend->vector_ops; }
};

// `name`: "auto" or a name of the table. Throws std::invalid_argument for a name that is not there, is of another
// format or that this CPU cannot run.
Kernels choose_kernel(Format format, const std::string& name);

// What a kind of CPU has: a process that is restricted to a level computes as it would on such a CPU.
struct Level {
  const char* name;
  uint32_t isa;      // all that may be used, and that the CPU must have
  bool is_modelled;  // "auto" takes the backends that it takes at no other level
};

std::span<const Level> levels();

// Why this CPU cannot compute at the level; empty if it can.
std::string why_unavailable(const Level& level);

// Whether "auto" may take the backend's kernels now.
bool is_automatic(const Backend& backend);

// From now on no kernel, loop or measurement uses an instruction set that the level does not have; "auto" takes that
// back. Layers that exist keep their kernels. Throws std::invalid_argument for a name that is not there, or a level
// that this CPU does not have.
void restrict_to(const std::string& name);

// From now on "auto" is this kernel for its format, and loops that belong to no layer are those of its backend; "auto"
// takes that back. Throws as choose_kernel does.
void force_kernel(const std::string& name);

// The loops that belong to no layer: the best backend's, or the forced one's.
const VectorOps& vector_ops();
const StepOps& step_ops();

// Why this process cannot run the kernel: its CPU, or the level that it is restricted to. Empty if it can.
std::string why_unavailable(const Kernel& kernel);

}  // namespace ktinject::gemm
