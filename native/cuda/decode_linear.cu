// A tile is 8 outputs. Weights are the A operand of mma.m16n8k16, two tiles its rows, and the tokens are the B operand.
// The order of the inputs within 32 makes a lane's part of a row 16 bytes in one piece, of weights and of tokens:
//
//   lane 4g + t:  output g of a tile, token g, inputs 8t .. 8t + 7 of a step of 32, two products
//                 results: output g, tokens 2t and 2t + 1
//
// Of int4 weights, a tile is 16 outputs, and 16 bytes are a lane's part of two steps, four products, in the usual order
// of inputs, to which the lanes turn their tokens. Sums over 64 inputs, or a group of 32, are scaled in fp32.
//
// The warps of a block share its tiles along the inputs, and add up at the end, in order. Weights go through shared
// memory so that many can be on their way at once. A lane reads only what it has fetched itself, so nothing is
// synchronised; but for scales, which a few lanes fetch for their warp. Weights do not depend on the kernel before, so
// the first ones are fetched while that still runs, and more into the GPU's L2 cache. If that kernel waits for the CPU,
// a whole matrix can be there when the tokens come.
//
// Code that runs once takes as long as fetching it takes, so loops are unrolled only where registers want it.
#include "cuda/decode_linear.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/early.cuh"
#include "cuda/int4_tile.cuh"
#include "cuda/on_device.cuh"
#include "cuda/prefetch.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kStep = 32;
constexpr int kRows = DecodeLinear::kMostRows;
constexpr int kMostTiles = 8, kMostTilesBefore = 4;  // of a block at a time, on Hopper and before it
// Of all blocks, fetched into L2 behind those: less than it has, so that what others fetched stays there.
constexpr int64_t kMostInL2 = int64_t{32} << 20;

__device__ void fetch(uint4* to, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ void await_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Which matrix an output of all of them belongs to, and which of its rows that is.
struct Row {
  const void* weights;
  const void* scales;
  const void* biases;
  int n;
  int row;
};
__device__ Row row_of(const DecodeLinear& p, int output) {
  const int second = p.n[0], third = second + p.n[1], fourth = third + p.n[2];
  if (output < second) return {p.weights[0], p.scales[0], p.biases[0], p.n[0], output};
  if (output < third) return {p.weights[1], p.scales[1], p.biases[1], p.n[1], output - second};
  if (output < fourth) return {p.weights[2], p.scales[2], p.biases[2], p.n[2], output - third};
  return {p.weights[3], p.scales[3], p.biases[3], p.n[3], output - fourth};
}

__host__ __device__ inline int outputs_of(const DecodeLinear& p, int matrices) {
  int sum = 0;
#pragma unroll
  for (int i = 0; i < DecodeLinear::kMatrices; ++i) sum += i < matrices ? p.n[i] : 0;
  return sum;
}
__host__ __device__ inline int outputs(const DecodeLinear& p) { return p.n[0] + p.n[1] + p.n[2] + p.n[3]; }

// The outputs of one format, and the blocks that compute them.
struct Part {
  int first, end;     // outputs
  int block, blocks;  // this one, of so many
};

// How the work is cut. A group is the kTiles tiles that a block works on at a time; a round is a step for every warp.
// F: the format of the weights.
template <class F, int kTiles>
struct Cut {
  static constexpr int kHeld = F::held(kTiles,
#if __CUDA_ARCH__ >= 900
                                       true);
#else
                                       false);
#endif
  static constexpr int kAhead = kHeld / kTiles;         // times F::kSteps rounds of weights on their way
  static constexpr int kOwn = F::template own<kTiles>;  // rounds whose tokens are read at once
  static constexpr int kOutputs = kTiles * F::kOutputs;

  int warp, g, t;  // this lane
  Part part;
  int groups, steps, rounds;
  bool has_all;  // all of a token is read at once

  __device__ __forceinline__ Cut(const DecodeLinear& p, const Part& part) : part(part) {
    const int lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    groups = (part.end - part.first + kOutputs - 1) / kOutputs;
    steps = p.k / kStep;
    // Two steps beside each other are one warp's: a line of 128 bytes.
    rounds = (steps + 2 * kWarps - 1) / (2 * kWarps) * 2;
    has_all = rounds <= kOwn;
  }
  __device__ __forceinline__ int step_of(int round) const { return (round / 2 * kWarps + warp) * 2 + round % 2; }
  __device__ __forceinline__ int output_of(int group, int tile) const {
    return part.first + (group * kTiles + tile) * F::kOutputs;
  }
};

// Values of T, as they are. A format says how many outputs a tile has, how many steps a lane's piece of 16 bytes, and
// how many bytes of shared memory a thread needs for a piece; where its weights lie, and how they are multiplied.
template <class T>
struct Plain {
  using Value = T;
  using Bias = T;
  static constexpr int kOutputs = 8, kSteps = 1, kPieceBytes = 16;
  static constexpr bool kSharesFetches = false;
  template <int kTiles>
  static constexpr int kProducts = (kTiles + 1) / 2;  // of 16 outputs
  template <int kTiles>
  static constexpr int own = kTiles == 2 ? 8 : 4;
  // How many pieces a thread has on their way: as many as shared memory allows.
  __host__ __device__ static constexpr int held(int tiles, bool hopper) {
    const int most = hopper ? 24 : 8;
    return most / tiles > 0 ? most / tiles * tiles : tiles;
  }

  // Where a group's rows of the weights lie, for this lane.
  template <int kTiles>
  struct Rows {
    const T* rows[kTiles];

    __device__ __forceinline__ void find(const DecodeLinear& p, const Cut<Plain, kTiles>& cut, int group) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const Row row = row_of(p, min(cut.output_of(group, tile) + cut.g, cut.part.end - 1));
        rows[tile] = static_cast<const T*>(row.weights) + static_cast<size_t>(row.row) * p.k + cut.t * 8;
      }
    }
    // A round, into a slot of the ring.
    __device__ __forceinline__ void fetch_all(const DecodeLinear&, const Cut<Plain, kTiles>&, int step, uint4* held,
                                              int slot) const {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        fetch(held + (slot * kTiles + tile) * kThreads + threadIdx.x, rows[tile] + step * kStep);
    }
  };

  // A group into L2, a row a thread.
  template <int kTiles>
  static __device__ __forceinline__ void prefetch(const DecodeLinear& p, const Cut<Plain, kTiles>& cut, int group) {
    const int64_t bytes = static_cast<int64_t>(p.k) * sizeof(T);
    const int output = cut.output_of(group, 0) + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kTiles * kOutputs && output < cut.part.end) {
      const Row row = row_of(p, output);
      prefetch_share(static_cast<const std::byte*>(row.weights) + row.row * bytes, bytes, 0, 1);
    }
  }
  static __device__ __forceinline__ int64_t bytes_of(const DecodeLinear& p, int outputs) {
    return static_cast<int64_t>(p.k) * sizeof(T) * outputs;
  }

  // sums += a round of weights times the first of the tokens: two tiles a product.
  template <int kTiles, int kOwn>
  static __device__ __forceinline__ void multiply_round(const DecodeLinear&, const Cut<Plain, kTiles>&, uint4* held,
                                                        int slot, const uint4 (&tokens)[kOwn],
                                                        float (&sums)[kProducts<kTiles>][4]) {
    const uint4* weights = held + slot * kTiles * kThreads;
    const uint4 b = tokens[0];
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      const uint4 first = weights[tile * kThreads + threadIdx.x];
      const uint4 second = tile + 1 < kTiles ? weights[(tile + 1) * kThreads + threadIdx.x] : uint4{0, 0, 0, 0};
      multiply<T>(sums[tile / 2], first.x, second.x, first.y, second.y, b.x, b.y);
      multiply<T>(sums[tile / 2], first.z, second.z, first.w, second.w, b.z, b.w);
    }
  }
};

// The lanes of a token exchange their inputs: lane t has 8t .. 8t + 7 of 32, and then 2t, 2t + 1 of each 8.
__device__ __forceinline__ uint4 in_usual_order(uint4 own, int t) {
  auto exchange = [](uint32_t& low, uint32_t& high, bool is_high, int step) {
    const uint32_t got = __shfl_xor_sync(kAll, is_high ? low : high, step);
    (is_high ? low : high) = got;
  };
  exchange(own.x, own.y, t & 1, 1);
  exchange(own.z, own.w, t & 1, 1);
  exchange(own.x, own.z, t & 2, 2);
  exchange(own.y, own.w, t & 2, 2);
  return own;
}

// int4 codes in groups; operators/linears/int4_layout.py has their layout. T: of the tokens.
template <class T>
struct Int4 {
  using Value = T;
  using Bias = float;
  // With a piece go the scales of a warp's 16 outputs: two groups of 64 bytes at most, four bytes a lane.
  static constexpr int kOutputs = 16, kSteps = 2, kPieceBytes = 20;
  static constexpr bool kSharesFetches = true;
  static constexpr int kScaleRoom = 128, kGroupRoom = 64;
  template <int kTiles>
  static constexpr int kProducts = kTiles;
  template <int kTiles>
  static constexpr int own = kTiles <= 2 ? 8 : 4;
  __host__ __device__ static constexpr int held(int tiles, bool hopper) {
    const int most = hopper ? 16 : 6;
    return most / tiles > 0 ? most / tiles * tiles : tiles;
  }

  static __device__ __forceinline__ int scale_bytes(const DecodeLinear& p) { return p.has_zeros ? 4 : 2; }

  // A tile's words of the first 64 inputs and its scales of the first group, and how many tiles of 16 outputs lie
  // beside each other, so that the next 64 inputs are so many tiles further.
  struct Tile {
    const std::byte* words;
    const std::byte* scales;
    int width;
  };
  static __device__ __forceinline__ Tile tile_at(const DecodeLinear& p, int output) {
    const Row row = row_of(p, output);
    const int tiles = (row.n + 63) / 64 * 4, tile = row.row / 16, strip = tile / 16 * 16;
    const int depth = p.k / 64, groups = p.k / p.group_size;
    return {static_cast<const std::byte*>(row.weights) + (static_cast<size_t>(strip) * depth + tile % 16) * 512,
            static_cast<const std::byte*>(row.scales) +
                (static_cast<size_t>(strip) * groups + tile % 16) * 16 * scale_bytes(p),
            min(16, tiles - strip)};
  }

  template <int kTiles>
  struct Rows {
    Tile tiles[kTiles];

    __device__ __forceinline__ void find(const DecodeLinear& p, const Cut<Int4, kTiles>& cut, int group) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        tiles[tile] = tile_at(p, min(cut.output_of(group, tile), cut.part.end - kOutputs));
    }
    __device__ __forceinline__ void fetch_all(const DecodeLinear& p, const Cut<Int4, kTiles>& cut, int step,
                                              uint4* held, int slot) const {
      const int lane = threadIdx.x % kWarp, bytes = scale_bytes(p), depth = step / 2;
      // Of 64 inputs there are two groups of 32, or a part of one; a group is as many pieces as a scale has bytes.
      const bool halves = p.group_size == 32;
      const int half = lane / bytes, piece = lane % bytes;
      const int group = halves ? 2 * depth + half : depth * 64 / p.group_size;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const Tile& at = tiles[tile];
        fetch(held + (slot * kTiles + tile) * kThreads + threadIdx.x,
              at.words + static_cast<size_t>(depth * at.width) * 512 + lane * 16);
        if (half < (halves ? 2 : 1))
          fetch(scales_of<kTiles>(held, slot, tile) + (half * kGroupRoom + piece * 16) / sizeof(uint4),
                at.scales + static_cast<size_t>(group * at.width) * 16 * bytes + piece * 16);
      }
    }
  };

  // The room of this warp's scales, behind the ring of words.
  template <int kTiles>
  static __device__ __forceinline__ uint4* scales_of(uint4* held, int slot, int tile) {
    return held + Cut<Int4, kTiles>::kHeld * kThreads +
           ((slot * kTiles + tile) * kWarps + threadIdx.x / kWarp) * (kScaleRoom / sizeof(uint4));
  }

  // A group into L2, 64 inputs of a tile a thread.
  template <int kTiles>
  static __device__ __forceinline__ void prefetch(const DecodeLinear& p, const Cut<Int4, kTiles>& cut, int group) {
    const int depth = p.k / 64;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kTiles * depth; i += kThreads) {
      const int output = cut.output_of(group, i / depth);
      if (output >= cut.part.end) break;
      const Tile at = tile_at(p, output);
      prefetch_share(at.words + static_cast<size_t>(i % depth * at.width) * 512, 512, 0, 1);
    }
  }
  static __device__ __forceinline__ int64_t bytes_of(const DecodeLinear& p, int outputs) {
    return static_cast<int64_t>(p.k) * outputs / 2;
  }

  template <int kTiles, int kOwn>
  static __device__ __forceinline__ void multiply_round(const DecodeLinear& p, const Cut<Int4, kTiles>& cut,
                                                        uint4* held, int slot, const uint4 (&tokens)[kOwn],
                                                        float (&sums)[kTiles][4]) {
    const uint4 low = in_usual_order(tokens[0], cut.t), high = in_usual_order(tokens[1], cut.t);
    const bool halves = p.group_size == 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 words = held[(slot * kTiles + tile) * kThreads + threadIdx.x];
      const auto* scales = reinterpret_cast<const uint8_t*>(scales_of<kTiles>(held, slot, tile));
      float scale[2], group[4] = {};
      uint32_t zeros[2];
      int4::read_scales<T>(scale, zeros, scales, cut.g, scale_bytes(p), p.fp16_scales);
      multiply_word(group, words.x, zeros, low.x, low.y);
      multiply_word(group, words.y, zeros, low.z, low.w);
      if (halves) {
        close_group(sums[tile], group, scale);
        int4::read_scales<T>(scale, zeros, scales + kGroupRoom, cut.g, scale_bytes(p), p.fp16_scales);
      }
      multiply_word(group, words.z, zeros, high.x, high.y);
      multiply_word(group, words.w, zeros, high.z, high.w);
      close_group(sums[tile], group, scale);
    }
  }
  static __device__ __forceinline__ void multiply_word(float (&group)[4], uint32_t word, const uint32_t (&zeros)[2],
                                                       uint32_t b0, uint32_t b1) {
    uint32_t a[4];
    int4::to_operand<T>(a, word, zeros);
    multiply<T>(group, a[0], a[1], a[2], a[3], b0, b1);
  }
  static __device__ __forceinline__ void close_group(float (&sums)[4], float (&group)[4], const float (&scale)[2]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sums[c] = fmaf(group[c], scale[c / 2], sums[c]);
      group[c] = 0;
    }
  }
};

// The groups from `group` on, as far as they fit.
template <class F, int kTiles>
__device__ __forceinline__ void prefetch_groups(const DecodeLinear& p, const Cut<F, kTiles>& cut, int group) {
  const int64_t bytes = F::bytes_of(p, kTiles * F::kOutputs) * cut.part.blocks;
  int64_t left = kMostInL2 - bytes;
#pragma unroll 1
  for (; group < cut.groups && left >= 0; group += cut.part.blocks) {
    F::template prefetch<kTiles>(p, cut, group);
    left -= bytes;
  }
}

// Rounds [first, first + kOwn) of the norm's weights.
template <class T, class F, int kTiles, int kOwn>
__device__ __forceinline__ void read_factors(const Cut<F, kTiles>& cut, const T* norm, int first,
                                             uint4 (&factors)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int step = cut.step_of(first + i);
    factors[i] = first + i < cut.rounds && step < cut.steps ? *reinterpret_cast<const uint4*>(norm + step * kStep)
                                                            : uint4{0, 0, 0, 0};
  }
}

// The same rounds of token g, which a lane multiplies with.
template <class T, class F, int kTiles, int kOwn>
__device__ __forceinline__ void read_token(const DecodeLinear& p, const Cut<F, kTiles>& cut, const T* x, int first,
                                           uint4 (&own)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int step = cut.step_of(first + i);
    own[i] = cut.g < p.rows && first + i < cut.rounds && step < cut.steps
                 ? __ldcg(reinterpret_cast<const uint4*>(x + step * kStep))
                 : uint4{0, 0, 0, 0};
  }
}

// The factor by which the norm scales token g. Afterwards `own` has the token's last rounds; all of them, if they are
// few.
template <class T, class F, int kTiles, int kOwn>
__device__ __forceinline__ float find_scale(const DecodeLinear& p, const Cut<F, kTiles>& cut, const T* x,
                                            uint4 (&own)[kOwn]) {
  __shared__ float squares[kWarps][kRows];
  float sum = 0;
#pragma unroll 1
  for (int first = 0; first < cut.rounds; first += kOwn) {
    read_token(p, cut, x, first, own);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      float values[8];
      unpack<T>(own[i], values);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum = fmaf(values[j], values[j], sum);
    }
  }
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  if (cut.t == 0) squares[cut.warp][cut.g] = sum;
  __syncthreads();
  float all = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) all += squares[other][cut.g];
  return rsqrtf(all / static_cast<float>(p.k) + p.eps);
}

template <class T, int kOwn>
__device__ __forceinline__ void apply_norm(const DecodeLinear& p, float scale, const uint4 (&factors)[kOwn],
                                           uint4 (&own)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float values[8], weights[8];
    unpack<T>(own[i], values);
    unpack<T>(factors[i], weights);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale;
    if (p.rounds_first) round_all<T>(values);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= weights[j] + p.norm_offset;
    own[i] = pack<T>(values);
  }
}

// Sums of all warps for a group: [kTiles][kWarps][kRows * F::kOutputs], in shared memory.
template <class F, int kTiles>
using Partial = float[kTiles][kWarps][kRows * F::kOutputs];

// Adds up the sums of all warps for a group, adds bias and residual, and writes the outputs.
template <class F, int kTiles>
__device__ __forceinline__ void write_group(const DecodeLinear& p, const Cut<F, kTiles>& cut, int group,
                                            const float (&sums)[F::template kProducts<kTiles>][4],
                                            Partial<F, kTiles>& partial) {
  using T = typename F::Value;
  constexpr int kHalves = F::kOutputs / 8;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int rows = tile * kHalves + half;  // which 8 of a product's 16 rows hold them
#pragma unroll
      for (int c = 0; c < 2; ++c)
        partial[tile][cut.warp][(2 * cut.t + c) * F::kOutputs + cut.g * kHalves + half] =
            sums[rows / 2][rows % 2 * 2 + c];
    }
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kTiles * kRows * F::kOutputs; i += kThreads) {
    const int tile = i / (kRows * F::kOutputs), within = i % (kRows * F::kOutputs), row = within / F::kOutputs;
    const int output = cut.output_of(group, tile) + within % F::kOutputs;
    if (row >= p.rows || output >= cut.part.end) continue;
    float sum = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += partial[tile][other][within];
    const Row of = row_of(p, output);
    if (of.biases != nullptr) sum += load(static_cast<const typename F::Bias*>(of.biases)[of.row]);
    const size_t at = static_cast<size_t>(row) * outputs(p) + output;
    if (p.is_wide) {
      static_cast<float*>(p.out)[at] = sum;
      continue;
    }
    if (p.residual != nullptr) sum = rounded<T>(sum) + load(read_written(static_cast<const T*>(p.residual) + at));
    static_cast<T*>(p.out)[at] = store<T>(sum);
  }
}

// The tokens of the next rounds come first; after all of them, those that were first before.
template <int kSteps, int kOwn>
__device__ __forceinline__ void turn(uint4 (&own)[kOwn]) {
  uint4 turned[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) turned[i] = own[(i + kSteps) % kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = turned[i];
}

// A part of the outputs, by its blocks.
template <class F, int kTiles>
__device__ __forceinline__ void compute(const DecodeLinear& p, const Part& part) {
  using T = typename F::Value;
  constexpr int kOwn = Cut<F, kTiles>::kOwn, kAhead = Cut<F, kTiles>::kAhead;
  extern __shared__ uint4 held[];  // a ring of rounds of weights: [kAhead][kTiles][kThreads]; scales; sums
  auto& partial = *reinterpret_cast<Partial<F, kTiles>*>(reinterpret_cast<std::byte*>(held) +
                                                         Cut<F, kTiles>::kHeld * kThreads * F::kPieceBytes);
  const Cut<F, kTiles> cut(p, part);
  int next_group = part.block, next_round = 0, next_slot = 0;
  typename F::template Rows<kTiles> rows;
  rows.find(p, cut, next_group);
  auto fetch_rounds = [&] {
    if (next_group < cut.groups) {
      const int step = cut.step_of(next_round);
      if (step < cut.steps) rows.fetch_all(p, cut, step, held, next_slot);
      next_round += F::kSteps;
      if (next_round == cut.rounds) {
        next_round = 0;
        next_group += part.blocks;
        if (next_group < cut.groups) rows.find(p, cut, next_group);
      }
      if (++next_slot == kAhead) next_slot = 0;
    }
    commit();
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) fetch_rounds();
  prefetch_groups(p, cut, next_group);
  if (p.then != nullptr && threadIdx.x == 0)
    prefetch_share(p.then, p.then_bytes, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  const auto* norm = static_cast<const T*>(p.norm) + cut.t * 8;
  uint4 factors[kOwn], own[kOwn];  // the norm's weights, and tokens
  if (p.norm != nullptr && cut.has_all) read_factors(cut, norm, 0, factors);
  release_next();
  await_previous();

  const auto* x = static_cast<const T*>(p.x) + static_cast<size_t>(cut.g) * p.k + cut.t * 8;
  float scale = 1;
  if (p.norm != nullptr) scale = find_scale(p, cut, x, own);
  else if (cut.has_all) read_token(p, cut, x, 0, own);
  if (p.norm != nullptr && cut.has_all) apply_norm<T>(p, scale, factors, own);
  int slot = 0;
#pragma unroll 1
  for (int group = part.block; group < cut.groups; group += part.blocks) {
    float sums[F::template kProducts<kTiles>][4] = {};
#pragma unroll 1
    for (int first = 0; first < cut.rounds; first += kOwn) {
      if (!cut.has_all) {
        read_token(p, cut, x, first, own);
        if (p.norm != nullptr) {
          read_factors(cut, norm, first, factors);
          apply_norm<T>(p, scale, factors, own);
        }
      }
#pragma unroll 1
      for (int i = 0; i < kOwn; i += F::kSteps) {
        if (first + i < cut.rounds) {
          await_fetches<kAhead - 1>();
          if constexpr (F::kSharesFetches) __syncwarp();  // other lanes have fetched, too
          const int step = cut.step_of(first + i);
          if (step < cut.steps) {
            if (group == 0 && blockIdx.x == 0 && p.normed != nullptr && cut.g < p.rows)
#pragma unroll
              for (int j = 0; j < F::kSteps; ++j)
                *reinterpret_cast<uint4*>(static_cast<T*>(p.normed) + static_cast<size_t>(cut.g) * p.k +
                                          (step + j) * kStep + cut.t * 8) = own[j];
            F::template multiply_round<kTiles>(p, cut, held, slot, own, sums);
          }
          if constexpr (F::kSharesFetches) __syncwarp();  // and have read what is overwritten next
          if (++slot == kAhead) slot = 0;
          fetch_rounds();
        }
        turn<F::kSteps>(own);
      }
    }
    if (group != part.block) __syncthreads();  // the sums before these have been read
    write_group<F, kTiles>(p, cut, group, sums, partial);
  }
}

template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) linear_kernel(const DecodeLinear p) {
  compute<Plain<T>, kTiles>(p, {0, outputs(p), static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)});
}

constexpr int kTilesBeside = 2;  // of plain matrices beside int4 ones

// The first `blocks` blocks compute what is int4, and the others what is not.
template <class T, int kTiles>
__global__ void __launch_bounds__(kThreads, 1) int4_linear_kernel(const DecodeLinear p, int blocks) {
  const int coded = outputs_of(p, p.coded), block = static_cast<int>(blockIdx.x);
  if (block < blocks) compute<Int4<T>, kTiles>(p, {0, coded, block, blocks});
  else compute<Plain<T>, kTilesBeside>(p, {coded, outputs(p), block - blocks, static_cast<int>(gridDim.x) - blocks});
}

// Bytes of shared memory that `compute` takes.
template <class F>
size_t shared_bytes(int tiles, bool hopper) {
  return static_cast<size_t>(F::held(tiles, hopper)) * kThreads * F::kPieceBytes +
         static_cast<size_t>(tiles) * kWarps * kRows * F::kOutputs * sizeof(float);
}

template <class... Parameters>
void run(void (*kernel)(Parameters...), std::atomic<uint64_t>& ready, int blocks, size_t most, size_t bytes, int device,
         cudaStream_t stream, Parameters... parameters) {
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((ready.load(std::memory_order_relaxed) & bit) == 0) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most)),
               "decode_linear: asking for shared memory");
    ready.fetch_or(bit, std::memory_order_relaxed);
  }
  launch_early("launching decode_linear", kernel, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream, bytes},
               parameters...);
}

// Devices that know of the shared memory a kernel needs.
template <class T, int kTiles, bool kCoded>
std::atomic<uint64_t> ready{0};

// Calls `with` with the number of tiles that a block of so many takes at once.
template <class With>
void with_tiles(int tiles, int blocks, bool hopper, With&& with) {
  // One group a block where that has all; else the block with most tiles decides. Groups of few tiles are slower.
  const int each = (tiles + blocks - 1) / blocks, most = hopper ? kMostTiles : kMostTilesBefore;
  auto longest = [&](int size) {
    const int groups = (tiles + size - 1) / size;
    return (groups + blocks - 1) / blocks * size;
  };
  int wanted = std::min(each, most);
  for (const int size : {6, 5, 4, 3})
    if (each > most && size < most && longest(size) < longest(wanted)) wanted = size;
  if (wanted <= 1) with.template operator()<1>();
  else if (wanted <= 2) with.template operator()<2>();
  else if (wanted <= 3) with.template operator()<3>();
  else if (wanted <= 4) with.template operator()<4>();
  else if (wanted <= 5) with.template operator()<5>();
  else if (wanted <= 6) with.template operator()<6>();
  else with.template operator()<8>();
}

void require_codes(const DecodeLinear& p) {
  bool fits = p.coded <= DecodeLinear::kMatrices && p.k % 64 == 0 && p.group_size > 0 && p.k % p.group_size == 0 &&
              (p.group_size == 32 || p.group_size % 64 == 0);
  for (int i = 0; fits && i < p.coded; ++i)
    fits =
        p.n[i] > 0 && p.n[i] % 16 == 0 && p.scales[i] != nullptr && reinterpret_cast<uintptr_t>(p.scales[i]) % 16 == 0;
  if (!fits)
    throw std::invalid_argument(
        "decode_linear: of int4, a multiple of 64 inputs in groups of 32 or a multiple of 64, and a multiple of 16 "
        "outputs, with scales at multiples of 16");
}

}  // namespace

void decode_linear(const DecodeLinear& p, DType dtype, Stream to) {
  auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  if (dtype == DType::f32) throw std::invalid_argument("decode_linear: fp32 is not served");
  if (p.rows < 1 || p.rows > kRows || p.k < kStep || p.k % kStep != 0)
    throw std::invalid_argument("decode_linear: 1 to 8 rows, of a multiple of 32 values");
  if (p.coded != 0) require_codes(p);
  bool fits = aligned(p.x) && aligned(p.norm) && aligned(p.normed) && aligned(p.then);
  for (const void* weights : p.weights) fits = fits && aligned(weights);
  if (!fits) throw std::invalid_argument("decode_linear: addresses must be multiples of 16");
  const OnStream stream(to);
  const int device = to.device;
  int multiprocessors = 0;
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "asking for a device's size");
  const bool hopper = is_hopper(device);
  if (outputs(p) == 0) return;
  const int coded = outputs_of(p, p.coded), plain = outputs(p) - coded;
  auto tiles_of = [](int outputs, int size) { return (outputs + size - 1) / size; };
  auto launch = [&]<class T>(T) {
    if (p.coded == 0) {
      const int tiles = tiles_of(plain, Plain<T>::kOutputs);
      with_tiles(tiles, multiprocessors, hopper, [&]<int kTiles>() {
        const size_t bytes = shared_bytes<Plain<T>>(kTiles, hopper);
        run(linear_kernel<T, kTiles>, ready<T, kTiles, false>, std::min(multiprocessors, tiles_of(tiles, kTiles)),
            bytes, bytes, device, stream, p);
      });
      return;
    }
    const int beside = std::min(tiles_of(plain, kTilesBeside * Plain<T>::kOutputs), std::max(1, multiprocessors / 4));
    const int tiles = tiles_of(coded, Int4<T>::kOutputs), left = std::max(1, multiprocessors - beside);
    with_tiles(tiles, left, hopper, [&]<int kTiles>() {
      const size_t own = shared_bytes<Int4<T>>(kTiles, hopper);
      const size_t most = std::max(own, shared_bytes<Plain<T>>(kTilesBeside, hopper));
      const int blocks = std::min(left, tiles_of(tiles, kTiles));
      run(int4_linear_kernel<T, kTiles>, ready<T, kTiles, true>, blocks + beside, most, beside == 0 ? own : most,
          device, stream, p, blocks);
    });
  };
  if (dtype == DType::bf16) launch(__nv_bfloat16{});
  else launch(__half{});
}

}  // namespace ktinject::cuda
