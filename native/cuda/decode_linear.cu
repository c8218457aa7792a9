// A tile is 8 outputs. Weights are the A operand of mma.m16n8k16, two tiles its rows, and the tokens are the B operand.
// The order of the inputs within 32 makes a lane's part of a row 16 bytes in one piece, of weights and of tokens:
//
//   lane 4g + t:  output g of a tile, token g, inputs 8t .. 8t + 7 of a step of 32, two products
//                 results: output g, tokens 2t and 2t + 1
//
// The warps of a block share its tiles along the inputs, and add up at the end, in order. Weights go through shared
// memory so that many can be on their way at once. A lane reads only what it has fetched itself, so nothing is
// synchronised. Weights do not depend on the kernel before, so the first ones are fetched while that still runs, and
// more into the GPU's L2 cache. If that kernel waits for the CPU, a whole matrix can be there when the tokens come.
//
// Code that runs once takes as long as fetching it takes, so loops are unrolled only where registers want it.
#include "cuda/decode_linear.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "cuda/devices.hpp"
#include "cuda/early.cuh"
#include "cuda/launch_shapes.hpp"
#include "cuda/on_device.cuh"
#include "cuda/prefetch.cuh"
#include "cuda/shared_memory.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kThreads = LinearShape::kThreads;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTile = LinearShape::kTile;
constexpr int kStep = 32;
constexpr int kRows = DecodeLinear::kMostRows;

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
  const void* biases;
  int row;
};
__device__ Row row_of(const DecodeLinear& p, int output) {
  const int second = p.n[0], third = second + p.n[1], fourth = third + p.n[2];
  if (output < second) return {p.weights[0], p.biases[0], output};
  if (output < third) return {p.weights[1], p.biases[1], output - second};
  if (output < fourth) return {p.weights[2], p.biases[2], output - third};
  return {p.weights[3], p.biases[3], output - fourth};
}

__host__ __device__ inline int outputs(const DecodeLinear& p) { return p.n[0] + p.n[1] + p.n[2] + p.n[3]; }

// How the work is cut. A group is the kTiles tiles that a block works on at a time; a round is a step for every warp.
template <int kTiles>
struct Cut {
  static constexpr int kOwn = kTiles == 2 ? 8 : 4;  // rounds whose tokens are read at once

  int warp, g, t;  // this lane
  int total;       // outputs
  int groups, steps, rounds;
  bool has_all;  // all of a token is read at once

  __device__ __forceinline__ explicit Cut(const DecodeLinear& p) {
    const int lane = threadIdx.x % kWarp;
    warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    total = outputs(p);
    groups = (total + kTiles * kTile - 1) / (kTiles * kTile);
    steps = p.k / kStep;
    // Two steps beside each other are one warp's: a line of 128 bytes.
    rounds = (steps + 2 * kWarps - 1) / (2 * kWarps) * 2;
    has_all = rounds <= kOwn;
  }
  __device__ __forceinline__ int step_of(int round) const { return (round / 2 * kWarps + warp) * 2 + round % 2; }
};

// Where a group's rows of the weights lie, for this lane.
template <class T, int kTiles>
__device__ __forceinline__ void find_rows(const DecodeLinear& p, const Cut<kTiles>& cut, int group,
                                          const T* (&rows)[kTiles]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const Row row = row_of(p, min((group * kTiles + tile) * kTile + cut.g, cut.total - 1));
    rows[tile] = static_cast<const T*>(row.weights) + static_cast<size_t>(row.row) * p.k + cut.t * 8;
  }
}

// The rows of groups from `group` on, as far as they fit into `l2_bytes`, a row a thread.
template <class T, int kTiles>
__device__ __forceinline__ void prefetch_groups(const DecodeLinear& p, const Cut<kTiles>& cut, int group,
                                                int64_t l2_bytes) {
  const int64_t bytes = static_cast<int64_t>(p.k) * sizeof(T);
  int64_t left = l2_bytes - kTiles * kTile * bytes * gridDim.x;
#pragma unroll 1
  for (; group < cut.groups && left >= 0; group += static_cast<int>(gridDim.x)) {
    const int output = group * kTiles * kTile + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kTiles * kTile && output < cut.total) {
      const Row row = row_of(p, output);
      prefetch_share(static_cast<const std::byte*>(row.weights) + row.row * bytes, bytes, 0, 1);
    }
    left -= kTiles * kTile * bytes * gridDim.x;
  }
}

// Rounds [first, first + kOwn) of the norm's weights.
template <class T, int kTiles, int kOwn>
__device__ __forceinline__ void read_factors(const Cut<kTiles>& cut, const T* norm, int first, uint4 (&factors)[kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int step = cut.step_of(first + i);
    factors[i] = first + i < cut.rounds && step < cut.steps ? *reinterpret_cast<const uint4*>(norm + step * kStep)
                                                            : uint4{0, 0, 0, 0};
  }
}

// The same rounds of token g, which a lane multiplies with.
template <class T, int kTiles, int kOwn>
__device__ __forceinline__ void read_token(const DecodeLinear& p, const Cut<kTiles>& cut, const T* x, int first,
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
template <class T, int kTiles, int kOwn>
__device__ __forceinline__ float find_scale(const DecodeLinear& p, const Cut<kTiles>& cut, const T* x,
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
    for (int j = 0; j < 8; ++j) {
      const float normed = values[j] * scale;
      values[j] = (weights[j] + p.norm_offset) * (p.rounds_first ? rounded<T>(normed) : normed);
    }
    own[i] = pack<T>(values);
  }
}

// sums += a round of weights times the tokens: two tiles a product.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_round(const uint4* weights, uint4 b, float (&sums)[(kTiles + 1) / 2][4]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 2) {
    const uint4 first = weights[tile * kThreads + threadIdx.x];
    const uint4 second = tile + 1 < kTiles ? weights[(tile + 1) * kThreads + threadIdx.x] : uint4{0, 0, 0, 0};
    multiply<T>(sums[tile / 2], first.x, second.x, first.y, second.y, b.x, b.y);
    multiply<T>(sums[tile / 2], first.z, second.z, first.w, second.w, b.z, b.w);
  }
}

// Adds up the sums of all warps for a group, adds bias and residual, and writes the outputs.
template <class T, int kTiles>
__device__ __forceinline__ void write_group(const DecodeLinear& p, const Cut<kTiles>& cut, int group,
                                            const float (&sums)[(kTiles + 1) / 2][4],
                                            float (&partial)[kTiles][kWarps][kRows * kTile]) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      partial[tile][cut.warp][(2 * cut.t + c) * kTile + cut.g] = sums[tile / 2][tile % 2 * 2 + c];
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kTiles * kRows * kTile; i += kThreads) {
    const int tile = i / (kRows * kTile), within = i % (kRows * kTile), row = within / kTile;
    const int output = (group * kTiles + tile) * kTile + within % kTile;
    if (row >= p.rows || output >= cut.total) continue;
    float sum = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) sum += partial[tile][other][within];
    const Row of = row_of(p, output);
    if (of.biases != nullptr) sum += load(static_cast<const T*>(of.biases)[of.row]);
    const size_t at = static_cast<size_t>(row) * cut.total + output;
    if (p.is_wide) {
      static_cast<float*>(p.out)[at] = sum;
      continue;
    }
    if (p.residual != nullptr) sum = rounded<T>(sum) + load(read_written(static_cast<const T*>(p.residual) + at));
    static_cast<T*>(p.out)[at] = store<T>(sum);
  }
}

template <int kTiles, int kHeld>
constexpr int kAheadOf = LinearShape::ahead(kTiles, kHeld);

// kHeld, l2_bytes: of the LinearShape.
template <class T, int kTiles, int kHeld>
__global__ void __launch_bounds__(kThreads, 1) linear_kernel(const DecodeLinear p, int64_t l2_bytes) {
  constexpr int kOwn = Cut<kTiles>::kOwn, kAhead = kAheadOf<kTiles, kHeld>;  // rounds of weights on their way
  extern __shared__ uint4 held[];  // a ring of rounds of weights: [kAhead][kTiles][kThreads]
  __shared__ float partial[kTiles][kWarps][kRows * kTile];
  const Cut<kTiles> cut(p);
  int next_group = static_cast<int>(blockIdx.x), next_round = 0, next_slot = 0;
  const T* rows[kTiles];
  find_rows<T>(p, cut, next_group, rows);
  auto fetch_round = [&] {
    if (next_group < cut.groups) {
      const int step = cut.step_of(next_round);
      if (step < cut.steps)
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
          fetch(held + (next_slot * kTiles + tile) * kThreads + threadIdx.x, rows[tile] + step * kStep);
      if (++next_round == cut.rounds) {
        next_round = 0;
        next_group += static_cast<int>(gridDim.x);
        if (next_group < cut.groups) find_rows<T>(p, cut, next_group, rows);
      }
      if (++next_slot == kAhead) next_slot = 0;
    }
    commit();
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) fetch_round();
  prefetch_groups<T>(p, cut, next_group, l2_bytes);
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
  for (int group = static_cast<int>(blockIdx.x); group < cut.groups; group += static_cast<int>(gridDim.x)) {
    float sums[(kTiles + 1) / 2][4] = {};
#pragma unroll 1
    for (int first = 0; first < cut.rounds; first += kOwn) {
      if (!cut.has_all) {
        read_token(p, cut, x, first, own);
        if (p.norm != nullptr) {
          read_factors(cut, norm, first, factors);
          apply_norm<T>(p, scale, factors, own);
        }
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (first + i >= cut.rounds) break;
        await_fetches<kAhead - 1>();
        const int step = cut.step_of(first + i);
        if (step < cut.steps) {
          if (group == 0 && p.normed != nullptr && cut.g < p.rows)
            *reinterpret_cast<uint4*>(static_cast<T*>(p.normed) + static_cast<size_t>(cut.g) * p.k + step * kStep +
                                      cut.t * 8) = own[i];
          multiply_round<T, kTiles>(held + slot * kTiles * kThreads, own[i], sums);
        }
        if (++slot == kAhead) slot = 0;
        fetch_round();
      }
    }
    if (group != static_cast<int>(blockIdx.x)) __syncthreads();  // the sums before these have been read
    write_group<T>(p, cut, group, sums, partial);
  }
}

template <class T, int kTiles, int kHeld>
void run(const DecodeLinear& p, const LinearShape& shape, int device, cudaStream_t stream) {
  static SharedMemory shared;
  const auto bytes = static_cast<size_t>(LinearShape::dynamic_bytes(kTiles, kHeld));
  shared.allow("decode_linear", linear_kernel<T, kTiles, kHeld>, bytes, device);
  launch_early("launching decode_linear", linear_kernel<T, kTiles, kHeld>,
               {dim3(static_cast<unsigned>(shape.blocks)), dim3(kThreads), stream, bytes}, p, shape.l2_bytes);
}

}  // namespace

void decode_linear(const DecodeLinear& p, DType dtype, Stream to) {
  auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  if (dtype == DType::f32) throw std::invalid_argument("decode_linear: fp32 is not served");
  if (p.rows < 1 || p.rows > kRows || p.k < kStep || p.k % kStep != 0)
    throw std::invalid_argument("decode_linear: 1 to 8 rows, of a multiple of 32 values");
  bool fits = aligned(p.x) && aligned(p.norm) && aligned(p.normed) && aligned(p.then);
  for (const void* weights : p.weights) fits = fits && aligned(weights);
  if (!fits) throw std::invalid_argument("decode_linear: addresses must be multiples of 16");
  const OnStream stream(to);
  if (outputs(p) == 0) return;
  const LinearShape shape = linear_shape(outputs(p), device_at(to.device).limits);
  auto launch = [&]<class T>(T) {
    auto with = [&]<int kTiles>() {
      if (shape.held == LinearShape::kMuch) return run<T, kTiles, LinearShape::kMuch>(p, shape, to.device, stream);
      if constexpr (kTiles <= LinearShape::most_tiles(LinearShape::kLittle))
        run<T, kTiles, LinearShape::kLittle>(p, shape, to.device, stream);
    };
    if (shape.tiles <= 1) with.template operator()<1>();
    else if (shape.tiles <= 2) with.template operator()<2>();
    else if (shape.tiles <= 3) with.template operator()<3>();
    else if (shape.tiles <= 4) with.template operator()<4>();
    else if (shape.tiles <= 5) with.template operator()<5>();
    else if (shape.tiles <= 6) with.template operator()<6>();
    else with.template operator()<8>();
  };
  if (dtype == DType::bf16) launch(__nv_bfloat16{});
  else launch(__half{});
}

}  // namespace ktinject::cuda
