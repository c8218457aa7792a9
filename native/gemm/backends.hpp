// Every kernel that multiplies rows by a packed panel, best first.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "gemm/layout.hpp"

namespace ktinject::gemm {

// Who takes results off a kernel as they come: c [count, 32] = rows `row` ... of panel `panel`, counted from the first
// of the call.
struct Sink {
  void (*take)(void* context, int panel, int row, int count, const float* c);
  void* context;
};

// c [count, m, 32] fp32, contiguous, 64-byte aligned = rows [m, k] times each of `count` panels [32, k] transposed, all
// scales applied. The panels follow each other in memory. `scratch` holds at least scratch_bytes(matrix) bytes, 64-byte
// aligned. With a sink, for kernels that feed one, all results go there and c is working memory.
using Multiply = void (*)(const Matrix& matrix, const std::byte* panels, int count, const Rows& rows, float* c,
                          std::byte* scratch, const Sink* sink);

struct Kernel {
  const char* name;  // <isa>_<dtype>
  Format format;
  uint32_t isa;    // what the CPU must have
  int min_rows;    // below this many rows an expert, a kernel further down the table is faster
  bool automatic;  // false: only when asked for by name
  bool feeds;      // a sink: what is done with results hides between tile products
  Multiply multiply;
};

std::span<const Kernel> kernel_table();

// Bytes of scratch any kernel may use for this matrix.
size_t scratch_bytes(const Matrix& matrix);

// The two kernels a layer runs with: `many` for experts with at least many->min_rows rows, `few` for the rest.
struct Kernels {
  const Kernel* many;
  const Kernel* few;
  const Kernel& operator()(int rows) const { return rows >= many->min_rows ? *many : *few; }
};

// `name`: "auto" or a row of the table. Throws std::invalid_argument for a name that is not there, is of another format
// or that this CPU cannot run.
Kernels choose_kernel(Format format, const std::string& name);

// Why this CPU cannot run the kernel; empty if it can.
std::string why_unavailable(const Kernel& kernel);

// One of these per file of kernels/.
void reference_bf16(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void reference_int8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void reference_int4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void reference_fp8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void reference_mxfp4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx2_bf16(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx2_int8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx2_int4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx2_fp8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx2_mxfp4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avxvnni_int8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avxvnni_int4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx512_bf16(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx512_int8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx512_int4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx512_fp8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void avx512_mxfp4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void amx_bf16(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void amx_int8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void amx_int4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void amx_fp8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void amx_mxfp4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void modelled_amx_bf16(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void modelled_amx_int8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void modelled_amx_int4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void modelled_amx_fp8(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);
void modelled_amx_mxfp4(const Matrix&, const std::byte*, int, const Rows&, float*, std::byte*, const Sink*);

}  // namespace ktinject::gemm
