#include "gemm/backends.hpp"

#include <stdexcept>

#include "runtime/cpu_features.hpp"

namespace ktinject::gemm {

using namespace runtime;  // the bits of instruction sets
namespace {

constexpr uint32_t kAvx2Set = kAvx2 | kFma;
constexpr uint32_t kAvx512Set = kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx2Set;

// Below about five rows an expert, loading tiles costs more than the dot products they save; expanding int4 to tiles
// costs a little more. fp8 and mxfp4 go through a copy in the L1 cache either way, and then tiles are ahead from the
// first row on.
constexpr int kTileRows = 5, kInt4TileRows = 7;

constexpr Kernel kTable[] = {
    {"amx_bf16", Format::bf16, kAmxTile | kAmxBf16 | kAvx512Set, kTileRows, true, true, amx_bf16},
    {"amx_int8", Format::int8, kAmxTile | kAmxInt8 | kAvx512Set, kTileRows, true, true, amx_int8},
    {"amx_int4", Format::int4, kAmxTile | kAmxInt8 | kAvx512Set, kInt4TileRows, true, true, amx_int4},
    {"amx_fp8", Format::fp8, kAmxTile | kAmxBf16 | kAvx512Set | kAvx512Bf16, 0, true, true, amx_fp8},
    {"amx_mxfp4", Format::mxfp4, kAmxTile | kAmxBf16 | kAvx512Set | kAvx512Bf16, 0, true, true, amx_mxfp4},
    {"avx512_bf16", Format::bf16, kAvx512Set | kAvx512Bf16, 0, true, false, avx512_bf16},
    {"avx512_int8", Format::int8, kAvx512Set | kAvx512Vnni, 0, true, false, avx512_int8},
    {"avx512_int4", Format::int4, kAvx512Set | kAvx512Vnni, 0, true, false, avx512_int4},
    {"avx512_fp8", Format::fp8, kAvx512Set | kAvx512Bf16, 0, true, false, avx512_fp8},
    {"avx512_mxfp4", Format::mxfp4, kAvx512Set | kAvx512Bf16, 0, true, false, avx512_mxfp4},
    {"avxvnni_int8", Format::int8, kAvx2Set | kAvxVnni, 0, true, false, avxvnni_int8},
    {"avxvnni_int4", Format::int4, kAvx2Set | kAvxVnni, 0, true, false, avxvnni_int4},
    {"avx2_bf16", Format::bf16, kAvx2Set, 0, true, false, avx2_bf16},
    {"avx2_int8", Format::int8, kAvx2Set, 0, true, false, avx2_int8},
    {"avx2_int4", Format::int4, kAvx2Set, 0, true, false, avx2_int4},
    {"avx2_fp8", Format::fp8, kAvx2Set, 0, true, false, avx2_fp8},
    {"avx2_mxfp4", Format::mxfp4, kAvx2Set, 0, true, false, avx2_mxfp4},
    {"reference_bf16", Format::bf16, 0, 0, true, false, reference_bf16},
    {"reference_int8", Format::int8, 0, 0, true, false, reference_int8},
    {"reference_int4", Format::int4, 0, 0, true, false, reference_int4},
    {"reference_fp8", Format::fp8, 0, 0, true, false, reference_fp8},
    {"reference_mxfp4", Format::mxfp4, 0, 0, true, false, reference_mxfp4},
    // The AMX kernels over a software model of the tile unit: slow, for machines without AMX, where tests must reach
    // them too.
    {"modelled_amx_bf16", Format::bf16, kAvx512Set, 0, false, true, modelled_amx_bf16},
    {"modelled_amx_int8", Format::int8, kAvx512Set, 0, false, true, modelled_amx_int8},
    {"modelled_amx_int4", Format::int4, kAvx512Set, 0, false, true, modelled_amx_int4},
    {"modelled_amx_fp8", Format::fp8, kAvx512Set | kAvx512Bf16, 0, false, true, modelled_amx_fp8},
    {"modelled_amx_mxfp4", Format::mxfp4, kAvx512Set | kAvx512Bf16, 0, false, true, modelled_amx_mxfp4},
};

}  // namespace

std::span<const Kernel> kernel_table() { return kTable; }

size_t scratch_bytes(const Matrix& matrix) {
  // Two expanded stretches of a panel, of at most 64 blocks.
  return matrix.format == Format::bf16 || matrix.format == Format::int8 ? 0 : size_t{256} << 10;
}

std::string why_unavailable(const Kernel& kernel) {
  const uint32_t missing = kernel.isa & ~cpu_features();
  std::string names;
  for (const IsaName& isa : kIsaNames)
    if (missing & isa.bit) names += (names.empty() ? "" : ", ") + std::string(isa.name);
  return names.empty() ? "" : "this CPU or system has no " + names;
}

Kernels choose_kernel(Format format, const std::string& name) {
  std::string allowed;
  if (name == "auto") {
    const Kernel* many = nullptr;
    for (const Kernel& kernel : kTable) {
      if (kernel.format != format || !kernel.automatic || !why_unavailable(kernel).empty()) continue;
      if (many == nullptr) many = &kernel;
      if (kernel.min_rows == 0) return {many, &kernel};
    }
  }
  for (const Kernel& kernel : kTable) {
    if (kernel.format != format) continue;
    if (kernel.name == name) {
      const std::string reason = why_unavailable(kernel);
      if (!reason.empty())
        throw std::invalid_argument("kernel '" + name + "' cannot run here: " + reason + ". Use kernel: auto");
      return {&kernel, &kernel};
    }
    allowed += (allowed.empty() ? "auto, " : ", ") + std::string(kernel.name);
  }
  throw std::invalid_argument("kernel '" + name + "' is not one for " + format_name(format) +
                              " weights; allowed: " + allowed);
}

}  // namespace ktinject::gemm
