// int4 weights times bf16 or fp16 activations on tensor cores, sm_80 and newer.
//
// The weights are the A operand of mma.m16n8k16, so rows of the tensor core's tile are outputs and its columns are
// tokens: one token costs an eighth of a tile, not a sixteenth, and a scale belongs to a row of the accumulator.
//
//   a block of 8 warps works on 256 outputs × 64 inputs a stage, a warp on 32 of the outputs:
//
//        64 inputs                                     tokens
//      ┌───────────┐ warp 0: 2 tiles of 16 × 64      ┌────────┐
//  256 │           │ warp 1                      · k │ x      │ ──► 256 × tokens in registers, fp32
//      │           │   …                           64└────────┘
//      └───────────┘ warp 7
//
// The words of a tile lie as its lanes want them: one 16-byte piece a lane is 16 outputs × 64 inputs. Stages arrive by
// cp.async in a ring. The codes become 16-bit floats without scale, exactly; sums over a group are exact products
// summed in fp32, and are then multiplied by the group's scale in fp32.
//
// All stages of all strips of 256 outputs stand in one line, which is cut into equal parts, one a block. A strip that
// several blocks share is summed by the last of them to arrive, in the order of the line: the same bits every time.
//
// Source: the striped partition and dequantisation by lop3 are ideas of Marlin (Frantar et al. 2024).
#include "cuda/int4_linear.hpp"

#include "cuda/devices.hpp"
#include "cuda/int4_tile.cuh"
#include "cuda/on_device.cuh"
#include "cuda/shared_memory.cuh"

namespace ktinject::cuda::int4 {
namespace {

constexpr int kThreads = ShapeSm80::kThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kTiles = 2;                        // tiles of 16 outputs a warp
constexpr int kStrip = 16 * kTiles * kWarps;     // outputs a block
constexpr int kDepth = ShapeSm80::kInputs;       // inputs a stage
constexpr int kWordBytes = kStrip * kDepth / 2;  // of a stage
static_assert(kStrip == ShapeSm80::kOutputs);

__device__ __forceinline__ void copy16(void* to, const void* from, bool real) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = real ? 16 : 0;  // zeros for the rest
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Bytes of a stage: words, activations [tokens][64] with the 16-byte pieces of a row swizzled, scales of one or two
// groups.
template <int kTokens, bool kHalfGroups>
constexpr int kStageBytes = ShapeSm80::stage_bytes(kTokens, kHalfGroups);

// T: of activations. kTokens: rows of a block, a multiple of 8. kHalfGroups: groups of 32, two a stage. A position is a
// stage's place in the line, a unit a strip with one block of tokens.

// A lane's sums: kColumns times 8 tokens.
template <int kColumns>
using Sums = float[kTiles][kColumns][4];

struct Scales {
  float scale[kTiles][2];
  uint32_t zeros[kTiles][2];
};

// Asks for the stage at a position: words, activations, scales.
template <int kTokens, bool kHalfGroups>
__device__ __forceinline__ void fetch(const Int4Arguments& p, uint8_t* stage, int position, int warp, int lane) {
  constexpr int kGroups = kHalfGroups ? 2 : 1;
  const int unit = position / p.depth, depth = position - unit * p.depth;
  const int strip = unit % p.strips, token = unit / p.strips * kTokens;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int tile = warp * kTiles + i;  // of 16 outputs
    const int tile64 = strip * (kStrip / 64) + tile / 4;
    const bool real = tile64 < p.tiles64;
    const size_t offset = words_at(p, real ? tile64 : 0, depth) + tile % 4 * 512 + lane * 16;
    copy16(stage + tile * 512 + lane * 16, p.words + offset, real);
  }
  uint8_t* activations = stage + kWordBytes;
  for (int i = threadIdx.x; i < kTokens * 8; i += kThreads) {
    const int row = i / 8, piece = i % 8;
    const bool real = token + row < p.m;
    const size_t offset = (static_cast<size_t>(real ? token + row : 0) * p.k + depth * kDepth) * 2 + piece * 16;
    copy16(activations + row * 128 + ((piece ^ row) & 7) * 16, p.x + offset, real);
  }
  uint8_t* scales = activations + kTokens * 128;
  const int pieces = 4 * p.scale_bytes;  // of 64 outputs' scales
  const int group = kHalfGroups ? 2 * depth : depth / p.stages_per_group;
  for (int i = threadIdx.x; i < kGroups * 4 * pieces; i += kThreads) {
    const int half = i / (4 * pieces), rest = i % (4 * pieces), quarter = rest / pieces, piece = rest % pieces;
    const int tile64 = strip * (kStrip / 64) + quarter;
    const bool real = tile64 < p.tiles64;
    const size_t offset = scales_at(p, real ? tile64 : 0, group + half);
    copy16(scales + half * (kStrip * 4) + quarter * 64 * p.scale_bytes + piece * 16, p.scales + offset + piece * 16,
           real);
  }
}

// Adds the group's sums, scaled, to those of the strip.
template <int kColumns>
__device__ __forceinline__ void close_group(Sums<kColumns>& sum, Sums<kColumns>& group,
                                            const float (&scale)[kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sum[i][j][c] = fmaf(group[i][j][c], scale[i][c / 2], sum[i][j][c]);
        group[i][j][c] = 0;
      }
}

// Adds the products of a stage to the group's sums.
template <class T, int kTokens, bool kHalfGroups>
__device__ __forceinline__ void multiply(const Int4Arguments& p, const uint8_t* stage, Sums<kTokens / 8>& sum,
                                         Sums<kTokens / 8>& group, Scales& s, int warp, int lane) {
  constexpr int kColumns = kTokens / 8;
  const uint8_t* activations = stage + kWordBytes;
  const uint8_t* scales = activations + kTokens * 128;
  uint4 words[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    words[i] = *reinterpret_cast<const uint4*>(stage + (warp * kTiles + i) * 512 + lane * 16);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 0 || kHalfGroups) {
      if (kHalfGroups && half == 1) close_group(sum, group, s.scale);
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        read_scales<T>(s.scale[i], s.zeros[i], scales + half * (kStrip * 4) + (warp * kTiles + i) * 16 * p.scale_bytes,
                       lane / 4, p.scale_bytes, p.fp16_scales);
    }
    uint32_t x[kColumns][4];  // 8 tokens × 32 inputs each
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int row = j * 8 + lane % 8, piece = half * 4 + lane / 8;
      load_matrices(x[j], activations + row * 128 + ((piece ^ row) & 7) * 16);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t a[4];
      to_operand<T>(a, half ? words[i].z : words[i].x, s.zeros[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) Float16<T>::multiply(group[i][j], a, x[j][0], x[j][1]);
      to_operand<T>(a, half ? words[i].w : words[i].y, s.zeros[i]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) Float16<T>::multiply(group[i][j], a, x[j][2], x[j][3]);
    }
  }
  if (kHalfGroups) close_group(sum, group, s.scale);
}

template <int kColumns>
__device__ __forceinline__ void clear(Sums<kColumns>& sum) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[i][j][c] = 0;
}

// Makes this block's sum of a unit the whole one. False where another block, which comes later, will do that. A block
// has at most two shares of strips that are not wholly its own: where it begins (slot 0) and where it ends (1).
template <int kColumns>
__device__ __forceinline__ bool join(const Int4Arguments& p, int unit, Sums<kColumns>& sum, int& is_last) {
  constexpr int kPart = kTiles * kColumns * kThreads;
  const int first = unit * p.depth / p.share, last = ((unit + 1) * p.depth - 1) / p.share;
  if (first == last) return true;
  float4* mine = p.partials + (2 * static_cast<size_t>(blockIdx.x) + (blockIdx.x == first)) * kPart + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      mine[(i * kColumns + j) * kThreads] = make_float4(sum[i][j][0], sum[i][j][1], sum[i][j][2], sum[i][j][3]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&p.counters[unit], 1) == last - first;
    if (is_last) p.counters[unit] = 0;
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  clear(sum);
#pragma unroll 2
  for (int block = first; block <= last; ++block) {
    const float4* part = p.partials + (2 * static_cast<size_t>(block) + (block == first)) * kPart + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float4 v = __ldcg(part + (i * kColumns + j) * kThreads);
        sum[i][j][0] += v.x;
        sum[i][j][1] += v.y;
        sum[i][j][2] += v.z;
        sum[i][j][3] += v.w;
      }
  }
  return true;
}

template <class T, int kTokens>
__device__ __forceinline__ void write(const Int4Arguments& p, int unit, const Sums<kTokens / 8>& sum, int warp,
                                      int lane) {
  constexpr int kColumns = kTokens / 8;
  T* y = static_cast<T*>(p.y);
  const int strip = unit % p.strips, first_token = unit / p.strips * kTokens;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int output = strip * kStrip + (warp * kTiles + i) * 16 + lane / 4 * 2;  // and the next
    const float bias0 = p.bias != nullptr && output < p.n ? p.bias[output] : 0.f;
    const float bias1 = p.bias != nullptr && output + 1 < p.n ? p.bias[output + 1] : 0.f;
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int token = first_token + j * 8 + lane % 4 * 2 + c;
        if (token >= p.m || output >= p.n) continue;
        const float even = sum[i][j][c] + bias0, odd = sum[i][j][c + 2] + bias1;
        T* to = y + static_cast<size_t>(token) * p.n + output;
        if (p.n % 2 == 0) {
          *reinterpret_cast<typename Float16<T>::Pair*>(to) = Float16<T>::pair(even, odd);
        } else {
          to[0] = Float16<T>::one(even);
          if (output + 1 < p.n) to[1] = Float16<T>::one(odd);
        }
      }
  }
}
template <class T, int kTokens, bool kHalfGroups, int kStages>
__global__ void __launch_bounds__(kThreads, kTokens <= 16 ? 2 : 1) int4_linear_sm80(const Int4Arguments p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int is_last;
  constexpr int kStage = kStageBytes<kTokens, kHalfGroups>, kColumns = kTokens / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.x * p.share, end = min(begin + p.share, p.line);
  if (begin >= end) return;
  auto ask = [&](int position, int slot) {
    fetch<kTokens, kHalfGroups>(p, shared + slot * kStage, position, warp, lane);
  };
  Sums<kColumns> sum = {}, group = {};  // scaled, and of the group so far
  Scales scales;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) ask(begin + i, i);
    commit();
  }
  int slot = 0, depth = begin % p.depth, unit = begin / p.depth;
  for (int position = begin; position < end; ++position) {
    wait<kStages - 2>();
    __syncthreads();
    // The slot that all warps have just left.
    if (position + kStages - 1 < end) ask(position + kStages - 1, slot == 0 ? kStages - 1 : slot - 1);
    commit();
    multiply<T, kTokens, kHalfGroups>(p, shared + slot * kStage, sum, group, scales, warp, lane);
    slot = slot + 1 == kStages ? 0 : slot + 1;
    const bool ends_strip = ++depth == p.depth;
    if (!kHalfGroups && (depth % p.stages_per_group == 0 || position + 1 == end)) close_group(sum, group, scales.scale);
    if (ends_strip || position + 1 == end) {
      if (join(p, unit, sum, is_last)) write<T, kTokens>(p, unit, sum, warp, lane);
      clear(sum);
      depth = 0;
      ++unit;
    }
  }
}

// A warp writes 16 outputs × 64 inputs, by way of shared memory so that rows go out as whole lines.
template <class T>
__global__ void __launch_bounds__(128) int4_dequantise_sm80(const Int4Arguments p, int first_tile, int rows, T* out) {
  __shared__ __align__(16) uint8_t shared[4][16 * 144];  // 16 bytes of padding a row
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile64 = blockIdx.y, depth = blockIdx.x;
  uint8_t* mine = shared[warp];
  const uint4 words =
      *reinterpret_cast<const uint4*>(p.words + words_at(p, first_tile + tile64, depth) + warp * 512 + lane * 16);
  const uint32_t each[4] = {words.x, words.y, words.z, words.w};
  float scale[2];
  uint32_t zeros[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j % 2 == 0) {
      const int group = p.stages_per_group == 0 ? 2 * depth + j / 2 : depth / p.stages_per_group;
      const uint8_t* scales = p.scales + scales_at(p, first_tile + tile64, group) + warp * 16 * p.scale_bytes;
      read_scales<T>(scale, zeros, scales, lane / 4, p.scale_bytes, p.fp16_scales);
    }
    uint32_t a[4];
    to_operand<T>(a, each[j], zeros);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = *reinterpret_cast<const typename Float16<T>::Pair*>(&a[i]);
      const float s = scale[i & 1];
      uint8_t* to = mine + (lane / 4 * 2 + (i & 1)) * 144 + (16 * j + (i & 2) * 4 + lane % 4 * 2) * 2;
      *reinterpret_cast<typename Float16<T>::Pair*>(to) =
          Float16<T>::pair(static_cast<float>(pair.x) * s, static_cast<float>(pair.y) * s);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, at = tile64 * 64 + warp * 16 + row;
    if (at >= rows) continue;
    auto* to = reinterpret_cast<uint4*>(out + static_cast<size_t>(at) * p.k + depth * 64) + lane % 8;
    *to = *reinterpret_cast<const uint4*>(mine + row * 144 + lane % 8 * 16);
  }
}

// Whether a product is one for the kernels that are made of Hopper's own instructions, which run on nothing else.
bool is_for_sm90(const Int4Matrix& w, const Device& device) {
  return !w.sm80_only && device.major == 9 && device.minor == 0;
}

ShapeSm80 shape_of(const Int4Matrix& w, int m, const Device& device) {
  return shape_sm80(w.n, w.k, m, w.group_size < kDepth, device.limits);
}

Partition partition(const Int4Matrix& w, int m, const Device& device) {
  if (!is_for_sm90(w, device)) return shape_of(w, m, device).partition;
  if (w.blocks.tokens == 0 || m <= 16) return partition_sm90(w.n, w.k, m, device.limits.multiprocessors);
  return cut_into(w.blocks, w.n, w.k, m, device.limits.multiprocessors);
}

Int4Arguments arguments_of(const Int4Matrix& w) {
  if (w.n < 1 || w.k < kDepth || w.k % kDepth != 0)
    throw std::invalid_argument("int4_linear: found " + std::to_string(w.n) + " outputs and " + std::to_string(w.k) +
                                " inputs; inputs must be a multiple of 64");
  if (w.group_size != 32 && (w.group_size < 64 || w.group_size % 64 != 0 || w.k % w.group_size != 0))
    throw std::invalid_argument("int4_linear: found group_size " + std::to_string(w.group_size) + " for " +
                                std::to_string(w.k) + " inputs; allowed: 32, or a multiple of 64 that divides them");
  Int4Arguments p{};
  p.words = static_cast<const uint8_t*>(w.words);
  p.scales = static_cast<const uint8_t*>(w.scales);
  p.n = w.n;
  p.k = w.k;
  p.tiles64 = (w.n + 63) / 64;
  p.depth = w.k / kDepth;
  p.stages_per_group = w.group_size / kDepth;  // 0 for groups of 32
  p.groups = w.k / w.group_size;
  p.scale_bytes = w.has_zeros ? 4 : 2;
  p.fp16_scales = w.fp16_scales;
  return p;
}

template <class T, int kTokens, bool kHalfGroups, int kStages>
void launch(const Int4Arguments& p, int blocks, int device, cudaStream_t stream) {
  constexpr int bytes = kStages * kStageBytes<kTokens, kHalfGroups>;
  static SharedMemory shared;
  auto* kernel = int4_linear_sm80<T, kTokens, kHalfGroups, kStages>;
  shared.allow("int4_linear", kernel, bytes, device);
  kernel<<<blocks, kThreads, bytes, stream>>>(p);
  check(cudaGetLastError(), "launch");
}

template <class T, bool kHalfGroups>
void dispatch(const Int4Arguments& p, const ShapeSm80& shape, int device, cudaStream_t stream) {
  const int blocks = shape.partition.blocks;
  const bool few = shape.stages == 4;
  switch (shape.partition.tokens) {
    case 8:
      return few ? launch<T, 8, kHalfGroups, 4>(p, blocks, device, stream)
                 : launch<T, 8, kHalfGroups, 6>(p, blocks, device, stream);
    case 16:
      return few ? launch<T, 16, kHalfGroups, 4>(p, blocks, device, stream)
                 : launch<T, 16, kHalfGroups, 6>(p, blocks, device, stream);
    case 32:
      return launch<T, 32, kHalfGroups, 5>(p, blocks, device, stream);
    default:
      return launch<T, 64, kHalfGroups, 4>(p, blocks, device, stream);
  }
}

void run_sm80(const Int4Arguments& p, const ShapeSm80& shape, bool fp16, int device, cudaStream_t stream) {
  const bool half_groups = p.stages_per_group == 0;
  if (fp16)
    half_groups ? dispatch<__half, true>(p, shape, device, stream) : dispatch<__half, false>(p, shape, device, stream);
  else
    half_groups ? dispatch<__nv_bfloat16, true>(p, shape, device, stream)
                : dispatch<__nv_bfloat16, false>(p, shape, device, stream);
}

}  // namespace
}  // namespace ktinject::cuda::int4

namespace ktinject::cuda {

using namespace int4;

Int4Scratch int4_scratch(const Int4Matrix& weight, int m, int device) {
  if (m < 1) return {};
  const Partition part = partition(weight, m, device_at(device));
  if (part.sharers != 0 || part.whole) return {};
  return {static_cast<size_t>(2) * part.blocks * part.outputs * part.tokens * sizeof(float),
          static_cast<size_t>(part.units)};
}

void int4_linear(const Int4Matrix& weight, const float* bias, const void* x, bool fp16, int m, void* y, void* partials,
                 int* counters, int device, void* stream) {
  Int4Arguments p = arguments_of(weight);
  if (m < 1) return;
  const OnDevice here(device);
  const Device& there = device_at(device);
  const Partition part = partition(weight, m, there);
  p.bias = bias;
  p.x = static_cast<const uint8_t*>(x);
  p.y = y;
  p.partials = static_cast<float4*>(partials);
  p.counters = counters;
  p.m = m;
  p.strips = (weight.n + part.outputs - 1) / part.outputs;
  p.line = part.line;
  p.share = part.share;
  p.sharers = part.sharers;
  p.token_blocks = part.token_blocks;
  p.silent = weight.every_lane ? 0 : 31;
  const auto on = static_cast<cudaStream_t>(stream);
  if (is_for_sm90(weight, there)) run_sm90(p, part, fp16, device, on);
  else run_sm80(p, shape_of(weight, m, there), fp16, device, on);
}

void int4_dequantise(const Int4Matrix& weight, int first_row, int rows, bool fp16, void* out, int device,
                     void* stream) {
  const Int4Arguments p = arguments_of(weight);
  if (first_row < 0 || first_row % 64 != 0 || rows < 0 || first_row + rows > weight.n)
    throw std::invalid_argument("int4_dequantise: rows out of range, or not from a multiple of 64");
  if (rows == 0) return;
  const OnDevice here(device);
  const dim3 grid(p.depth, (rows + 63) / 64);
  const auto on = static_cast<cudaStream_t>(stream);
  if (fp16) int4_dequantise_sm80<<<grid, 128, 0, on>>>(p, first_row / 64, rows, static_cast<__half*>(out));
  else int4_dequantise_sm80<<<grid, 128, 0, on>>>(p, first_row / 64, rows, static_cast<__nv_bfloat16*>(out));
  check(cudaGetLastError(), "launch");
}

}  // namespace ktinject::cuda
