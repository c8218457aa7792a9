// Two kernels. A thread block takes one panel (32 outputs; gemm/layout.hpp draws it) of one (token, slot) pair in the
// first, of one token in the second, and leaves at once if the expert is not here. Its warps share the panel's blocks
// along k; in a block, four lanes hold the 16 outputs of a tile, four each, and the eight groups of four lanes the
// rows:
//
//   lane      0      1       2       3      | 4 …           one load: 16 bytes a lane, 512 contiguous bytes a warp
//   outputs   0..3   4..7    8..11   12..15 | 0..3 …
//   row       r      r       r       r      | r + 1 …
//
// Sums are fp32, and always in the same order. Activations are rounded to bf16, as on the CPU for bf16 weights.
#include "cuda/resident.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/on_device.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

struct Panels {
  int panels;
  int k;
  int blocks;
  int group_size;
  size_t panel_bytes;
  size_t head_bytes;
  size_t zeros_at;  // int4: where the zero points lie in the head; 0 where all are 8
};

struct Routes {
  const int32_t* chosen;
  const void* weights;
  const std::byte* resident;
  size_t expert_bytes;
  int top_k;
  DType weights_dtype;
};

// The expert of a slot of the routing; null if it is not on this GPU.
__device__ const std::byte* expert_of(const Routes& routes, size_t slot) {
  const int32_t place = routes.chosen[slot];
  return place < 0 ? nullptr : routes.resident + static_cast<size_t>(place) * routes.expert_bytes;
}

__device__ float value_of(const void* values, DType dtype, size_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(values)[i];
  if (dtype == DType::f16) return __half2float(static_cast<const __half*>(values)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[i]);
}

__device__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }
__device__ float to_float(float value) { return rounded(value); }
__device__ float to_float(__half value) { return rounded(__half2float(value)); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// kCount values of a row from `first` on, zero past its end; at once where rows are aligned for that.
template <int kCount, class T>
__device__ void load_row(const T* row, int first, int k, float (&values)[kCount]) {
  if (k % kCount == 0) {
    if (first >= k) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = 0;
      return;
    }
    struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Run {
      T values[kCount];
    };
    const Run run = *reinterpret_cast<const Run*>(row + first);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_float(run.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = first + i < k ? to_float(row[first + i]) : 0.0f;
  }
}

// Adds the products of one panel with one row to sums[tile][output of the lane], for this warp's part of k.
template <class T>
__device__ void multiply_bf16(const Panels& matrix, const std::byte* panel, const T* row, float (&sums)[2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll 2
  for (int block = warp; block < matrix.blocks; block += kWarps) {
    const auto* words =
        reinterpret_cast<const uint4*>(panel + static_cast<size_t>(block) * 2 * gemm::tile_bytes(gemm::Format::bf16)) +
        lane;
    uint4 weights[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i / 2][i % 2] = __ldcs(words + i * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[2];
      load_row(row, block * gemm::block_inputs(gemm::Format::bf16) + (half * 8 + lane / 4) * 2, matrix.k, x);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4& w = weights[tile][half];
        sums[tile][0] = fmaf(high(w.x), x[1], fmaf(low(w.x), x[0], sums[tile][0]));
        sums[tile][1] = fmaf(high(w.y), x[1], fmaf(low(w.y), x[0], sums[tile][1]));
        sums[tile][2] = fmaf(high(w.z), x[1], fmaf(low(w.z), x[0], sums[tile][2]));
        sums[tile][3] = fmaf(high(w.w), x[1], fmaf(low(w.w), x[0], sums[tile][3]));
      }
    }
  }
}

// The same for int4. A nibble put into the mantissa of 128.0 as bf16 is 128 + q + zero, exactly; 128 + zero times the
// sum of the inputs is taken off for all at once.
template <class T>
__device__ void multiply_int4(const Panels& matrix, const std::byte* panel, const T* row, float (&sums)[2][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const auto* scales = reinterpret_cast<const uint16_t*>(panel + gemm::kInt4ScalesAt);
  const std::byte* data = panel + matrix.head_bytes;
#pragma unroll 2
  for (int block = warp; block < matrix.blocks; block += kWarps) {
    const auto* words =
        reinterpret_cast<const uint4*>(data + static_cast<size_t>(block) * 2 * gemm::tile_bytes(gemm::Format::int4)) +
        lane;
    const uint4 weights[2] = {__ldcs(words), __ldcs(words + 32)};
    const int input = block * gemm::block_inputs(gemm::Format::int4) + lane / 4 * 8;
    float x[8];
    load_row(row, input, matrix.k, x);
    float total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += x[i];
    const auto group = static_cast<size_t>(gemm::scale_at(gemm::Format::int4, input / matrix.group_size, lane % 4 * 4));
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint32_t w[4] = {weights[tile].x, weights[tile].y, weights[tile].z, weights[tile].w};
      const uint2 scale = *reinterpret_cast<const uint2*>(scales + group + tile * gemm::kTile);
      const uint32_t zeros =
          matrix.zeros_at == 0
              ? 0x08080808u
              : *reinterpret_cast<const uint32_t*>(panel + matrix.zeros_at + group + tile * gemm::kTile);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float dot = -(128.0f + static_cast<float>(zeros >> (8 * j) & 255u)) * total;
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // low nibbles of bytes 0 and 2, of 1 and 3, then high ones
          const int shift = part / 2 * 4 + part % 2 * 8;
          const uint32_t pair = (w[j] >> shift & 0x000f000fu) | 0x43004300u;
          const int first = part / 2 * 4 + part % 2;
          dot = fmaf(high(pair), x[first + 2], fmaf(low(pair), x[first], dot));
        }
        const uint32_t bits = j < 2 ? scale.x : scale.y;
        sums[tile][j] = fmaf(dot, j % 2 == 0 ? low(bits) : high(bits), sums[tile][j]);
      }
    }
  }
}

// The values of a 32-bit word of one output, in the order of its inputs, without scales.
__device__ void decode(std::integral_constant<gemm::Format, gemm::Format::int8>, uint32_t bits, float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = static_cast<float>(static_cast<int8_t>(bits >> (8 * i)));
}
template <gemm::Format kFormat>
constexpr bool kIsE2m1 = kFormat == gemm::Format::mxfp4 || kFormat == gemm::Format::nvfp4;
template <gemm::Format kFormat>  // whether groups of inputs share a scale
constexpr bool kHasGroups = kFormat == gemm::Format::fp8 || kFormat == gemm::Format::mxfp8 || kIsE2m1<kFormat>;

template <gemm::Format kFormat>
  requires(gemm::has_e4m3_codes(kFormat))
__device__ void decode(std::integral_constant<gemm::Format, kFormat>, uint32_t bits, float (&values)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = bits >> (8 * i) & 255, mantissa = code & 7;
    const uint32_t exponent = (code & 0xe0) >> 4 | (code & 8) >> 3;
    const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                          : __uint_as_float((exponent + 120) << 23 | mantissa << 20);
    values[i % 2 * 2 + i / 2] = code & 0x10 ? -magnitude : magnitude;
  }
}
template <gemm::Format kFormat>
  requires kIsE2m1<kFormat>
__device__ void decode(std::integral_constant<gemm::Format, kFormat>, uint32_t bits, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = bits >> (16 * (i % 2) + 4 * (i / 2)) & 15, exponent = code >> 1 & 3;
    const float magnitude = exponent == 0 ? static_cast<float>(code & 1) * 0.5f
                                          : __uint_as_float((exponent + 126) << 23 | (code & 1) << 22);
    values[i] = code & 8 ? -magnitude : magnitude;
  }
}

// The same for int8, fp8, mxfp4 and their like. Eight rows of 64 bytes are a load of the warp: of one tile, or in
// mxfp4, whose tiles have four, of two blocks. fp8 weights are rounded to bf16 with their scales, as on the CPU.
template <gemm::Format kFormat, class T>
__device__ void multiply_codes(const Panels& matrix, const std::byte* panel, const T* row, float (&sums)[2][4]) {
  constexpr int kRows = static_cast<int>(gemm::tile_bytes(kFormat) / 64), kTogether = kRows < 8 ? kRows : 8;
  constexpr int kEach = gemm::block_inputs(kFormat) / kRows;  // inputs of a word
  constexpr int kBlocks = 8 / kTogether;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::byte* data = panel + matrix.head_bytes;
  for (int first = warp * kBlocks; first < matrix.blocks; first += kWarps * kBlocks) {
    const int block = first + lane / 4 / kTogether;
    if (block >= matrix.blocks) continue;
#pragma unroll
    for (int from = 0; from < kRows; from += kTogether) {
      const int at = from + lane / 4 % kTogether, input = block * gemm::block_inputs(kFormat) + at * kEach;
      float x[kEach];
      load_row(row, input, matrix.k, x);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const std::byte* words = data + (static_cast<size_t>(block) * 2 + tile) * gemm::tile_bytes(kFormat);
        const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(words + at * 64) + lane % 4);
        const uint32_t bits[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        int scale = 0;
        if constexpr (kHasGroups<kFormat>)
          scale = gemm::scale_at(kFormat, input / matrix.group_size, tile * gemm::kTile + lane % 4 * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float values[kEach], dot = 0;
          decode(std::integral_constant<gemm::Format, kFormat>(), bits[j], values);
          if constexpr (kFormat == gemm::Format::fp8) {
            const float shared = reinterpret_cast<const float*>(panel)[scale];
#pragma unroll
            for (int i = 0; i < kEach; ++i) values[i] = rounded(values[i] * shared);
          }
#pragma unroll
          for (int i = 0; i < kEach; ++i) dot = fmaf(values[i], x[i], dot);
          if constexpr (gemm::has_e8m0_scales(kFormat))
            dot *= __uint_as_float(static_cast<uint32_t>(panel[scale + j]) << 23);
          if constexpr (kFormat == gemm::Format::nvfp4) {
            const auto packed = static_cast<uint32_t>(panel[gemm::kFactorsBytes + static_cast<size_t>(scale + j)]);
            dot *= packed == 0 ? 0.0f : __uint_as_float((packed << 20) + (117u << 23));
          }
          sums[tile][j] += dot;
        }
      }
    }
  }
  if constexpr (kFormat == gemm::Format::int8 || gemm::has_factors(kFormat)) {  // one for each output
    const auto* scales = reinterpret_cast<const float*>(panel);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] *= scales[i / 4 * gemm::kTile + lane % 4 * 4 + i % 4];
  }
}

// The same for q8_0: a load of the warp is a run of 32 inputs of one tile, which has a scale for each output.
template <class T>
__device__ void multiply_q8_0(const Panels& matrix, const std::byte* panel, const T* row, float (&sums)[2][4]) {
  constexpr gemm::Format kFormat = gemm::Format::q8_0;
  constexpr int kRuns = gemm::k_factor_rows(kFormat);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int at = warp; at < matrix.blocks * kRuns; at += kWarps) {
    const int run = at % kRuns;
    const std::byte* block = panel + static_cast<size_t>(at / kRuns) * 2 * gemm::tile_bytes(kFormat);
    float x[4];
    load_row(row, at * 32 + lane / 4 * 4, matrix.k, x);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int codes = gemm::k_head_rows(kFormat) + (tile * kRuns + run) * gemm::k_code_rows(kFormat);
      const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(block + codes * 64) + lane);
      const uint32_t bits[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      const auto* scales = reinterpret_cast<const __half*>(block + run * 64) + tile * gemm::kTile + lane % 4 * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float values[4], dot = 0;
        decode(std::integral_constant<gemm::Format, gemm::Format::int8>(), bits[j], values);
#pragma unroll
        for (int i = 0; i < 4; ++i) dot = fmaf(values[i], x[i], dot);
        sums[tile][j] = fmaf(dot, __half2float(scales[j]), sums[tile][j]);
      }
    }
  }
}

template <gemm::Format kFormat, class T>
__device__ void multiply(const Panels& matrix, const std::byte* panel, const T* row, float (&sums)[2][4]) {
  if constexpr (kFormat == gemm::Format::int4) multiply_int4(matrix, panel, row, sums);
  else if constexpr (kFormat == gemm::Format::bf16) multiply_bf16(matrix, panel, row, sums);
  else if constexpr (kFormat == gemm::Format::q8_0) multiply_q8_0(matrix, panel, row, sums);
  else multiply_codes<kFormat>(matrix, panel, row, sums);
}

// The sums of all lanes and warps; the result for output i of the panel is valid in thread i < 32.
__device__ float gather(float (&sums)[2][4], float (&shared)[kWarps][gemm::kPanel]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sums[tile][j] += __shfl_xor_sync(~0u, sums[tile][j], step);
      if (lane < 4) shared[warp][tile * gemm::kTile + lane * 4 + j] = sums[tile][j];
    }
  __syncthreads();
  float total = 0;
  if (threadIdx.x < gemm::kPanel)
    for (int from = 0; from < kWarps; ++from) total += shared[from][threadIdx.x];
  return total;
}

// inner [tokens * top_k, width] = activation of the gate and up outputs.
template <gemm::Format kFormat, class T>
__global__ void __launch_bounds__(kThreads)
    gate_up_kernel(const T* x, Routes routes, Panels matrix, size_t bias_at, gemm::Activation activation,
                   __nv_bfloat16* inner, int width) {
  __shared__ float shared[kWarps][gemm::kPanel];
  const size_t slot = blockIdx.y;
  const std::byte* expert = expert_of(routes, slot);
  if (expert == nullptr) return;
  const int index = static_cast<int>(blockIdx.x);
  const std::byte* panel = expert + static_cast<size_t>(index) * matrix.panel_bytes;
  float sums[2][4] = {};
  multiply<kFormat>(matrix, panel, x + slot / routes.top_k * matrix.k, sums);
  float value = gather(sums, shared);
  if (threadIdx.x >= gemm::kPanel) return;
  if (bias_at != 0) value += reinterpret_cast<const float*>(expert + bias_at)[index * gemm::kPanel + threadIdx.x];
  int column = index * gemm::kPanel + static_cast<int>(threadIdx.x);
  if (activation.has_gate) {
    const float up = __shfl_down_sync(~0u, value, gemm::kTile);
    if (threadIdx.x >= gemm::kTile) return;
    column = index * gemm::kTile + static_cast<int>(threadIdx.x);
    value = gated(activation, value, up);
  } else {
    value = activated(activation, value);
  }
  if (column < width) inner[slot * width + column] = __float2bfloat16_rn(value);
}

// out [tokens, hidden] = the weighted sum of the down outputs.
template <gemm::Format kFormat>
__global__ void __launch_bounds__(kThreads) down_kernel(const __nv_bfloat16* inner, Routes routes, Panels matrix,
                                                        size_t at, size_t bias_at, float* out, int hidden) {
  __shared__ float shared[kWarps][gemm::kPanel];
  const size_t token = blockIdx.y;
  const int index = static_cast<int>(blockIdx.x), column = index * gemm::kPanel + static_cast<int>(threadIdx.x);
  float sums[2][4] = {}, bias = 0;
  for (int i = 0; i < routes.top_k; ++i) {
    const size_t slot = token * routes.top_k + i;
    const std::byte* expert = expert_of(routes, slot);
    if (expert == nullptr) continue;
    const float weight = value_of(routes.weights, routes.weights_dtype, slot);
    float terms[2][4] = {};
    multiply<kFormat>(matrix, expert + at + static_cast<size_t>(index) * matrix.panel_bytes, inner + slot * matrix.k,
                      terms);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j / 4][j % 4] = fmaf(weight, terms[j / 4][j % 4], sums[j / 4][j % 4]);
    if (bias_at != 0 && threadIdx.x < gemm::kPanel)
      bias = fmaf(weight, reinterpret_cast<const float*>(expert + bias_at)[column], bias);
  }
  const float value = gather(sums, shared) + bias;
  if (threadIdx.x < gemm::kPanel && column < hidden) out[token * hidden + column] = value;
}

}  // namespace

Resident::Resident(const moe::Experts& experts) : config_(experts.config()) {
  const bool is_mixed = config_.down_format != config_.format;
  if (gemm::is_k_quant(config_.format) && (config_.format != gemm::Format::q8_0 || is_mixed))
    throw std::invalid_argument(std::string("experts on a GPU: found weights of ") + gemm::format_name(config_.format) +
                                (is_mixed ? " and another format of down" : "") +
                                ", which have no kernel there; the other formats have one");
  for (const moe::PackedRun& run : experts.packed()) (run.is_down ? down_ : gate_up_) = run.matrix;
  // Panels and biases are multiples of 64 bytes, so everything is aligned without padding.
  down_at_ = gate_up_.bytes();
  gate_up_bias_at_ = down_at_ + down_.bytes();
  down_bias_at_ = gate_up_bias_at_ + static_cast<size_t>(gate_up_.panels) * gemm::kPanel * sizeof(float);
  bytes_ = experts.bytes() / static_cast<size_t>(config_.experts);
}

bool Resident::holds(const moe::Experts& experts) const {
  const moe::ExpertsConfig& other = experts.config();
  return other.format == config_.format && other.down_format == config_.down_format &&
         other.hidden_size == config_.hidden_size && other.intermediate_size == config_.intermediate_size &&
         other.group_size == config_.group_size && other.symmetric == config_.symmetric &&
         other.activation.has_gate == config_.activation.has_gate && other.has_bias == config_.has_bias;
}

void Resident::copy(const moe::Experts& experts, int expert, void* to, Stream stream) const {
  const OnStream on(stream);
  auto put = [&](size_t at, const void* from, size_t bytes) {
    check_cuda(cudaMemcpyAsync(static_cast<std::byte*>(to) + at, from, bytes, cudaMemcpyHostToDevice, on),
               "copying an expert to the GPU");
  };
  for (const moe::PackedRun& run : experts.packed()) put(at(run), run.data + run.bytes(expert), run.bytes(1));
  if (!config_.has_bias) return;
  for (const bool down : {false, true}) {
    const auto values = static_cast<size_t>((down ? down_ : gate_up_).panels) * gemm::kPanel;
    put(down ? down_bias_at_ : gate_up_bias_at_, experts.packed_bias(down) + static_cast<size_t>(expert) * values,
        values * sizeof(float));
  }
}

void Resident::forward(const ResidentRequest& request, Stream to) const {
  const OnStream stream(to);
  const auto panels = [](const gemm::Matrix& matrix) {
    const bool zeros = matrix.format == gemm::Format::int4 && !matrix.symmetric;
    return Panels{matrix.panels,
                  matrix.k,
                  matrix.blocks(),
                  matrix.group_size,
                  matrix.panel_bytes(),
                  matrix.head_bytes(),
                  zeros ? gemm::int4_zeros_at(matrix.groups()) : 0};
  };
  const Routes routes{request.chosen, request.weights, static_cast<const std::byte*>(request.resident),
                      bytes_,         request.top_k,   request.weights_dtype};
  auto* inner = static_cast<__nv_bfloat16*>(request.inner);
  const auto run = [&]<gemm::Format kFormat>(std::integral_constant<gemm::Format, kFormat>) {
    const dim3 slots(static_cast<unsigned>(gate_up_.panels), static_cast<unsigned>(request.tokens * request.top_k));
    const auto first = [&]<class T>(const T* x) {
      gate_up_kernel<kFormat><<<slots, kThreads, 0, stream>>>(x, routes, panels(gate_up_),
                                                              config_.has_bias ? gate_up_bias_at_ : 0,
                                                              config_.activation, inner, inner_width());
    };
    if (request.dtype == DType::f32) first(static_cast<const float*>(request.x));
    else if (request.dtype == DType::f16) first(static_cast<const __half*>(request.x));
    else first(static_cast<const __nv_bfloat16*>(request.x));
    check_cuda(cudaGetLastError(), "launching the gate and up kernel");
    const dim3 tokens(static_cast<unsigned>(down_.panels), static_cast<unsigned>(request.tokens));
    down_kernel<kFormat><<<tokens, kThreads, 0, stream>>>(
        inner, routes, panels(down_), down_at_, config_.has_bias ? down_bias_at_ : 0, request.out, config_.hidden_size);
    check_cuda(cudaGetLastError(), "launching the down kernel");
  };
  using gemm::Format;
  switch (config_.format) {
    case Format::int4:
      return run(std::integral_constant<Format, Format::int4>());
    case Format::int8:
      return run(std::integral_constant<Format, Format::int8>());
    case Format::fp8:
      return run(std::integral_constant<Format, Format::fp8>());
    case Format::mxfp4:
      return run(std::integral_constant<Format, Format::mxfp4>());
    case Format::mxfp8:
      return run(std::integral_constant<Format, Format::mxfp8>());
    case Format::fp8_channel:
      return run(std::integral_constant<Format, Format::fp8_channel>());
    case Format::nvfp4:
      return run(std::integral_constant<Format, Format::nvfp4>());
    case Format::q8_0:
      return run(std::integral_constant<Format, Format::q8_0>());
    case Format::bf16:
      return run(std::integral_constant<Format, Format::bf16>());
    default:
      throw std::invalid_argument("experts on a GPU: a format without a kernel");
  }
}

}  // namespace ktinject::cuda
