// A block computes up to eight query heads that share keys, over one split of the cache. A warp takes 16 positions of
// the split at a time. Scores are q k^T by mma.m16n8k16 with heads as rows. Turned into weights, they lie in the
// registers as the A operand of the product with the values.
//
// The inputs of a product may come in any order, if both operands have the same one. So a lane's part of a key (and of
// a query) can be 16 bytes in one piece, and its part of a value, too:
//
//   lane 4g + t   queries:  head g, values 32 j + 8t .. + 7
//                 keys:     positions g and 8 + g, the same values
//                 values:   positions 2t, 2t + 1, 2t + 8, 2t + 9, values 64 h + 8g .. + 7, column i of product i
//
// Queries and the new key are normed and rotated in these registers: both values of a rotated pair are in one lane.
// Each warp has a softmax of its own. The warps' results are merged in shared memory, those of the splits by the last
// block.
//
// The cache of a layer with a window is a ring: position p lies at place p % window. Attention does not depend on the
// order of its places, so the kernel only knows how many are in use, and which of them gets the new key.
//
// Of consecutive rows each attends to the keys of those before it. So a kernel of its own writes all of them first.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda/decode_ops.hpp"
#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kHeads = 8;       // query heads of a block
constexpr int kPositions = 16;  // of the cache, that a warp works on at a time

// Sizes that follow from kSize, the values of a head.
template <int kSize>
struct Sizes {
  static constexpr int kWarps = kSize > 128 ? 8 : 16;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kPieces = kSize / 32;                   // of 16 bytes, that a lane has of a head
  static constexpr int kRun = kSize < 64 ? 4 : 8;              // neighbouring values that a lane has of a cached value,
  static constexpr int kHalves = kSize < 64 ? 1 : kSize / 64;  // and how many times
  static constexpr int kStride = kSize + 2;                    // of a partial result: values, greatest score, sum
};

// A lane's part of a head, of which the first 32 * blocks values are there.
template <class T, int kSize>
__device__ void read_part(const T* from, int t, int blocks, uint4 (&out)[kSize / 32]) {
#pragma unroll
  for (int j = 0; j < kSize / 32; ++j)
    out[j] = j < blocks ? __ldcg(reinterpret_cast<const uint4*>(from + j * 32 + t * 8)) : uint4{0, 0, 0, 0};
}

// A lane's part of cos or sin for the rotated values; one half of them, if both halves are alike.
template <class T, int kSize>
__device__ void read_rotation(const Attention& p, const T* from, int t, uint4 (&out)[kSize / 32]) {
#pragma unroll
  for (int j = 0; j < kSize / 32; ++j) {
    const int at = j * 32 + t * 8, first = at < p.angles ? at : at - p.angles;
    out[j] = at < p.rotary ? __ldcg(reinterpret_cast<const uint4*>(from + first)) : uint4{0, 0, 0, 0};
  }
}

// Rotates the first 32 * kTurned values of a head by halves.
template <class T, int kTurned, int kBlocks>
__device__ __forceinline__ void turn(float (&values)[kBlocks][8], const uint4 (&cos)[kBlocks],
                                     const uint4 (&sin)[kBlocks], int t) {
  float turned[kTurned][8];
#pragma unroll
  for (int j = 0; j < kTurned; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kTurned == 1) {
        const float other = __shfl_xor_sync(kAll, values[0][i], 2);
        turned[0][i] = t < 2 ? -other : other;
      } else {
        const float other = values[(j + kTurned / 2) % kTurned][i];
        turned[j][i] = j < kTurned / 2 ? -other : other;
      }
    }
#pragma unroll
  for (int j = 0; j < kTurned; ++j) {
    float c[8], s[8];
    unpack<T>(cos[j], c);
    unpack<T>(sin[j], s);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[j][i] = rounded<T>(values[j][i] * c[i]) + rounded<T>(turned[j][i] * s[i]);
  }
}

// Norms a head, if there is a weight, and rotates its first `turned` values.
template <class T, int kSize>
__device__ void prepare(const Attention& p, uint4 (&head)[kSize / 32], bool is_normed,
                        const uint4 (&weight)[kSize / 32], const uint4 (&cos)[kSize / 32],
                        const uint4 (&sin)[kSize / 32], int t) {
  constexpr int kBlocks = kSize / 32;
  float values[kBlocks][8];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) unpack<T>(head[j], values[j]);
  if (is_normed) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(values[j][i], values[j][i], sum);
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float scale = rsqrtf(sum / kSize + p.eps);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float weights[8];
      unpack<T>(weight[j], weights);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float normed = values[j][i] * scale;
        values[j][i] = rounded<T>((weights[i] + p.norm_offset) * (p.rounds_first ? rounded<T>(normed) : normed));
      }
    }
  }
  if (p.rotary == kSize) turn<T, kBlocks>(values, cos, sin, t);
  else if (p.rotary == 32) turn<T, 1>(values, cos, sin, t);
  if constexpr (kBlocks > 2)
    if (p.rotary == 64) turn<T, 2>(values, cos, sin, t);
  if constexpr (kBlocks > 4)
    if (p.rotary == 128) turn<T, 4>(values, cos, sin, t);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) head[j] = pack<T>(values[j]);
}

// What a block works on: up to kHeads query heads that share keys, and one split of the cache.
template <class T, int kSize>
struct Block {
  int heads, head;  // how many query heads, and the first of them
  int batch, split;
  const T *q, *k, *v, *cos, *sin, *gates, *sinks;  // gates and sinks of the block's first head
  T *keys, *values;                                // the cache
  const unsigned char* mask;

  // g: the query head of this lane.
  __device__ __forceinline__ Block(const Attention& p, int g) {
    const int group = p.q_heads / p.kv_heads, chunks = (group + kHeads - 1) / kHeads;
    const int kv = static_cast<int>(blockIdx.x) / chunks, chunk = static_cast<int>(blockIdx.x) % chunks;
    heads = min(kHeads, group - chunk * kHeads), head = kv * group + chunk * kHeads;
    batch = static_cast<int>(blockIdx.y), split = static_cast<int>(blockIdx.z);
    const T* row = static_cast<const T*>(p.q) + static_cast<size_t>(batch) * p.q_stride;
    q = row + static_cast<size_t>(head + g) * p.q_head_stride;
    gates = row + static_cast<size_t>(head) * p.q_head_stride + kSize;
    sinks = p.sinks == nullptr ? nullptr : static_cast<const T*>(p.sinks) + head;
    k = static_cast<const T*>(p.k) + static_cast<size_t>(batch) * p.kv_stride + kv * kSize;
    v = static_cast<const T*>(p.v) + static_cast<size_t>(batch) * p.kv_stride + kv * kSize;
    cos = static_cast<const T*>(p.cos) + static_cast<size_t>(batch) * p.rotation_stride;
    sin = static_cast<const T*>(p.sin) + static_cast<size_t>(batch) * p.rotation_stride;
    keys = static_cast<T*>(p.keys) + batch * p.batch_stride + kv * p.head_stride;
    values = static_cast<T*>(p.values) + batch * p.batch_stride + kv * p.head_stride;
    mask = reinterpret_cast<const unsigned char*>(p.mask) + batch * p.mask_stride;
  }
};

// The position of a row's token, where the first one's is known.
__device__ __forceinline__ int64_t position_of(const Attention& p, int64_t first, int row) {
  return first + (p.is_consecutive ? row : 0);
}

// Where the new key is written, and how many places of the cache are in use with it.
struct Places {
  int newest, count;

  __device__ __forceinline__ Places(const Attention& p, int64_t position)
      : newest(static_cast<int>(p.window == 0 ? position : position % p.window)),
        count(static_cast<int>(p.window == 0 ? position + 1 : min(position + 1, static_cast<int64_t>(p.window)))) {}
};

// Places of a split, where so many are in use.
__device__ __forceinline__ int split_size(const Attention& p, int count) {
  return ((count + p.splits - 1) / p.splits + kPositions - 1) / kPositions * kPositions;
}

// What the softmax of a head counts without a value; -INFINITY: nothing.
template <class T, int kSize>
__device__ __forceinline__ float sink_of(const Block<T, kSize>& block, int row) {
  return block.sinks != nullptr && row < block.heads ? load(block.sinks[row]) : -INFINITY;
}

// The output of a head, multiplied with the sigmoid of its gate if it has one.
template <class T, int kSize>
__device__ __forceinline__ T finished(const Attention& p, const Block<T, kSize>& block, int row, int at, float value) {
  if (!p.has_gates) return store<T>(value);
  const float gate = load(__ldcg(block.gates + static_cast<size_t>(row) * p.q_head_stride + at));
  return store<T>(rounded<T>(value) * rounded<T>(1.0f / (1.0f + __expf(-gate))));
}

// Fetches this split of the cache into L2 while the kernel before still runs. That kernel may not have advanced the
// position yet, which does no harm here.
template <class T, int kSize>
__device__ __forceinline__ void prefetch_cache(const Attention& p, const Block<T, kSize>& block) {
  const Places places(p, position_of(p, *static_cast<const volatile int64_t*>(p.cache_position), block.batch));
  const int size = split_size(p, places.count), begin = block.split * size;
  const size_t bytes = static_cast<size_t>(max(0, min(places.count, begin + size) - begin)) * kSize * sizeof(T);
  for (size_t at = threadIdx.x * size_t{128}; at < bytes; at += Sizes<kSize>::kThreads * size_t{128}) {
    const size_t from = static_cast<size_t>(begin) * kSize * sizeof(T) + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const std::byte*>(block.keys) + from));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const std::byte*>(block.values) + from));
  }
}

// Writes the new key and value to the cache. The block's other warps read the key from shared memory.
template <class T, int kSize>
__device__ __forceinline__ void append(const Block<T, kSize>& block, const uint4 (&key)[kSize / 32], int newest,
                                       uint4* new_key, int lane) {
  const int g = lane / 4, t = lane % 4;
  auto* cached = reinterpret_cast<uint4*>(block.keys + static_cast<size_t>(newest) * kSize);
  if (g == 0)
#pragma unroll
    for (int j = 0; j < kSize / 32; ++j) new_key[j * 4 + t] = cached[j * 4 + t] = key[j];
  for (int i = lane; i < kSize / 8; i += kWarp)
    reinterpret_cast<uint4*>(block.values + static_cast<size_t>(newest) * kSize)[i] =
        __ldcg(reinterpret_cast<const uint4*>(block.v) + i);
}

// A warp's softmax so far, for the head of this lane. Everything is relative to the greatest score yet.
template <int kSize>
struct Softmax {
  float most = -INFINITY, sum = 0, found[Sizes<kSize>::kHalves][Sizes<kSize>::kRun][2] = {};
};

// Places first .. end - 1 of the cache. The key of `newest` is in shared memory; -1: all are in the cache.
struct Range {
  int first, end, newest;
};

// scores += q k^T for kPositions positions from `base` on; a lane has four of them.
template <class T, int kSize>
__device__ __forceinline__ void multiply_keys(const Block<T, kSize>& block, const Range& range, int base,
                                              const uint4 (&query)[kSize / 32], const uint4* new_key, int g, int t,
                                              float (&scores)[2][2]) {
  constexpr int kPieces = Sizes<kSize>::kPieces;
  uint4 key[2][kPieces];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int at = base + n * 8 + g;
    const auto* from = reinterpret_cast<const uint4*>(block.keys + static_cast<size_t>(at) * kSize);
#pragma unroll
    for (int j = 0; j < kPieces; ++j)
      key[n][j] = at == range.newest ? new_key[j * 4 + t]
                  : at < range.end   ? __ldcg(from + j * 4 + t)
                                     : uint4{0, 0, 0, 0};
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      multiply<T>(scores[n], query[j].x, query[j].y, key[n][j].x, key[n][j].y);
      multiply<T>(scores[n], query[j].z, query[j].w, key[n][j].z, key[n][j].w);
    }
}

// Turns scores into weights relative to the greatest score. Where that score grows, what has been summed before must
// shrink: returns the factor.
template <int kSize>
__device__ __forceinline__ float weigh(Softmax<kSize>& softmax, const bool (&allowed)[2][2], float scale,
                                       float (&scores)[2][2]) {
  float greatest = softmax.most;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scores[n][i] = allowed[n][i] ? scores[n][i] * scale : -INFINITY;
      greatest = fmaxf(greatest, scores[n][i]);
    }
  greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, 1));
  greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, 2));
  const float base_score = greatest == -INFINITY ? 0.0f : greatest;
  const float shrink = __expf(softmax.most - base_score);
  softmax.most = greatest;
  softmax.sum *= shrink;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scores[n][i] = __expf(scores[n][i] - base_score);
      softmax.sum += scores[n][i];
    }
  return shrink;
}

// Adds weights times values. A lane has a piece of the values of four positions. Positions beyond the newest are not
// read: nobody has written them, and they may hold anything, NaN too.
template <class T, int kSize>
__device__ __forceinline__ void multiply_values(const Block<T, kSize>& block, const Range& range, int base,
                                                const bool (&there)[2][2], const float (&weights)[2][2], float shrink,
                                                int g, int t, Softmax<kSize>& softmax) {
  constexpr int kRun = Sizes<kSize>::kRun;
  const uint32_t a0 = pair<T>(weights[0][0], weights[0][1]), a2 = pair<T>(weights[1][0], weights[1][1]);
#pragma unroll
  for (int h = 0; h < Sizes<kSize>::kHalves; ++h) {
    alignas(16) uint16_t piece[2][2][kRun];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = base + n * 8 + 2 * t + i;
        const T* from =
            (at == range.newest ? block.v : block.values + static_cast<size_t>(at) * kSize) + h * 64 + g * kRun;
        if constexpr (kRun == 8)
          *reinterpret_cast<uint4*>(piece[n][i]) =
              there[n][i] ? __ldcg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
        else
          *reinterpret_cast<uint2*>(piece[n][i]) =
              there[n][i] ? __ldcg(reinterpret_cast<const uint2*>(from)) : uint2{0, 0};
      }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      softmax.found[h][i][0] *= shrink;
      softmax.found[h][i][1] *= shrink;
      multiply<T>(softmax.found[h][i], a0, a2, piece[0][0][i] | static_cast<uint32_t>(piece[0][1][i]) << 16,
                  piece[1][0][i] | static_cast<uint32_t>(piece[1][1][i]) << 16);
    }
  }
}

// A warp's part of the softmax: kPositions positions at a time.
template <class T, int kSize>
__device__ __forceinline__ void attend(const Attention& p, const Block<T, kSize>& block, const Range& range,
                                       const uint4 (&query)[kSize / 32], const uint4* new_key, int warp, int g, int t,
                                       Softmax<kSize>& softmax) {
  for (int base = range.first + warp * kPositions; base < range.end; base += Sizes<kSize>::kWarps * kPositions) {
    bool there[2][2], allowed[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = base + n * 8 + 2 * t + i;
        there[n][i] = at < range.end;
        allowed[n][i] = there[n][i] && __ldcg(block.mask + at) != 0;
      }
    float scores[2][2] = {};
    multiply_keys(block, range, base, query, new_key, g, t, scores);
    const float shrink = weigh(softmax, allowed, p.scale, scores);
    multiply_values(block, range, base, there, scores, shrink, g, t, softmax);
  }
  softmax.sum += __shfl_xor_sync(kAll, softmax.sum, 1);
  softmax.sum += __shfl_xor_sync(kAll, softmax.sum, 2);
}

// Writes this lane's part of its warp's result to `partial`: values, greatest score, sum.
template <int kSize>
__device__ __forceinline__ void leave(const Softmax<kSize>& softmax, float* partial, int t) {
  constexpr int kRun = Sizes<kSize>::kRun;
  // Column c of product i is value 64 h + kRun * c + i.
#pragma unroll
  for (int h = 0; h < Sizes<kSize>::kHalves; ++h)
#pragma unroll
    for (int i = 0; i < kRun; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) partial[h * 64 + kRun * (2 * t + c) + i] = softmax.found[h][i][c];
  if (t == 0) {
    partial[kSize] = softmax.most;
    partial[kSize + 1] = softmax.sum;
  }
}

// How much each of several partial results counts for a head, and the greatest score and the sum of all of them.
template <int kParts>
struct Shares {
  float factors[kParts][kHeads], top[kHeads], total[kHeads];
};

// A warp works on each head, a lane for each of the `parts` warps that had positions. sink: of the head of this warp.
template <int kSize>
__device__ __forceinline__ void share_among_warps(const float* partials, int parts, float sink, int warp, int lane,
                                                  Shares<Sizes<kSize>::kWarps>& shares) {
  if (warp >= kHeads) return;
  const float* from = partials + (lane * kHeads + warp) * Sizes<kSize>::kStride + kSize;
  const float most = lane < parts ? from[0] : -INFINITY;
  float all = fmaxf(most, sink);
  for (int step = kWarp / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
  const float factor = most == -INFINITY ? 0.0f : __expf(most - all);
  const float whole =
      warp_sum(lane < parts ? factor * from[1] : 0.0f) + (sink == -INFINITY ? 0.0f : __expf(sink - all));
  if (lane < parts) shares.factors[lane][warp] = factor;
  if (lane == 0) {
    shares.top[warp] = all;
    shares.total[warp] = whole;
  }
}

// Merges the warps' results. With one split they go to `out`; with several, to `scratch`, where the last block merges
// them.
template <class T, int kSize>
__device__ __forceinline__ void write_block(const Attention& p, const Block<T, kSize>& block, const float* partials,
                                            int parts, const Shares<Sizes<kSize>::kWarps>& shares, T* out,
                                            float* scratch) {
  constexpr int kStride = Sizes<kSize>::kStride;
  for (int i = static_cast<int>(threadIdx.x); i < block.heads * kSize; i += Sizes<kSize>::kThreads) {
    const int row = i / kSize, at = i % kSize;
    float value = 0;
    for (int part = 0; part < parts; ++part)
      value += shares.factors[part][row] * partials[(part * kHeads + row) * kStride + at];
    if (p.splits == 1) {
      out[i] = finished<T, kSize>(p, block, row, at, value / shares.total[row]);
      continue;
    }
    float* to = scratch + (block.split * kHeads + row) * kStride;
    to[at] = value;
    if (at == 0) {
      to[kSize] = shares.top[row];
      to[kSize + 1] = shares.total[row];
    }
  }
}

// Whether this block is the last of its splits to come here. If so, it sees what the others have written.
__device__ __forceinline__ bool is_last_block(const Attention& p, size_t cell) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  // Back at zero when all have come.
  if (threadIdx.x == 0)
    is_last =
        atomicInc(p.block_counts + cell, static_cast<unsigned>(p.splits) - 1) == static_cast<unsigned>(p.splits) - 1;
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  return true;
}

// Adds up the splits that the blocks have left in `scratch`; `factors` [splits][kHeads] is shared memory.
template <class T, int kSize>
__device__ __forceinline__ void merge_splits(const Attention& p, const Block<T, kSize>& block, const float* scratch,
                                             float (*factors)[kHeads], T* out, int warp, int lane) {
  constexpr int kStride = Sizes<kSize>::kStride;
  if (warp < block.heads) {  // a warp a head, a lane a split
    const float* from = scratch + (lane * kHeads + warp) * kStride + kSize;
    const bool is_part = lane < p.splits;
    const float most = is_part ? __ldcg(from) : -INFINITY, sum = is_part ? __ldcg(from + 1) : 0;
    const float sink = sink_of(block, warp);
    float all = fmaxf(most, sink);
    for (int step = kWarp / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
    const float factor = all == -INFINITY ? 0.0f : __expf(most - all);
    const float whole = warp_sum(factor * sum) + (sink == -INFINITY ? 0.0f : __expf(sink - all));
    if (is_part) factors[lane][warp] = factor / whole;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < block.heads * kSize; i += Sizes<kSize>::kThreads) {
    const int row = i / kSize;
    const float* from = scratch + row * kStride + i % kSize;
    float value = 0;
#pragma unroll 8
    for (int part = 0; part < p.splits; ++part)
      value += factors[part][row] * __ldcg(from + static_cast<size_t>(part) * kHeads * kStride);
    out[i] = finished<T, kSize>(p, block, row, i % kSize, value);
  }
}

// Writes the keys and values of consecutive rows; a warp has a head of a row.
template <class T, int kSize>
__global__ void __launch_bounds__(kWarp) append_kernel(const Attention p) {
  constexpr int kPieces = Sizes<kSize>::kPieces;
  __shared__ uint4 new_key[kSize / 8];
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  const Block<T, kSize> block(p, g);
  uint4 weight[kPieces];
  read_part<T, kSize>(static_cast<const T*>(p.k_weight), t, p.k_weight == nullptr ? 0 : kPieces, weight);
  release_next();
  await_previous();
  const int64_t position = __ldcg(reinterpret_cast<const long long*>(p.cache_position));
  uint4 fresh[kPieces], c[kPieces], s[kPieces];
  read_part<T, kSize>(block.k, t, kPieces, fresh);
  read_rotation<T, kSize>(p, block.cos, t, c);
  read_rotation<T, kSize>(p, block.sin, t, s);
  prepare<T, kSize>(p, fresh, p.k_weight != nullptr, weight, c, s, t);
  append(block, fresh, static_cast<int>(position_of(p, position, block.batch)), new_key, lane);
}

template <class T, int kSize>
__global__ void __launch_bounds__(Sizes<kSize>::kThreads) attention_kernel(const Attention p) {
  constexpr int kWarps = Sizes<kSize>::kWarps, kPieces = Sizes<kSize>::kPieces, kStride = Sizes<kSize>::kStride;
  extern __shared__ float partials[];  // [kWarps][kHeads][kStride]
  __shared__ uint4 new_key[kSize / 8];
  __shared__ Shares<kWarps> shares;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const Block<T, kSize> block(p, g);
  uint4 q_weight[kPieces], k_weight[kPieces];
  read_part<T, kSize>(static_cast<const T*>(p.q_weight), t, p.q_weight == nullptr ? 0 : kPieces, q_weight);
  read_part<T, kSize>(static_cast<const T*>(p.k_weight), t, p.k_weight == nullptr ? 0 : kPieces, k_weight);
  prefetch_cache(p, block);
  release_next();
  await_previous();

  const int64_t position = __ldcg(reinterpret_cast<const long long*>(p.cache_position));
  const Places places(p, position_of(p, position, block.batch));
  const int newest = p.is_consecutive ? -1 : places.newest;
  uint4 query[kPieces], fresh[kPieces], c[kPieces], s[kPieces];
  read_part<T, kSize>(block.q, t, g < block.heads ? kPieces : 0, query);
  read_part<T, kSize>(block.k, t, kPieces, fresh);
  read_rotation<T, kSize>(p, block.cos, t, c);
  read_rotation<T, kSize>(p, block.sin, t, s);
  const int size = split_size(p, places.count), first = block.split * size;
  const Range range{first, min(places.count, first + size), newest};
  // The warp that has the new position must wait for its key. So another warp prepares the key, one that has no
  // positions if the cache is short.
  const bool has_new = range.first <= newest && newest < range.end;
  if (has_new && warp == ((newest - range.first) / kPositions + kWarps / 2) % kWarps) {
    prepare<T, kSize>(p, fresh, p.k_weight != nullptr, k_weight, c, s, t);
    append(block, fresh, newest, new_key, lane);
  }
  if (range.first + warp * kPositions < range.end)  // else it finds nothing
    prepare<T, kSize>(p, query, p.q_weight != nullptr, q_weight, c, s, t);
  if (has_new) __syncthreads();

  Softmax<kSize> softmax;
  attend(p, block, range, query, new_key, warp, g, t, softmax);
  leave(softmax, partials + (warp * kHeads + g) * kStride, t);
  __syncthreads();
  const int parts = min(kWarps, (range.end - range.first + kPositions - 1) / kPositions);  // the other warps: nothing
  share_among_warps<kSize>(partials, parts, p.splits == 1 ? sink_of(block, warp) : -INFINITY, warp, lane, shares);
  __syncthreads();
  T* out = static_cast<T*>(p.out) + (static_cast<size_t>(block.batch) * p.q_heads + block.head) * kSize;
  const size_t cell = static_cast<size_t>(block.batch) * gridDim.x + blockIdx.x;
  float* scratch = p.scratch + cell * p.splits * kHeads * kStride;
  write_block(p, block, partials, parts, shares, out, scratch);
  if (p.splits > 1 && is_last_block(p, cell))
    merge_splits(p, block, scratch, reinterpret_cast<float (*)[kHeads]>(partials), out, warp, lane);
}

template <class T, int kSize>
void run(const Attention& p, int device, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(float) * Sizes<kSize>::kWarps * kHeads * Sizes<kSize>::kStride;
  static std::atomic<uint64_t> ready{0};
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((ready.load(std::memory_order_relaxed) & bit) == 0) {
    check_cuda(cudaFuncSetAttribute(attention_kernel<T, kSize>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kBytes)),
               "attention: asking for shared memory");
    ready.fetch_or(bit, std::memory_order_relaxed);
  }
  const int chunks = (p.q_heads / p.kv_heads + kHeads - 1) / kHeads;
  // Where heads that share keys are several blocks, all write the same.
  if (p.is_consecutive)
    launch_early(
        "launching the append of attention", append_kernel<T, kSize>,
        {dim3(static_cast<unsigned>(p.kv_heads * chunks), static_cast<unsigned>(p.batch)), dim3(kWarp), stream}, p);
  launch_early("launching attention", attention_kernel<T, kSize>,
               {dim3(static_cast<unsigned>(p.kv_heads * chunks), static_cast<unsigned>(p.batch),
                     static_cast<unsigned>(p.splits)),
                dim3(Sizes<kSize>::kThreads), stream, kBytes},
               p);
}

}  // namespace

void attention(const Attention& p, DType dtype, Stream to) {
  if (dtype == DType::f32) throw std::invalid_argument("attention: fp32 is not served");
  if (p.splits < 1 || p.splits > kWarp) throw std::invalid_argument("attention: 1 to 32 splits");
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0)
    throw std::invalid_argument("attention: query heads must be a multiple of those of keys");
  if (p.angles != p.rotary && 2 * p.angles != p.rotary)
    throw std::invalid_argument("attention: cos and sin must be of all rotated values, or of one half");
  if (p.rotary != p.size && (p.rotary > p.size || (p.rotary != 32 && p.rotary != 64 && p.rotary != 128)))
    throw std::invalid_argument("attention: the rotated values of a head must be all, or the first 32, 64 or 128");
  if (p.is_consecutive && (p.window != 0 || p.batch_stride != 0))
    throw std::invalid_argument("attention: consecutive rows share one cache without a window");
  const OnStream stream(to);
  auto with = [&]<class T>(T) {
    if (p.size == 32) run<T, 32>(p, to.device, stream);
    else if (p.size == 64) run<T, 64>(p, to.device, stream);
    else if (p.size == 128) run<T, 128>(p, to.device, stream);
    else if (p.size == 256) run<T, 256>(p, to.device, stream);
    else throw std::invalid_argument("attention: the size of a head must be 32, 64, 128 or 256");
  };
  if (dtype == DType::bf16) with(__nv_bfloat16{});
  else with(__half{});
}

}  // namespace ktinject::cuda
