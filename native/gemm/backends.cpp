#include "gemm/backends.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <vector>

#include "runtime/cpu_features.hpp"

namespace ktinject::gemm {

// The products of kernels/, one line a file. All but the reference's read fp8_channel as fp8.
Multiply reference_bf16, reference_int8, reference_int4, reference_fp8, reference_mxfp4;
Multiply reference_fp8_channel, reference_nvfp4, reference_mxfp8;
Multiply reference_k_quant, reference_q8_0;
Multiply avx2_bf16, avx2_int8, avx2_int4, avx2_fp8, avx2_mxfp4, avx2_nvfp4, avx2_mxfp8;
Multiply avx2_q2_k, avx2_q3_k, avx2_q4_k, avx2_q5_k, avx2_q6_k, avx2_iq4_xs, avx2_q8_0;
Multiply avxvnni_int8, avxvnni_int4;
Multiply avx512_bf16, avx512_int8, avx512_int4, avx512_fp8, avx512_mxfp4, avx512_nvfp4, avx512_mxfp8;
Multiply avx512_q2_k, avx512_q3_k, avx512_q4_k, avx512_q5_k, avx512_q6_k, avx512_iq4_xs, avx512_q8_0;
Multiply amx_bf16, amx_int8, amx_int4, amx_fp8, amx_mxfp4, amx_nvfp4, amx_mxfp8;
Multiply amx_q2_k, amx_q3_k, amx_q4_k, amx_q5_k, amx_q6_k, amx_iq4_xs, amx_q8_0;
Multiply modelled_amx_bf16, modelled_amx_int8, modelled_amx_int4, modelled_amx_fp8, modelled_amx_mxfp4;
Multiply modelled_amx_nvfp4, modelled_amx_mxfp8;
Multiply modelled_amx_q2_k, modelled_amx_q3_k, modelled_amx_q4_k, modelled_amx_q5_k, modelled_amx_q6_k;
Multiply modelled_amx_iq4_xs, modelled_amx_q8_0;

namespace {

using namespace runtime;  // the bits of instruction sets

constexpr uint32_t kAvx2Set = kAvx2 | kFma;
constexpr uint32_t kAvx512K = kAvx512Vnni | kF16c;
constexpr uint32_t kAvx512Set = kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx2Set;

constexpr uint32_t kAvx2Level = kAvx2Set | kF16c;
constexpr uint32_t kVnniLevel = kAvx512Set | kAvx512K;  // Cascade Lake, Ice Lake
constexpr uint32_t kAvx512Level = kVnniLevel | kAvx512Bf16;

constexpr Level kLevels[] = {
    {"amx", kAvx512Level | kAmxTile | kAmxBf16 | kAmxInt8, false},
    {"avx2", kAvx2Level, false},
    {"avx512", kAvx512Level, false},
    {"avx512_vnni", kVnniLevel, false},
    {"avxvnni", kAvx2Level | kAvxVnni, false},
    {"modelled_amx", kAvx512Level, true},
    {"reference", 0, false},
};

// Below about five rows an expert, loading tiles costs more than the dot products they save; expanding int4 to tiles
// costs a little more, and K-quants of two bytes a code more than that. q8_0 has a product for each 32 inputs, half as
// long as a tile can be: AVX-512 took 495 us with 12 rows and 661 with 16, AMX 554 and 607 (2,048 x 2,048). Floats of
// 8 and 4 bits go through a copy in the L1 cache either way, and then tiles are ahead from the first row on.
constexpr int kTileRows = 5, kInt4TileRows = 7, kOneByteTileRows = 6, kTwoByteTileRows = 10, kRunTileRows = 14;

constexpr Backend kBackends[] = {
    {"amx",
     kAmxTile | kAvx512Set,
     true,
     true,
     &kAvx512VectorOps,
     &kAmxStepOps,
     {{kAmxBf16, kTileRows, amx_bf16},
      {kAmxInt8, kTileRows, amx_int8},
      {kAmxInt8, kInt4TileRows, amx_int4},
      {kAmxBf16 | kAvx512Bf16, 0, amx_fp8},
      {kAmxBf16 | kAvx512Bf16, 0, amx_mxfp4},
      {kAmxBf16 | kAvx512Bf16, 0, amx_fp8},
      {kAmxBf16 | kAvx512Bf16, 0, amx_nvfp4},
      {kAmxBf16 | kAvx512Bf16, 0, amx_mxfp8},
      {kAmxInt8 | kAvx512K, kOneByteTileRows, amx_q2_k},
      {kAmxInt8 | kAvx512K, kOneByteTileRows, amx_q3_k},
      {kAmxInt8 | kAvx512K, kTwoByteTileRows, amx_q4_k},
      {kAmxInt8 | kAvx512K, kTwoByteTileRows, amx_q5_k},
      {kAmxInt8 | kAvx512K, kTwoByteTileRows, amx_q6_k},
      {kAmxInt8 | kAvx512K, kTwoByteTileRows, amx_iq4_xs},
      {kAmxInt8 | kAvx512K, kRunTileRows, amx_q8_0}}},
    {"avx512",
     kAvx512Set,
     true,
     false,
     &kAvx512VectorOps,
     &kAvx512StepOps,
     {{kAvx512Bf16, 0, avx512_bf16},
      {kAvx512Vnni, 0, avx512_int8},
      {kAvx512Vnni, 0, avx512_int4},
      {kAvx512Bf16, 0, avx512_fp8},
      {kAvx512Bf16, 0, avx512_mxfp4},
      {kAvx512Bf16, 0, avx512_fp8},
      {kAvx512Bf16, 0, avx512_nvfp4},
      {kAvx512Bf16, 0, avx512_mxfp8},
      {kAvx512K, 0, avx512_q2_k},
      {kAvx512K, 0, avx512_q3_k},
      {kAvx512K, 0, avx512_q4_k},
      {kAvx512K, 0, avx512_q5_k},
      {kAvx512K, 0, avx512_q6_k},
      {kAvx512K, 0, avx512_iq4_xs},
      {kAvx512K, 0, avx512_q8_0}}},
    {"avxvnni",
     kAvx2Set | kAvxVnni,
     true,
     false,
     &kAvx2VectorOps,
     &kAvx2StepOps,
     {{}, {0, 0, avxvnni_int8}, {0, 0, avxvnni_int4}, {}, {}, {}, {}}},
    {"avx2",
     kAvx2Set,
     true,
     false,
     &kAvx2VectorOps,
     &kAvx2StepOps,
     {{0, 0, avx2_bf16},
      {0, 0, avx2_int8},
      {0, 0, avx2_int4},
      {0, 0, avx2_fp8},
      {0, 0, avx2_mxfp4},
      {0, 0, avx2_fp8},
      {0, 0, avx2_nvfp4},
      {0, 0, avx2_mxfp8},
      {kF16c, 0, avx2_q2_k},
      {kF16c, 0, avx2_q3_k},
      {kF16c, 0, avx2_q4_k},
      {kF16c, 0, avx2_q5_k},
      {kF16c, 0, avx2_q6_k},
      {kF16c, 0, avx2_iq4_xs},
      {kF16c, 0, avx2_q8_0}}},
    {"reference",
     0,
     true,
     false,
     &kBaselineVectorOps,
     &kBaselineStepOps,
     {{0, 0, reference_bf16},
      {0, 0, reference_int8},
      {0, 0, reference_int4},
      {0, 0, reference_fp8},
      {0, 0, reference_mxfp4},
      {0, 0, reference_fp8_channel},
      {0, 0, reference_nvfp4},
      {0, 0, reference_mxfp8},
      {0, 0, reference_k_quant},
      {0, 0, reference_k_quant},
      {0, 0, reference_k_quant},
      {0, 0, reference_k_quant},
      {0, 0, reference_k_quant},
      {0, 0, reference_k_quant},
      {0, 0, reference_q8_0}}},
    // The AMX kernels over a software model of the tile unit: slow, for machines without AMX, where tests must reach
    // them too.
    {"modelled_amx",
     kAvx512Set,
     false,
     true,
     &kAvx512VectorOps,
     &kModelledAmxStepOps,
     {{0, 0, modelled_amx_bf16},
      {0, 0, modelled_amx_int8},
      {0, 0, modelled_amx_int4},
      {kAvx512Bf16, 0, modelled_amx_fp8},
      {kAvx512Bf16, 0, modelled_amx_mxfp4},
      {kAvx512Bf16, 0, modelled_amx_fp8},
      {kAvx512Bf16, 0, modelled_amx_nvfp4},
      {kAvx512Bf16, 0, modelled_amx_mxfp8},
      {kAvx512K, 0, modelled_amx_q2_k},
      {kAvx512K, 0, modelled_amx_q3_k},
      {kAvx512K, 0, modelled_amx_q4_k},
      {kAvx512K, 0, modelled_amx_q5_k},
      {kAvx512K, 0, modelled_amx_q6_k},
      {kAvx512K, 0, modelled_amx_iq4_xs},
      {kAvx512K, 0, modelled_amx_q8_0}}},
};

const Kernel* kernel_named(const std::string& name) {
  for (const Kernel& kernel : kernel_table())
    if (kernel.name == name) return &kernel;
  return nullptr;
}

void refuse_unavailable(const Kernel& kernel) {
  const std::string reason = why_unavailable(kernel);
  if (!reason.empty())
    throw std::invalid_argument("kernel '" + kernel.name + "' cannot run here: " + reason + ". Use kernel: auto");
}

std::atomic<const Kernel*> forced{nullptr};
std::atomic<const Level*> restricted{nullptr};

// The best backend that may run; null: it was not asked for since the level changed.
std::atomic<const Backend*> best{nullptr};

// The one whose loops serve what belongs to no layer.
const Backend& backend() {
  if (const Kernel* const kernel = forced.load(std::memory_order_relaxed)) return *kernel->backend;
  if (const Backend* const found = best.load(std::memory_order_relaxed)) return *found;
  for (const Backend& one : kBackends)
    if (is_automatic(one) && (one.isa & ~cpu_features()) == 0) {
      best.store(&one, std::memory_order_relaxed);
      return one;
    }
  throw std::logic_error("no backend");  // not reached: the reference needs nothing
}

// Why `isa` cannot be used here; empty if it can.
std::string why_lacking(uint32_t isa) {
  const uint32_t absent = isa & ~detected_features(), left_out = isa & ~cpu_features();
  if (absent != 0) return "this CPU or system has no " + names_of(absent, ", ");
  if (left_out != 0) return std::string("level '") + restricted.load()->name + "' has no " + names_of(left_out, ", ");
  return "";
}

std::atomic<bool> takes_outliers{true};

}  // namespace

std::span<const Kernel> kernel_table() {
  // Never freed: a thread that was let go, as the dispatcher's is, may choose kernels while the process ends.
  static const std::vector<Kernel>& table = *[] {
    auto* const made = new std::vector<Kernel>;
    std::vector<Kernel>& rows = *made;
    for (const Backend& one : kBackends)
      for (const FormatName& format : kFormatNames) {
        const Gemm& gemm = one.gemm[static_cast<int>(format.format)];
        if (gemm.multiply != nullptr)
          rows.push_back({std::string(one.name) + "_" + format.name, format.format, one.isa | gemm.isa, gemm.min_rows,
                          gemm.multiply, &one});
      }
    return made;
  }();
  return table;
}

const VectorOps& vector_ops() { return *backend().vector_ops; }
const StepOps& step_ops() {
  const StepOps& ops = *backend().step_ops;
  return &ops == &kAmxStepOps && (cpu_features() & kAmxBf16) == 0 ? kAvx512StepOps : ops;
}

void pack_row(const VectorOps& ops, const Matrix& matrix, const void* x, DType dtype, std::byte* out, float* scale,
              int32_t* group_sum, Outliers* outliers) {
  if (!has_int8_rows(matrix.format))
    return ops.round_row(x, dtype, matrix.k, matrix.padded_k(), reinterpret_cast<uint16_t*>(out));
  auto* codes = reinterpret_cast<uint8_t*>(out);
  if (!is_k_quant(matrix.format)) {
    if (!takes_outliers.load(std::memory_order_relaxed)) {
      outliers->count = 0;
      outliers = nullptr;
    }
    *scale = ops.quantise_row(x, dtype, matrix.k, matrix.padded_k(), matrix.format == Format::int8 ? 128 : 0,
                              matrix.group_size, codes, group_sum, outliers);
    return;
  }
  const int inputs = matrix.block();
  for (int block = 0, first = 0; block < matrix.blocks(); ++block, first += inputs)
    scale[block] = ops.quantise_row(static_cast<const std::byte*>(x) + static_cast<size_t>(first) * dtype_bytes(dtype),
                                    dtype, std::min(inputs, matrix.k - first), inputs, 0, matrix.group_size,
                                    codes + first, group_sum + first / matrix.group_size, nullptr);
}

void take_outliers(bool take) { takes_outliers.store(take, std::memory_order_relaxed); }

size_t scratch_bytes(const Matrix& matrix) {
  // Two expanded slices of a panel, of at most 64 blocks.
  return matrix.format == Format::bf16 || matrix.format == Format::int8 ? 0 : size_t{256} << 10;
}

std::string why_unavailable(const Kernel& kernel) { return why_lacking(kernel.isa); }

std::span<const Level> levels() { return kLevels; }

bool is_automatic(const Backend& backend) {
  const Level* const level = restricted.load(std::memory_order_relaxed);
  return backend.automatic != (level != nullptr && level->is_modelled);
}

std::string why_unavailable(const Level& level) {
  const uint32_t absent = level.isa & ~detected_features();
  return absent == 0 ? "" : "this CPU or system has no " + names_of(absent, ", ");
}

void restrict_to(const std::string& name) {
  const Level* found = nullptr;
  if (name != "auto") {
    found = std::find_if(std::begin(kLevels), std::end(kLevels), [&](const Level& one) { return one.name == name; });
    if (found == std::end(kLevels)) throw std::invalid_argument("level '" + name + "': no level has that name");
    const std::string reason = why_unavailable(*found);
    if (!reason.empty()) throw std::invalid_argument("level '" + name + "' cannot be had here: " + reason);
  }
  restricted.store(found);
  runtime::restrict_cpu(found == nullptr ? ~0u : found->isa);
  best.store(nullptr);
}

void force_kernel(const std::string& name) {
  const Kernel* const kernel = name == "auto" ? nullptr : kernel_named(name);
  if (kernel != nullptr) refuse_unavailable(*kernel);
  else if (name != "auto") throw std::invalid_argument("kernel '" + name + "': no kernel has that name");
  forced.store(kernel, std::memory_order_relaxed);
}

Kernels choose_kernel(Format format, const std::string& name) {
  if (name == "auto") {
    const Kernel* const only = forced.load(std::memory_order_relaxed);
    if (only != nullptr && only->format == format) return {only, only};
    const Kernel* many = nullptr;
    for (const Kernel& kernel : kernel_table()) {
      if (kernel.format != format || !is_automatic(*kernel.backend) || !why_unavailable(kernel).empty()) continue;
      if (many == nullptr) many = &kernel;
      if (kernel.min_rows == 0) return {many, &kernel};
    }
  }
  const Kernel* const kernel = kernel_named(name);
  if (kernel != nullptr && kernel->format == format) {
    refuse_unavailable(*kernel);
    return {kernel, kernel};
  }
  std::string allowed = "auto";
  for (const Kernel& other : kernel_table())
    if (other.format == format) allowed += ", " + other.name;
  throw std::invalid_argument("kernel '" + name + "' is not one for " + format_name(format) +
                              " weights; allowed: " + allowed);
}

}  // namespace ktinject::gemm
