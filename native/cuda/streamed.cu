// Unpacking: a thread block turns 128 inputs of one panel (32 outputs; see gemm/layout.hpp) into rows of bf16 by way of
// shared memory, so that packed words are read and rows written in whole lines.
#include "cuda/streamed.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "cuda/activation.cuh"
#include "cuda/on_device.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kInputs = 128;  // of one thread block
constexpr int kThreads = 256;
// Copies of other streams get their turn between two of these, a third of a millisecond.
constexpr size_t kPieceBytes = 16 << 20;
constexpr int kPad = 8;  // bf16; keeps rows 16-byte aligned and off each other's banks

struct Target {
  __nv_bfloat16* out;  // [experts, rows, k]
  int rows;
  int k;
  int half;         // outputs of a half where gate and up lie side by side in a panel; 0 where they do not
  int first_panel;  // of the run
};

struct Shape {
  size_t panel_bytes;
  size_t head_bytes;
  int blocks;       // along k
  int group_size;   // inputs
  size_t zeros_at;  // int4: offset of the zero points in a panel, 0 where symmetric
};

// Where the experts of a launch lie: at base + place * stride, for the kernel's panels.
constexpr int kMostPlaces = 256;
struct Source {
  const std::byte* base;
  size_t stride;
  uint16_t places[kMostPlaces];
};

__device__ float bf16_value(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

using Tile = __nv_bfloat16[gemm::kPanel][kInputs + kPad];

// One 32-bit word of a panel's data → the values that it holds. `word` counts from the first block of this thread
// block's inputs; `first` is its first input.
template <gemm::Format kFormat>
struct Words;

template <>
struct Words<gemm::Format::bf16> {
  static __device__ void put(Tile& tile, const Shape&, const std::byte*, uint32_t bits, int column, int input, int row,
                             int) {
    *reinterpret_cast<uint32_t*>(&tile[column][input + 2 * row]) = bits;
  }
};

template <>
struct Words<gemm::Format::int8> {
  static __device__ void put(Tile& tile, const Shape&, const std::byte* panel, uint32_t bits, int column, int input,
                             int row, int) {
    const float scale = reinterpret_cast<const float*>(panel)[column];
    for (int i = 0; i < 4; ++i)
      tile[column][input + 4 * row + i] =
          __float2bfloat16_rn(static_cast<float>(static_cast<int8_t>(bits >> (8 * i))) * scale);
  }
};

template <>
struct Words<gemm::Format::int4> {
  static __device__ void put(Tile& tile, const Shape& shape, const std::byte* panel, uint32_t bits, int column,
                             int input, int row, int first) {
    const auto* scales = reinterpret_cast<const uint16_t*>(panel + gemm::kInt4ScalesAt);
    const int at = input + 8 * row, group = gemm::scale_at(gemm::Format::int4, (first + at) / shape.group_size, column);
    const float scale = bf16_value(scales[group]);
    const int zero = shape.zeros_at == 0 ? 8 : static_cast<int>(panel[shape.zeros_at + group]);
    for (int i = 0; i < 8; ++i) {
      const int q = static_cast<int>(bits >> (8 * (i % 4) + 4 * (i / 4)) & 15) - zero;
      tile[column][at + i] = __float2bfloat16_rn(static_cast<float>(q) * scale);
    }
  }
};

__device__ float fp8_value(uint32_t code) {
  const uint32_t mantissa = code & 7, exponent = (code & 0xe0) >> 4 | (code & 8) >> 3;
  const float magnitude =
      exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f : __uint_as_float(exponent + 120 << 23 | mantissa << 20);
  return code & 0x10 ? -magnitude : magnitude;
}

__device__ float e2m1_value(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3;
  const float magnitude =
      exponent == 0 ? static_cast<float>(code & 1) * 0.5f : __uint_as_float(exponent + 126 << 23 | (code & 1) << 22);
  return code & 8 ? -magnitude : magnitude;
}

// Two rows of the bf16 block lie in one: byte 0 and 2 are row 2 * row, byte 1 and 3 the next.
__device__ void put_fp8(Tile& tile, uint32_t bits, int column, int at, float scale) {
  for (int i = 0; i < 4; ++i)
    tile[column][at + i % 2 * 2 + i / 2] = __float2bfloat16_rn(fp8_value(bits >> (8 * i) & 255) * scale);
}

// Four rows of the bf16 block lie in one: nibble i of each half of the word is row 4 * row + i.
__device__ void put_e2m1(Tile& tile, uint32_t bits, int column, int at, float scale) {
  for (int i = 0; i < 8; ++i)
    tile[column][at + i] = __float2bfloat16_rn(e2m1_value(bits >> (16 * (i % 2) + 4 * (i / 2)) & 15) * scale);
}

template <>
struct Words<gemm::Format::fp8> {
  static __device__ void put(Tile& tile, const Shape& shape, const std::byte* panel, uint32_t bits, int column,
                             int input, int row, int first) {
    const int at = gemm::scale_at(gemm::Format::fp8, (first + input) / shape.group_size, column);
    put_fp8(tile, bits, column, input + 4 * row, reinterpret_cast<const float*>(panel)[at]);
  }
};

// The e8m0 scale of the block that begins at `input`.
__device__ float e8m0_scale(gemm::Format format, const Shape& shape, const std::byte* panel, int column, int input) {
  return __uint_as_float(static_cast<uint32_t>(panel[gemm::scale_at(format, input / shape.group_size, column)]) << 23);
}

template <>
struct Words<gemm::Format::mxfp4> {
  static __device__ void put(Tile& tile, const Shape& shape, const std::byte* panel, uint32_t bits, int column,
                             int input, int row, int first) {
    put_e2m1(tile, bits, column, input + 8 * row, e8m0_scale(gemm::Format::mxfp4, shape, panel, column, first + input));
  }
};

template <>
struct Words<gemm::Format::mxfp8> {
  static __device__ void put(Tile& tile, const Shape& shape, const std::byte* panel, uint32_t bits, int column,
                             int input, int row, int first) {
    put_fp8(tile, bits, column, input + 4 * row, e8m0_scale(gemm::Format::mxfp8, shape, panel, column, first + input));
  }
};

template <>
struct Words<gemm::Format::fp8_channel> {
  static __device__ void put(Tile& tile, const Shape&, const std::byte* panel, uint32_t bits, int column, int input,
                             int row, int) {
    put_fp8(tile, bits, column, input + 4 * row, reinterpret_cast<const float*>(panel)[column]);
  }
};

template <>
struct Words<gemm::Format::nvfp4> {
  static __device__ void put(Tile& tile, const Shape& shape, const std::byte* panel, uint32_t bits, int column,
                             int input, int row, int first) {
    const int group = (first + input + 8 * row) / shape.group_size;
    const auto packed = static_cast<uint32_t>(
        panel[gemm::kFactorsBytes + static_cast<size_t>(gemm::scale_at(gemm::Format::nvfp4, group, column))]);
    const float scale = packed == 0 ? 0.0f : __uint_as_float((packed << 20) + (117u << 23));
    put_e2m1(tile, bits, column, input + 8 * row, scale * reinterpret_cast<const float*>(panel)[column]);
  }
};

// gemm::kIq4Values, where kernels find them.
__constant__ int8_t kIq4ValuesOnGpu[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The bits of input `i` of quad `quad` of 32 inputs, from the rows of one plane; see gemm/k_quants.hpp.
template <int kBits>
__device__ int code_bits(const uint32_t* row, int quad, int i) {
  constexpr int kQuads = 8 / kBits;  // in a byte
  return static_cast<int>(row[quad / kQuads * 16] >> (8 * i + quad % kQuads * kBits) & ((1u << kBits) - 1));
}

// 32 inputs of an output of a K-quant, by one thread, in ggml's order of products.
template <gemm::Format kFormat>
__device__ void put_k_quant(Tile& tile, const std::byte* block, int column, int chunk, int input) {
  constexpr gemm::KQuant kKind = gemm::k_quant(kFormat);
  constexpr int kScales = gemm::k_factor_rows(kFormat), kMinima = kScales + gemm::k_scale_rows(kFormat);
  const auto* factors = reinterpret_cast<const __half*>(block);
  const float d = __half2float(factors[column]);
  const float m = kKind.has_min ? __half2float(factors[gemm::kPanel + column]) : 0.0f;
  const int row = gemm::k_head_rows(kFormat) + (column / gemm::kTile * 8 + chunk) * gemm::k_code_rows(kFormat);
  const auto* codes = reinterpret_cast<const uint32_t*>(block + row * 64) + column % gemm::kTile;
  float scale = 0, least = 0;
#pragma unroll
  for (int at = 0; at < 32; ++at) {
    if (at % kKind.run == 0) {
      const int run = (chunk * 32 + at) / kKind.run, place = run / 2 * 64 + column * 2 + run % 2;
      int s = static_cast<int8_t>(block[kScales * 64 + place]), t = 0;
      if constexpr (kFormat == gemm::Format::q2_k) {
        t = s >> 4 & 15;
        s &= 15;
      } else if constexpr (kKind.has_min) {
        t = static_cast<int>(block[kMinima * 64 + place]);
      }
      scale = d * static_cast<float>(s), least = m * static_cast<float>(t);
    }
    int code = code_bits<kKind.low>(codes, at / 4, at % 4);
    if constexpr (kKind.high > 0) code |= code_bits<kKind.high>(codes + kKind.low * 16, at / 4, at % 4) << kKind.low;
    if constexpr (kFormat == gemm::Format::iq4_xs) code = kIq4ValuesOnGpu[code];
    else code -= kKind.zero;
    const float product = __fmul_rn(scale, static_cast<float>(code));
    tile[column][input + at] = __float2bfloat16_rn(kKind.has_min ? __fsub_rn(product, least) : product);
  }
}

// The same of q8_0.
__device__ void put_q8_0(Tile& tile, const std::byte* block, int column, int run, int input) {
  constexpr gemm::Format kFormat = gemm::Format::q8_0;
  const float d = __half2float(reinterpret_cast<const __half*>(block)[run * gemm::kPanel + column]);
  const int row = gemm::k_head_rows(kFormat) + (column / gemm::kTile * (gemm::kQ8Inputs / 32) + run) * 8;
  const auto* codes = reinterpret_cast<const uint32_t*>(block + row * 64) + column % gemm::kTile;
#pragma unroll
  for (int at = 0; at < 32; ++at) {
    const auto code = static_cast<int8_t>(codes[at / 4 * 16] >> (8 * (at % 4)));
    tile[column][input + at] = __float2bfloat16_rn(__fmul_rn(d, static_cast<float>(code)));
  }
}

// Fills the tile with the values of kInputs inputs of a K-quant from `first` on.
template <gemm::Format kFormat>
__device__ void fill_tile(Tile& tile, const std::byte* panel, int first) {
  constexpr int kBlock = gemm::k_inputs(kFormat);
  static_assert(kBlock % kInputs == 0);
  const std::byte* block = panel + static_cast<size_t>(first / kBlock) * 2 * gemm::tile_bytes(kFormat);
  for (int i = static_cast<int>(threadIdx.x); i < gemm::kPanel * kInputs / 32; i += kThreads) {
    const int column = i % gemm::kPanel, input = i / gemm::kPanel * 32;
    const int chunk = (first % kBlock + input) / 32;
    if constexpr (kFormat == gemm::Format::q8_0) put_q8_0(tile, block, column, chunk, input);
    else put_k_quant<kFormat>(tile, block, column, chunk, input);
  }
}

// The same of a format whose words tell their values with the panel's head.
template <gemm::Format kFormat>
__device__ void fill_tile_by_words(Tile& tile, const std::byte* panel, const Shape& shape, int first) {
  using W = Words<kFormat>;
  constexpr int kBlock = gemm::block_inputs(kFormat), kTileWords = gemm::tile_bytes(kFormat) / sizeof(uint32_t);
  constexpr int kBlocks = kInputs / kBlock;
  const int first_block = first / kBlock;
  const int blocks = min(kBlocks, shape.blocks - first_block);
  const auto* words =
      reinterpret_cast<const uint32_t*>(panel + shape.head_bytes) + static_cast<size_t>(first_block) * 2 * kTileWords;
  for (int w = static_cast<int>(threadIdx.x); w < blocks * 2 * kTileWords; w += kThreads) {
    const int in_block = w % (2 * kTileWords), in_tile = in_block % kTileWords;
    const int column = in_block / kTileWords * gemm::kTile + in_tile % gemm::kTile;
    W::put(tile, shape, panel, words[w], column, w / (2 * kTileWords) * kBlock, in_tile / gemm::kTile, first);
  }
}

template <gemm::Format kFormat>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ Source source, Shape shape, Target target) {
  __shared__ __align__(16) Tile tile;
  const int panel_index = static_cast<int>(blockIdx.y), expert = static_cast<int>(blockIdx.z);
  const int first = static_cast<int>(blockIdx.x) * kInputs;
  const std::byte* panel =
      source.base + source.places[expert] * source.stride + static_cast<size_t>(panel_index) * shape.panel_bytes;
  if constexpr (gemm::is_k_quant(kFormat)) fill_tile<kFormat>(tile, panel, first);
  else fill_tile_by_words<kFormat>(tile, panel, shape, first);
  __syncthreads();
  const int width = min(kInputs, target.k - first);
  for (int i = static_cast<int>(threadIdx.x); i < gemm::kPanel * kInputs / 8; i += kThreads) {
    const int column = i / (kInputs / 8), input = i % (kInputs / 8) * 8;
    const int panel_at = target.first_panel + panel_index;
    const int within = target.half ? panel_at * gemm::kTile + column % gemm::kTile : panel_at * gemm::kPanel + column;
    if (input >= width || within >= (target.half ? target.half : target.rows)) continue;
    const int row = within + (target.half && column >= gemm::kTile ? target.half : 0);
    auto* out = target.out + (static_cast<size_t>(expert) * target.rows + row) * target.k + first + input;
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(&tile[column][input]);
  }
}

constexpr int kActivateThreads = 256;

// Four outputs a thread: widths are multiples of 8.
template <class T>
__global__ void __launch_bounds__(kActivateThreads)
    activate_kernel(const T* in, __nv_bfloat16* out, size_t rows, int width, gemm::Activation activation) {
  constexpr int kEach = 4;
  struct alignas(sizeof(T) * kEach) Run {
    T values[kEach];
  };
  const size_t i = (static_cast<size_t>(blockIdx.x) * kActivateThreads + threadIdx.x) * kEach;
  if (i >= rows * width) return;
  const size_t row = i / width, column = i % width;
  const T* from = in + row * width * (activation.has_gate ? 2 : 1) + column;
  const Run first = *reinterpret_cast<const Run*>(from);
  Run second = first;
  if (activation.has_gate) second = *reinterpret_cast<const Run*>(from + width);
  __align__(8) __nv_bfloat16 result[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const auto value = static_cast<float>(first.values[j]);
    result[j] = __float2bfloat16_rn(activation.has_gate ? gated(activation, value, static_cast<float>(second.values[j]))
                                                        : activated(activation, value));
  }
  *reinterpret_cast<uint2*>(out + i) = *reinterpret_cast<const uint2*>(result);
}

constexpr int kSumThreads = 256;
constexpr int kSumEach = 8;  // columns of a thread: 16 bytes of bf16

// A block sums a token.
template <class T, class W>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(const __nv_bfloat16* answers, int64_t known, const int64_t* rows, const W* weights, int slots,
               int hidden, T* out) {
  struct alignas(sizeof(T) * kSumEach) Run {
    T values[kSumEach];
  };
  const size_t token = blockIdx.x;
  for (int column = static_cast<int>(threadIdx.x) * kSumEach; column < hidden; column += kSumThreads * kSumEach) {
    float sums[kSumEach] = {};
    for (int slot = 0; slot < slots; ++slot) {
      const int64_t row = rows[token * slots + slot];
      if (row >= known) continue;
      const float weight = load(weights[token * slots + slot]);
      const uint4 words = *reinterpret_cast<const uint4*>(answers + static_cast<size_t>(row) * hidden + column);
      const auto* values = reinterpret_cast<const __nv_bfloat16*>(&words);
#pragma unroll
      for (int i = 0; i < kSumEach; ++i) sums[i] = fmaf(load(values[i]), weight, sums[i]);
    }
    Run found;
#pragma unroll
    for (int i = 0; i < kSumEach; ++i) found.values[i] = store<T>(sums[i]);
    *reinterpret_cast<Run*>(out + token * hidden + column) = found;
  }
}

constexpr int kAddThreads = 256;
constexpr size_t kAddBlocks = 512;  // a few megabytes under way hide the bus's latency

template <class T>
__global__ void __launch_bounds__(kAddThreads)
    add_from_host_kernel(const T* host, const float* addend, T* out, size_t count) {
  constexpr size_t kEach = 16 / sizeof(T);
  const size_t stride = static_cast<size_t>(gridDim.x) * kAddThreads * kEach;
  for (size_t i = (static_cast<size_t>(blockIdx.x) * kAddThreads + threadIdx.x) * kEach; i < count; i += stride) {
    uint4 words = *reinterpret_cast<const uint4*>(host + i);
    T* values = reinterpret_cast<T*>(&words);
#pragma unroll
    for (size_t j = 0; j < kEach; ++j) values[j] = static_cast<T>(static_cast<float>(values[j]) + addend[i + j]);
    *reinterpret_cast<uint4*>(out + i) = words;
  }
}

}  // namespace

void add_from_host(const void* host, const float* addend, void* out, size_t count, DType dtype, Stream stream) {
  const OnStream on(stream);
  const auto launch = [&]<class T>(const T* from) {
    const size_t blocks = (count * sizeof(T) / 16 + kAddThreads - 1) / kAddThreads;
    add_from_host_kernel<<<static_cast<unsigned>(std::min(blocks, kAddBlocks)), kAddThreads, 0, on>>>(
        from, addend, static_cast<T*>(out), count);
  };
  if (count == 0) return;
  if (dtype == DType::f32) launch(static_cast<const float*>(host));
  else if (dtype == DType::f16) launch(static_cast<const __half*>(host));
  else launch(static_cast<const __nv_bfloat16*>(host));
  check_cuda(cudaGetLastError(), "adding what the CPU computed");
}

Streamed::Streamed(const moe::Experts& experts, int first) : experts_(experts), first_(first), runs_(experts.packed()) {
  if (first < 0 || first >= experts.config().experts)
    throw std::invalid_argument("streamed experts begin at " + std::to_string(first) + ", and there are " +
                                std::to_string(experts.config().experts));
  for (const moe::PackedRun& run : runs_) lock(run);
}

Streamed::~Streamed() { unlock(); }

void Streamed::unlock() noexcept {
  if (locked_.empty()) return;
  // Copies out of this memory may be under way: to the devices that this has copied to, and by others to the current
  // one.
  int current = 0;
  cudaGetDevice(&current);
  cudaDeviceSynchronize();
  uint64_t devices = devices_.load();
  for (int device = 0; devices != 0; ++device, devices >>= 1)
    if ((devices & 1) != 0 && device != current) {
      cudaSetDevice(device);
      cudaDeviceSynchronize();
    }
  cudaSetDevice(current);
  for (std::byte* const from : locked_) cudaHostUnregister(from);
  locked_.clear();
  cudaGetLastError();
}

// The experts of a run that are in RAM, in whole pages. Where what is left out has no page of its own, it is locked
// with the others: a page is locked once, and no expert lies in two locked parts.
void Streamed::lock(const moe::PackedRun& run) {
  constexpr uintptr_t kPage = 4096;
  struct Part {
    uintptr_t from, end;
  };
  std::vector<Part> parts;
  for (int expert = first_; expert < experts_.config().experts; ++expert) {
    if (experts_.is_released(expert)) continue;
    const uintptr_t from = reinterpret_cast<uintptr_t>(run.data) + run.bytes(expert), end = from + run.bytes(1);
    if (parts.empty() || from / kPage * kPage > parts.back().end) parts.push_back({from / kPage * kPage, end});
    else parts.back().end = end;
  }
  for (const Part& part : parts) {
    auto* const from = reinterpret_cast<std::byte*>(part.from);
    const auto error = cudaHostRegister(from, part.end - part.from, cudaHostRegisterPortable);
    if (error != cudaSuccess) {
      unlock();
      check_cuda(error, "page-locking the packed experts");
    }
    locked_.push_back(from);
  }
}

size_t Streamed::packed_bytes(int count) const {
  size_t bytes = 0;
  for (const moe::PackedRun& run : runs_) bytes += run.bytes(count);
  return bytes;
}

void Streamed::copy(const std::vector<int>& experts, void* slot, Stream stream) const {
  const OnStream on(stream);
  for (const int expert : experts)
    if (expert < first_ || expert >= experts_.config().experts)
      throw std::invalid_argument("streamed experts: found " + std::to_string(expert) + "; allowed: " +
                                  std::to_string(first_) + " to " + std::to_string(experts_.config().experts - 1));
    else if (experts_.is_released(expert))
      throw std::invalid_argument("streamed experts: expert " + std::to_string(expert) + " is not in RAM");
  devices_.fetch_or(uint64_t{1} << stream.device);
  auto* to = static_cast<std::byte*>(slot);
  for (const moe::PackedRun& run : runs_)
    for (size_t at = 0, next = 0; at < experts.size(); at = next) {
      // As many as lie one behind another.
      for (next = at + 1; next < experts.size() && experts[next] == experts[next - 1] + 1;) ++next;
      const std::byte* from = run.data + run.bytes(experts[at]);
      const size_t bytes = run.bytes(static_cast<int>(next - at));
      for (size_t piece = 0; piece < bytes; piece += kPieceBytes)
        check_cuda(
            cudaMemcpyAsync(to + piece, from + piece, std::min(kPieceBytes, bytes - piece), cudaMemcpyHostToDevice, on),
            "copying packed experts to the GPU");
      to += bytes;
    }
}

void Streamed::unpack(const void* slot, int count, void* gate_up, void* down, Stream stream) const {
  std::vector<int> places(static_cast<size_t>(count));
  std::iota(places.begin(), places.end(), 0);
  const auto* from = static_cast<const std::byte*>(slot);
  for (const moe::PackedRun& run : runs_) {
    unpack_run(run, from, run.bytes(1), places, run.is_down ? down : gate_up, stream);
    from += run.bytes(count);
  }
}

void Streamed::unpack_resident(const Resident& shapes, const void* memory, const std::vector<int>& places,
                               void* gate_up, void* down, Stream stream) const {
  if (!shapes.holds(experts_))
    throw std::invalid_argument("unpacking experts on a GPU: they have other shapes, or another format, there");
  for (const moe::PackedRun& run : runs_)
    unpack_run(run, static_cast<const std::byte*>(memory) + shapes.at(run), shapes.bytes(), places,
               run.is_down ? down : gate_up, stream);
}

// Panels of a run, of experts at from + place * stride → out [places, rows, k].
void Streamed::unpack_run(const moe::PackedRun& run, const std::byte* from, size_t stride,
                          const std::vector<int>& places, void* out, Stream stream) const {
  const OnStream on(stream);
  const moe::ExpertsConfig& config = experts_.config();
  const gemm::Matrix& matrix = run.matrix;
  if (matrix.k % 8 != 0) throw std::invalid_argument("unpacking on a GPU: widths must be multiples of 8");
  const bool paired = !run.is_down && config.activation.has_gate;
  const int rows = run.is_down ? config.hidden_size : config.intermediate_size * (paired ? 2 : 1);
  size_t zeros_at = 0;
  if (matrix.format == gemm::Format::int4 && !matrix.symmetric) zeros_at = gemm::int4_zeros_at(matrix.groups());
  const Shape shape{matrix.panel_bytes(), matrix.head_bytes(), matrix.blocks(), matrix.group_size, zeros_at};
  for (size_t first = 0; first < places.size(); first += kMostPlaces) {
    const size_t count = std::min<size_t>(kMostPlaces, places.size() - first);
    Source source{from, stride, {}};
    for (size_t i = 0; i < count; ++i) {
      const int place = places[first + i];
      if (place < 0 || place > std::numeric_limits<uint16_t>::max())
        throw std::invalid_argument("unpacking experts on a GPU: found place " + std::to_string(place) +
                                    "; allowed: 0 to 65535");
      source.places[i] = static_cast<uint16_t>(place);
    }
    const Target target{static_cast<__nv_bfloat16*>(out) + first * static_cast<size_t>(rows) * matrix.k, rows, matrix.k,
                        paired ? config.intermediate_size : 0, run.first_panel};
    const dim3 grid(static_cast<unsigned>((matrix.k + kInputs - 1) / kInputs), static_cast<unsigned>(run.panels),
                    static_cast<unsigned>(count));
    const auto launch = [&](auto kernel) { kernel<<<grid, kThreads, 0, on>>>(source, shape, target); };
    switch (matrix.format) {
      case gemm::Format::bf16:
        launch(unpack_kernel<gemm::Format::bf16>);
        break;
      case gemm::Format::int8:
        launch(unpack_kernel<gemm::Format::int8>);
        break;
      case gemm::Format::int4:
        launch(unpack_kernel<gemm::Format::int4>);
        break;
      case gemm::Format::fp8:
        launch(unpack_kernel<gemm::Format::fp8>);
        break;
      case gemm::Format::mxfp4:
        launch(unpack_kernel<gemm::Format::mxfp4>);
        break;
      case gemm::Format::fp8_channel:
        launch(unpack_kernel<gemm::Format::fp8_channel>);
        break;
      case gemm::Format::nvfp4:
        launch(unpack_kernel<gemm::Format::nvfp4>);
        break;
      case gemm::Format::mxfp8:
        launch(unpack_kernel<gemm::Format::mxfp8>);
        break;
      case gemm::Format::q2_k:
        launch(unpack_kernel<gemm::Format::q2_k>);
        break;
      case gemm::Format::q3_k:
        launch(unpack_kernel<gemm::Format::q3_k>);
        break;
      case gemm::Format::q4_k:
        launch(unpack_kernel<gemm::Format::q4_k>);
        break;
      case gemm::Format::q5_k:
        launch(unpack_kernel<gemm::Format::q5_k>);
        break;
      case gemm::Format::q6_k:
        launch(unpack_kernel<gemm::Format::q6_k>);
        break;
      case gemm::Format::iq4_xs:
        launch(unpack_kernel<gemm::Format::iq4_xs>);
        break;
      case gemm::Format::q8_0:
        launch(unpack_kernel<gemm::Format::q8_0>);
        break;
    }
    check_cuda(cudaGetLastError(), "unpacking experts on the GPU");
  }
}

void Streamed::sum(const Answers& answers, void* out, DType dtype, Stream stream) const {
  if (answers.tokens == 0) return;
  const int hidden = experts_.config().hidden_size;
  if (hidden % kSumEach != 0) throw std::invalid_argument("adding up on a GPU: widths must be multiples of 8");
  const OnStream on(stream);
  const auto launch = [&]<class T, class W>(T* to, const W* weights) {
    sum_kernel<<<static_cast<unsigned>(answers.tokens), kSumThreads, 0, on>>>(
        static_cast<const __nv_bfloat16*>(answers.values), answers.known, answers.rows, weights, answers.slots, hidden,
        to);
  };
  const auto by_weights = [&]<class T>(T* to) {
    if (answers.weights_dtype == DType::f32) launch(to, static_cast<const float*>(answers.weights));
    else if (answers.weights_dtype == DType::f16) launch(to, static_cast<const __half*>(answers.weights));
    else launch(to, static_cast<const __nv_bfloat16*>(answers.weights));
  };
  if (dtype == DType::f32) by_weights(static_cast<float*>(out));
  else if (dtype == DType::f16) by_weights(static_cast<__half*>(out));
  else by_weights(static_cast<__nv_bfloat16*>(out));
  check_cuda(cudaGetLastError(), "adding up what experts answer");
}

void Streamed::activate(const void* gate_up, DType dtype, size_t rows, void* out, Stream stream) const {
  const moe::ExpertsConfig& config = experts_.config();
  if (rows == 0) return;
  const OnStream on(stream);
  const size_t threads = rows * static_cast<size_t>(config.intermediate_size) / 4;
  const auto blocks = static_cast<unsigned>((threads + kActivateThreads - 1) / kActivateThreads);
  const auto launch = [&]<class T>(const T* in) {
    activate_kernel<<<blocks, kActivateThreads, 0, on>>>(in, static_cast<__nv_bfloat16*>(out), rows,
                                                         config.intermediate_size, config.activation);
  };
  if (dtype == DType::f32) launch(static_cast<const float*>(gate_up));
  else launch(static_cast<const __nv_bfloat16*>(gate_up));
  check_cuda(cudaGetLastError(), "activating experts on the GPU");
}

}  // namespace ktinject::cuda
