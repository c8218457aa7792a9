// A block computes up to eight query heads that share keys, over one split of the cache. A warp takes 16 positions of
// the split at a time. Scores are keys times q^T by mma.m16n8k16, with positions as rows and heads as columns. Turned
// into weights and transposed, they are the B operand of values^T times weights, whose rows are values of a head.
//
// The inputs of a product may come in any order, if both operands have the same one. So a lane's part of a key (and of
// a query) can be 16 bytes in one piece, and its part of a value, too:
//
//   lane 4g + t   queries:  head g, values 32 j + 8t .. + 7
//                 keys:     positions g and 8 + g, the same values
//                 values:   positions 2t, 2t + 1, 2t + 8, 2t + 9, values 64 h + 8g .. + 7, of which product i has
//                           i as row g and 4 + i as row 8 + g
//                 results:  of heads 2t and 2t + 1
//
// Before that, a warp norms and rotates each query head, and one more the new key: a lane has neighbouring values, and
// the lane with their partners gives them to it. Few instructions matter more than all lanes being busy: code that runs
// once takes as long as fetching it takes.
// Each warp has a softmax of its own. The warps' results are merged in shared memory, those of the splits by the last
// block. A context that one block takes at once is not split.
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
#include "cuda/launch_shapes.hpp"
#include "cuda/on_device.cuh"
#include "cuda/shared_memory.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kHeads = 8;       // query heads of a block
constexpr int kPositions = 16;  // of the cache, that a warp works on at a time

// Sizes that follow from kSize, the values of a head.
template <int kSize>
struct Sizes {
  static constexpr int kWarps = attention_warps(kSize);
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kAtOnce = kWarps * kPositions;          // positions of a block
  static constexpr int kPieces = kSize / 32;                   // of 16 bytes, that a lane has of a head
  static constexpr int kRun = kSize < 64 ? 4 : 8;              // neighbouring values that a lane has of a cached value,
  static constexpr int kHalves = kSize < 64 ? 1 : kSize / 64;  // and how many times
  static constexpr int kStride = kSize + 4;                    // of a partial result: values, greatest score, sum
  static constexpr int kPitch = kSize / 8 + 4;                 // of a prepared query, in 16 bytes: for shared memory
};

// A lane's neighbouring values of a head that a whole warp has.
template <class T, int kSize>
struct Part {
  static constexpr int kEach = kSize / kWarp;
  using Words =
      std::conditional_t<kEach == 8, uint4,
                         std::conditional_t<kEach == 4, uint2, std::conditional_t<kEach == 2, unsigned, uint16_t>>>;
  static_assert(kEach <= 8 && sizeof(Words) == kEach * sizeof(T));

  static __device__ __forceinline__ Words read(const T* from) { return __ldcg(reinterpret_cast<const Words*>(from)); }
  static __device__ __forceinline__ void unpack(Words words, float (&values)[kEach]) {
    T found[kEach];
    memcpy(found, &words, sizeof found);
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = load(found[i]);
  }
  static __device__ __forceinline__ Words pack(const float (&values)[kEach]) {
    T found[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) found[i] = store<T>(values[i]);
    Words words;
    memcpy(&words, found, sizeof words);
    return words;
  }
};

// Norms a head, if there is a weight, and rotates its first values by halves. A warp has the head, and each lane its
// part: of the head, the norm's weight, and the angles where its values are rotated.
template <class T, int kSize, class P = Part<T, kSize>>
__device__ __forceinline__ typename P::Words prepare(const Attention& p, typename P::Words head, bool is_normed,
                                                     typename P::Words weight, typename P::Words cos,
                                                     typename P::Words sin, int lane) {
  float values[P::kEach];
  P::unpack(head, values);
  if (is_normed) {
    float sum = 0, weights[P::kEach];
    P::unpack(weight, weights);
#pragma unroll
    for (int i = 0; i < P::kEach; ++i) sum = fmaf(values[i], values[i], sum);
    const float scale = rsqrtf(warp_sum(sum) / kSize + p.eps);
#pragma unroll
    for (int i = 0; i < P::kEach; ++i) {
      const float normed = values[i] * scale;
      values[i] = rounded<T>((weights[i] + p.norm_offset) * (p.rounds_first ? rounded<T>(normed) : normed));
    }
  }
  const int half = p.rotary / 2 / P::kEach;  // in lanes: a power of two
  float c[P::kEach], s[P::kEach];
  P::unpack(cos, c);
  P::unpack(sin, s);
#pragma unroll
  for (int i = 0; i < P::kEach; ++i) {
    const float other = __shfl_xor_sync(kAll, values[i], half), turned = lane < half ? -other : other;
    const float rotated = rounded<T>(values[i] * c[i]) + rounded<T>(turned * s[i]);
    values[i] = lane < 2 * half ? rotated : values[i];
  }
  return P::pack(values);
}

// A lane's part of cos or sin, which are of one half of the rotated values if both halves are alike.
template <class T, int kSize, class P = Part<T, kSize>>
__device__ __forceinline__ typename P::Words read_rotation(const Attention& p, const T* from, int lane) {
  const int at = lane * P::kEach;
  return at < p.rotary ? P::read(from + (at < p.angles ? at : at - p.angles)) : typename P::Words{};
}

// What a block works on: up to kHeads query heads that share keys, and one split of the cache.
template <class T, int kSize>
struct Block {
  int heads, head;  // how many query heads, and the first of them
  int batch, split;
  const T *q, *k, *v, *cos, *sin, *gates, *sinks;  // queries, gates and sinks from the block's first head on
  T *keys, *values;                                // the cache
  const unsigned char* mask;

  __device__ __forceinline__ explicit Block(const Attention& p) {
    const int group = p.q_heads / p.kv_heads, chunks = (group + kHeads - 1) / kHeads;
    const int kv = static_cast<int>(blockIdx.x) / chunks, chunk = static_cast<int>(blockIdx.x) % chunks;
    heads = min(kHeads, group - chunk * kHeads), head = kv * group + chunk * kHeads;
    batch = static_cast<int>(blockIdx.y), split = static_cast<int>(blockIdx.z);
    const T* row = static_cast<const T*>(p.q) + static_cast<size_t>(batch) * p.q_stride;
    q = row + static_cast<size_t>(head) * p.q_head_stride;
    gates = q + kSize;
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

// How the places in use are split among blocks: fewer splits than there are blocks for if one takes them all at once.
template <int kSize>
struct Split {
  int used, size;  // splits, places of each

  __device__ __forceinline__ Split(const Attention& p, int count)
      : used(max(1, min(p.splits, (count + Sizes<kSize>::kAtOnce - 1) / Sizes<kSize>::kAtOnce))),
        size(((count + used - 1) / used + kPositions - 1) / kPositions * kPositions) {}
};

// What the softmax of a head counts without a value; -INFINITY: nothing.
template <class T, int kSize>
__device__ __forceinline__ float sink_of(const Block<T, kSize>& block, int row) {
  return block.sinks != nullptr && row < block.heads ? load(block.sinks[row]) : -INFINITY;
}

// Eight values of a head's output, multiplied with the sigmoids of their gates if it has some.
template <class T>
__device__ __forceinline__ uint4 finished(bool has_gates, const float (&values)[8], uint4 gate) {
  if (!has_gates) return pack<T>(values);
  float gates[8];
  unpack<T>(gate, gates);
#pragma unroll
  for (int i = 0; i < 8; ++i) gates[i] = rounded<T>(values[i]) * rounded<T>(__fdividef(1.0f, 1.0f + __expf(-gates[i])));
  return pack<T>(gates);
}

// Fetches this split of the cache into L2 while the kernel before still runs. That kernel may not have advanced the
// position yet, which does no harm here.
template <class T, int kSize>
__device__ __forceinline__ void prefetch_cache(const Attention& p, const Block<T, kSize>& block) {
  const Places places(p, position_of(p, *static_cast<const volatile int64_t*>(p.cache_position), block.batch));
  const int size = Split<kSize>(p, places.count).size, begin = block.split * size;
  const size_t bytes = static_cast<size_t>(max(0, min(places.count, begin + size) - begin)) * kSize * sizeof(T);
#pragma unroll 1
  for (size_t at = threadIdx.x * size_t{128}; at < bytes; at += Sizes<kSize>::kThreads * size_t{128}) {
    const size_t from = static_cast<size_t>(begin) * kSize * sizeof(T) + at;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const std::byte*>(block.keys) + from));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const std::byte*>(block.values) + from));
  }
}

// A warp writes the new key, of which each lane has its part, and value to the cache.
template <class T, int kSize, class P = Part<T, kSize>>
__device__ __forceinline__ void append(const Block<T, kSize>& block, typename P::Words key, typename P::Words value,
                                       int newest, int lane) {
  const size_t at = static_cast<size_t>(newest) * kSize + static_cast<size_t>(lane * P::kEach);
  *reinterpret_cast<typename P::Words*>(block.keys + at) = key;
  *reinterpret_cast<typename P::Words*>(block.values + at) = value;
}

// A warp's softmax so far, for the two heads of this lane. Everything is relative to the greatest score yet.
template <int kSize>
struct Softmax {
  static constexpr int kProducts = Sizes<kSize>::kRun / 2;
  float most[2] = {-INFINITY, -INFINITY}, sum[2] = {}, found[Sizes<kSize>::kHalves][kProducts][4] = {};
};

// Places first .. end - 1 of the cache. The key of `newest` is in shared memory; -1: all are in the cache.
struct Range {
  int first, end, newest;
};

// The lane's parts of the keys of kPositions positions from `base` on.
template <class T, int kSize>
__device__ __forceinline__ void read_keys(const Block<T, kSize>& block, const Range& range, int base, int g, int t,
                                          uint4 (&key)[2][Sizes<kSize>::kPieces]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int at = base + n * 8 + g;
    const auto* from = reinterpret_cast<const uint4*>(block.keys + static_cast<size_t>(at) * kSize) + t;
    const bool is_there = at < range.end && at != range.newest;
#pragma unroll
    for (int j = 0; j < Sizes<kSize>::kPieces; ++j) key[n][j] = is_there ? __ldcg(from + j * 4) : uint4{0, 0, 0, 0};
  }
}

// scores += keys times q^T for kPositions positions from `base` on: of positions g and 8 + g, two heads each.
template <class T, int kSize>
__device__ __forceinline__ void multiply_keys(const uint4* query, const uint4* new_key, const Range& range, int base,
                                              int g, int t, uint4 (&key)[2][Sizes<kSize>::kPieces],
                                              float (&scores)[4]) {
  constexpr int kPieces = Sizes<kSize>::kPieces;
#pragma unroll
  for (int n = 0; n < 2; ++n)
    if (base + n * 8 + g == range.newest)
#pragma unroll
      for (int j = 0; j < kPieces; ++j) key[n][j] = new_key[j * 4 + t];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const uint4 q = query[j * 4 + t], &a = key[0][j], &b = key[1][j];
    multiply<T>(scores, a.x, b.x, a.y, b.y, q.x, q.y);
    multiply<T>(scores, a.z, b.z, a.w, b.w, q.z, q.w);
  }
}

// Turns scores into weights relative to the greatest score of a head. Where that score grows, what has been summed
// before must shrink: by `shrink`.
template <int kSize>
__device__ __forceinline__ void weigh(Softmax<kSize>& softmax, const bool (&allowed)[2], float scale,
                                      float (&scores)[4], float (&shrink)[2]) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float greatest = softmax.most[c];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float& score = scores[2 * n + c];
      score = allowed[n] ? score * scale : -INFINITY;
      greatest = fmaxf(greatest, score);
    }
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, step));
    const float base_score = greatest == -INFINITY ? 0.0f : greatest;
    shrink[c] = __expf(softmax.most[c] - base_score);
    softmax.most[c] = greatest;
#pragma unroll
    for (int n = 0; n < 2; ++n) scores[2 * n + c] = __expf(scores[2 * n + c] - base_score);
    softmax.sum[c] = fmaf(softmax.sum[c], shrink[c], scores[c] + scores[2 + c]);
  }
}

// Adds values^T times weights. A lane has a piece of the values of four positions. Positions beyond the newest are not
// read: nobody has written them, and they may hold anything, NaN too.
template <class T, int kSize>
__device__ __forceinline__ void multiply_values(const Block<T, kSize>& block, const Range& range, int base,
                                                const float (&weights)[4], const float (&shrink)[2], int g, int t,
                                                Softmax<kSize>& softmax) {
  constexpr int kRun = Sizes<kSize>::kRun, kProducts = Softmax<kSize>::kProducts;
  const uint32_t b0 = transposed(pair<T>(weights[0], weights[1])), b1 = transposed(pair<T>(weights[2], weights[3]));
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
        const bool is_there = at < range.end;
        if constexpr (kRun == 8)
          *reinterpret_cast<uint4*>(piece[n][i]) =
              is_there ? __ldcg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
        else
          *reinterpret_cast<uint2*>(piece[n][i]) =
              is_there ? __ldcg(reinterpret_cast<const uint2*>(from)) : uint2{0, 0};
      }
    auto both = [&](int n, int i) { return piece[n][0][i] | static_cast<uint32_t>(piece[n][1][i]) << 16; };
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) softmax.found[h][i][j] *= shrink[j % 2];
      multiply<T>(softmax.found[h][i], both(0, i), both(0, kProducts + i), both(1, i), both(1, kProducts + i), b0, b1);
    }
  }
}

// A warp's part of the softmax: kPositions positions at a time. `key` has those of the first ones.
template <class T, int kSize>
__device__ __forceinline__ void attend(const Attention& p, const Block<T, kSize>& block, const Range& range,
                                       const uint4* query, const uint4* new_key, int base, int g, int t,
                                       uint4 (&key)[2][Sizes<kSize>::kPieces], Softmax<kSize>& softmax) {
#pragma unroll 1
  while (base < range.end) {
    bool allowed[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = base + n * 8 + g;
      allowed[n] = at < range.end && __ldcg(block.mask + at) != 0;
    }
    float scores[4] = {}, shrink[2];
    multiply_keys<T, kSize>(query, new_key, range, base, g, t, key, scores);
    weigh(softmax, allowed, p.scale, scores, shrink);
    multiply_values(block, range, base, scores, shrink, g, t, softmax);
    base += Sizes<kSize>::kAtOnce;
    if (base < range.end) read_keys(block, range, base, g, t, key);
  }
#pragma unroll
  for (float& sum : softmax.sum)
#pragma unroll
    for (int step = 4; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
}

// Writes this lane's part of its warp's result to `partials`, [kHeads][kStride]: values, greatest score, sum.
template <int kSize>
__device__ __forceinline__ void leave(const Softmax<kSize>& softmax, float* partials, int g, int t) {
  constexpr int kRun = Sizes<kSize>::kRun, kProducts = Softmax<kSize>::kProducts;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float* to = partials + (2 * t + c) * Sizes<kSize>::kStride;
#pragma unroll
    for (int h = 0; h < Sizes<kSize>::kHalves; ++h) {
      auto value = [&](int i) { return softmax.found[h][i % kProducts][i / kProducts * 2 + c]; };
#pragma unroll
      for (int i = 0; i < kRun; i += 4)
        *reinterpret_cast<float4*>(to + h * 64 + g * kRun + i) = {value(i), value(i + 1), value(i + 2), value(i + 3)};
    }
    if (g == 0) *reinterpret_cast<float2*>(to + kSize) = {softmax.most[c], softmax.sum[c]};
  }
}

// How much each of several partial results counts for a head, and the greatest score and the sum of all of them.
template <int kParts>
struct Shares {
  float factors[kParts][kHeads], top[kHeads], total[kHeads];
};

// A warp works on each head, a lane for each of the `parts` warps that had positions. sink: of the head of this warp.
// is_all: there are no other splits, so what each part counts for is divided by the sum.
template <int kSize>
__device__ __forceinline__ void share_among_warps(const float* partials, int parts, float sink, bool is_all, int warp,
                                                  int lane, Shares<Sizes<kSize>::kWarps>& shares) {
  if (warp >= kHeads) return;
  const float* from = partials + (lane * kHeads + warp) * Sizes<kSize>::kStride + kSize;
  const float most = lane < parts ? from[0] : -INFINITY;
  float all = fmaxf(most, sink);
  for (int step = kWarp / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
  const float factor = most == -INFINITY ? 0.0f : __expf(most - all);
  const float whole =
      warp_sum(lane < parts ? factor * from[1] : 0.0f) + (sink == -INFINITY ? 0.0f : __expf(sink - all));
  if (lane < parts) shares.factors[lane][warp] = is_all ? __fdividef(factor, whole) : factor;
  if (lane == 0) {
    shares.top[warp] = all;
    shares.total[warp] = whole;
  }
}

// values += factor times eight values.
__device__ __forceinline__ void add(float (&values)[8], float factor, const float4& first, const float4& second) {
  const float with[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = fmaf(factor, with[i], values[i]);
}

// Where a thread's eight values of the block's output lie: none beyond its heads.
template <int kSize>
struct Place {
  int row, at;

  __device__ __forceinline__ explicit Place(int thread) : row(thread / (kSize / 8)), at(thread % (kSize / 8) * 8) {}
};

// Merges the warps' results. With one split they go to `out`; with several, to `scratch`, where the last block merges
// them.
template <class T, int kSize>
__device__ __forceinline__ void write_block(const Attention& p, bool is_split, const Place<kSize>& place, uint4 gate,
                                            const float* partials, int parts,
                                            const Shares<Sizes<kSize>::kWarps>& shares, T* out, float* scratch) {
  constexpr int kStride = Sizes<kSize>::kStride;
  float values[8] = {};
#pragma unroll 2
  for (int part = 0; part < parts; ++part) {
    const auto* from = reinterpret_cast<const float4*>(partials + (part * kHeads + place.row) * kStride + place.at);
    add(values, shares.factors[part][place.row], from[0], from[1]);
  }
  if (!is_split) {
    *reinterpret_cast<uint4*>(out + place.row * kSize + place.at) = finished<T>(p.has_gates, values, gate);
    return;
  }
  float* to = scratch + place.row * kStride;
  *reinterpret_cast<float4*>(to + place.at) = {values[0], values[1], values[2], values[3]};
  *reinterpret_cast<float4*>(to + place.at + 4) = {values[4], values[5], values[6], values[7]};
  if (place.at == 0) *reinterpret_cast<float2*>(to + kSize) = {shares.top[place.row], shares.total[place.row]};
}

// Whether this block is the last of so many splits to come here. If so, it sees what the others have written.
__device__ __forceinline__ bool is_last_block(const Attention& p, size_t cell, unsigned splits) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  // Back at zero when all have come.
  if (threadIdx.x == 0) is_last = atomicInc(p.block_counts + cell, splits - 1) == splits - 1;
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  return true;
}

// Adds up the splits that the blocks have left in `scratch`; `factors` [splits][kHeads] is shared memory.
template <class T, int kSize>
__device__ __forceinline__ void merge_splits(const Attention& p, const Block<T, kSize>& block, int splits,
                                             const Place<kSize>& place, uint4 gate, const float* scratch,
                                             float (*factors)[kHeads], T* out, int warp, int lane) {
  constexpr int kStride = Sizes<kSize>::kStride;
  if (warp < block.heads) {  // a warp a head, a lane a split
    const bool is_part = lane < splits;
    const auto* from = reinterpret_cast<const float2*>(scratch + (lane * kHeads + warp) * kStride + kSize);
    const float2 found = is_part ? __ldcg(from) : float2{-INFINITY, 0};
    const float sink = sink_of(block, warp);
    float all = fmaxf(found.x, sink);
    for (int step = kWarp / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
    const float factor = all == -INFINITY ? 0.0f : __expf(found.x - all);
    const float whole = warp_sum(factor * found.y) + (sink == -INFINITY ? 0.0f : __expf(sink - all));
    if (is_part) factors[lane][warp] = __fdividef(factor, whole);
  }
  __syncthreads();
  if (place.row >= block.heads) return;
  float values[8] = {};
#pragma unroll 4
  for (int part = 0; part < splits; ++part) {
    const auto* from = reinterpret_cast<const float4*>(scratch + (part * kHeads + place.row) * kStride + place.at);
    add(values, factors[part][place.row], __ldcg(from), __ldcg(from + 1));
  }
  *reinterpret_cast<uint4*>(out + place.row * kSize + place.at) = finished<T>(p.has_gates, values, gate);
}

// Writes the keys and values of consecutive rows; a warp has a head of a row.
template <class T, int kSize>
__global__ void __launch_bounds__(kWarp) append_kernel(const Attention p) {
  using P = Part<T, kSize>;
  const int lane = static_cast<int>(threadIdx.x), own = lane * P::kEach;
  const Block<T, kSize> block(p);
  typename P::Words weight{};
  if (p.k_weight != nullptr) weight = P::read(static_cast<const T*>(p.k_weight) + own);
  release_next();
  await_previous();
  const int64_t position = __ldcg(reinterpret_cast<const long long*>(p.cache_position));
  const typename P::Words value = P::read(block.v + own);
  const typename P::Words key =
      prepare<T, kSize>(p, P::read(block.k + own), p.k_weight != nullptr, weight,
                        read_rotation<T, kSize>(p, block.cos, lane), read_rotation<T, kSize>(p, block.sin, lane), lane);
  append(block, key, value, static_cast<int>(position_of(p, position, block.batch)), lane);
}

template <int kSize>
constexpr size_t kStaticBytes = attention_static_bytes(kSize);

template <class T, int kSize>
__global__ void __launch_bounds__(Sizes<kSize>::kThreads) attention_kernel(const Attention p) {
  using S = Sizes<kSize>;
  using P = Part<T, kSize>;
  extern __shared__ float4 memory[];
  float* partials = reinterpret_cast<float*>(memory);  // [kWarps][kHeads][kStride]
  __shared__ uint4 queries[kHeads][S::kPitch];
  __shared__ uint4 new_key[kSize / 8];
  __shared__ Shares<S::kWarps> shares;
  static_assert(sizeof queries + sizeof new_key + sizeof shares + 16 <= kStaticBytes<kSize>);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4, own = lane * P::kEach;
  const Block<T, kSize> block(p);
  const Place<kSize> place(static_cast<int>(threadIdx.x));
  const bool has_place = place.row < block.heads;
  typename P::Words q_weight{}, k_weight{};
  if (p.q_weight != nullptr) q_weight = P::read(static_cast<const T*>(p.q_weight) + own);
  if (p.k_weight != nullptr) k_weight = P::read(static_cast<const T*>(p.k_weight) + own);
  prefetch_cache(p, block);
  release_next();
  await_previous();

  const int64_t position = __ldcg(reinterpret_cast<const long long*>(p.cache_position));
  const Places places(p, position_of(p, position, block.batch));
  const Split<kSize> split(p, places.count);
  if (block.split >= split.used) return;
  const int first = block.split * split.size;
  const Range range{first, min(places.count, first + split.size), p.is_consecutive ? -1 : places.newest};
  uint4 gate{}, key[2][S::kPieces];
  if (p.has_gates && has_place)
    gate = __ldcg(reinterpret_cast<const uint4*>(block.gates + place.row * p.q_head_stride + place.at));
  read_keys(block, range, first + warp * kPositions, g, t, key);
  typename P::Words query{}, fresh{}, value{};
  if (warp < block.heads) query = P::read(block.q + warp * p.q_head_stride + own);
  if (warp == kHeads % S::kWarps) {
    fresh = P::read(block.k + own);
    value = P::read(block.v + own);
  }
  const typename P::Words cos = read_rotation<T, kSize>(p, block.cos, lane);
  const typename P::Words sin = read_rotation<T, kSize>(p, block.sin, lane);
#pragma unroll 1
  for (int head = warp; head <= kHeads; head += S::kWarps) {  // the last is the new key
    const bool is_key = head == kHeads, is_normed = (is_key ? p.k_weight : p.q_weight) != nullptr;
    const typename P::Words prepared =
        prepare<T, kSize>(p, is_key ? fresh : query, is_normed, is_key ? k_weight : q_weight, cos, sin, lane);
    reinterpret_cast<typename P::Words*>(is_key ? new_key : queries[head])[lane] = prepared;
    if (is_key && first <= range.newest && range.newest < range.end) append(block, prepared, value, range.newest, lane);
  }
  __syncthreads();

  Softmax<kSize> softmax;
  attend(p, block, range, queries[g], new_key, first + warp * kPositions, g, t, key, softmax);
  leave(softmax, partials + warp * kHeads * S::kStride, g, t);
  __syncthreads();
  const int parts = min(S::kWarps, (range.end - first + kPositions - 1) / kPositions);  // the other warps: nothing
  const bool is_split = split.used > 1;
  share_among_warps<kSize>(partials, parts, is_split ? -INFINITY : sink_of(block, warp), !is_split, warp, lane, shares);
  __syncthreads();
  T* out = static_cast<T*>(p.out) + (static_cast<size_t>(block.batch) * p.q_heads + block.head) * kSize;
  const size_t cell = static_cast<size_t>(block.batch) * gridDim.x + blockIdx.x;
  float* scratch = p.scratch + cell * p.splits * kHeads * S::kStride;
  if (has_place)
    write_block(p, is_split, place, gate, partials, parts, shares, out, scratch + block.split * kHeads * S::kStride);
  if (is_split && is_last_block(p, cell, static_cast<unsigned>(split.used)))
    merge_splits(p, block, split.used, place, gate, scratch, reinterpret_cast<float (*)[kHeads]>(partials), out, warp,
                 lane);
}

template <class T, int kSize>
void run(const Attention& p, int device, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(float) * Sizes<kSize>::kWarps * kHeads * Sizes<kSize>::kStride;
  static_assert(kBytes == attention_dynamic_bytes(kSize));
  static SharedMemory shared;
  shared.allow("attention", attention_kernel<T, kSize>, kBytes, device);
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
