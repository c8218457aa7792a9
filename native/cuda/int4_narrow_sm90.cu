// Many tokens, in blocks of 128 outputs, for layers that are too small to fill the GPU with larger ones.
//
// They differ from those of int4_many_sm90.cu in that any number of blocks up to eight may share a strip, and in that
// up to three threads ask for copies. Two blocks may also fetch activations for each other: nothing chooses that, for
// on an H100 it took 1.2 to 3 times as long; it is here since the kernels are those that were measured.
#include <algorithm>

#include "cuda/int4_multiply_sm90.cuh"

namespace ktinject::cuda::int4::narrow {
namespace {

// The stages of a block: a share of the line, or of one strip.
struct Share {
  int begin, count;
  int rank = 0, mate = 0;  // in its cluster: among the sharers of a strip, and the strip's place
  __device__ explicit Share(const Int4Arguments& p) {
    if (p.sharers == 0) {
      begin = blockIdx.x * p.share;
      count = min(p.share, p.line - begin);
    } else {
      const int cluster = blockIdx.x / (p.sharers * p.mates), place = blockIdx.x % (p.sharers * p.mates);
      rank = place % p.sharers, mate = place / p.sharers;
      const int unit = (cluster / p.token_blocks * p.mates + mate) * p.token_blocks + cluster % p.token_blocks;
      begin = unit * p.depth + rank * p.depth / p.sharers;
      count = unit * p.depth + (rank + 1) * p.depth / p.sharers - begin;
    }
  }
};

// How the stages of a block are asked for.
//
//   stage   activations [kTokens][64]; words of kTiles × 64 outputs; scales, [groups][256] for each four tiles
template <int kTokens, int kTiles>
struct Fetch {
  static constexpr int kStrips = (kTiles + 3) / 4;  // as they are packed
  static constexpr int kWords = kTokens * 128;
  static constexpr int kScales = kWords + kTiles * 2048;
  static constexpr int kScaleBytes = kTiles < 4 ? 1024 : 2048;  // room for two groups of 4-byte scales
  static constexpr int kBytes = kScales + kStrips * kScaleBytes;
  static_assert(kBytes % 1024 == 0, "activations are swizzled");

  // Goes along the line. Blocks of tokens of the same strip follow each other, so that its weights stay in the L2.
  struct Weights {
    const Int4Arguments& p;
    const uint64_t policy;
    int unit, depth, left;  // left: stages before the next group
    int real;               // tiles of the strip that there are
    const uint8_t* words[kStrips];
    const uint8_t* scales[kStrips];
    int strip_bytes[kStrips];  // of the words of a strip's stage, which are between two stages
    int bytes;                 // of a stage

    __device__ Weights(const Int4Arguments& p, int begin) : p(p), policy(p.token_blocks == 1 ? kOnce : kNormal) {
      enter(begin / p.depth, begin % p.depth);
    }
    __device__ void enter(int new_unit, int new_depth) {
      unit = new_unit;
      depth = new_depth;
      const int tile = unit / p.token_blocks * kTiles;
      real = max(0, min(kTiles, p.tiles64 - tile));  // 0: a mate's, past the last strip
      const int group = p.stages_per_group == 0 ? 2 * depth : depth / p.stages_per_group;
      left = p.stages_per_group == 0 ? 1 : p.stages_per_group - depth % p.stages_per_group;
      bytes = real * (2048 + (p.stages_per_group == 0 ? 2 : 1) * 64 * p.scale_bytes) + kTokens * 128;
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        if (4 * i >= real) break;
        strip_bytes[i] = strip_width(p, tile + 4 * i) * 2048;
        words[i] = p.words + words_at(p, tile + 4 * i, depth);
        scales[i] = p.scales + scales_at(p, tile + 4 * i, group);
      }
    }
    // kScalesToo, kWordsToo: one thread may ask for the words, and another one for the scales.
    template <bool kWordsToo = true, bool kScalesToo = true>
    __device__ __forceinline__ void ask(uint8_t* stage, uint64_t* full) const {
      if (kWordsToo) arrive_expecting(full, bytes);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        const int here = kTiles < 4 ? real : min(4, real - 4 * i);
        if (here <= 0) break;
        if (kWordsToo) copy(stage + kWords + i * 2048 * 4, words[i], here * 2048, full, policy);
        if (!kScalesToo) continue;
        uint8_t* to = stage + kScales + i * kScaleBytes;
        const int group = here * 64 * p.scale_bytes;
        if (p.stages_per_group != 0) {
          copy(to, scales[i], group, full);
        } else if (kTiles >= 4) {
          copy(to, scales[i], 2 * group, full);
        } else {  // part of a strip: its groups do not lie together
          copy(to, scales[i], group, full);
          copy(to + group, scales[i] + strip_bytes[i] / 32 * p.scale_bytes, group, full);
        }
      }
    }
    __device__ __forceinline__ void next() {
      const bool ends = --left == 0;
      const int groups = p.stages_per_group == 0 ? 2 : 1;
      if (ends) left = max(1, p.stages_per_group);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        words[i] += strip_bytes[i];
        if (ends) scales[i] += groups * (strip_bytes[i] / 32) * p.scale_bytes;
      }
      if (++depth == p.depth) enter(unit + 1, 0);
    }
  };
  struct Activations {
    const Int4Arguments& p;
    int token, depth;
    __device__ Activations(const Int4Arguments& p, int begin)
        : p(p), token(begin / p.depth % p.token_blocks * kTokens), depth(begin % p.depth) {}
    __device__ __forceinline__ void ask(const CUtensorMap* map, uint8_t* stage, uint64_t* full) const {
      copy_tile(stage, map, depth * 64, token, full);
    }
    // Half of them, for this block and its mate, which fetches the other half.
    __device__ __forceinline__ void ask_for_both(const CUtensorMap* map, uint8_t* stage, uint64_t* full, int mate,
                                                 int mask) const {
      const int half = mate * (kTokens / 2);
      copy_tile_to(stage + half * 128, map, depth * 64, token + half, full, mask);
    }
    __device__ __forceinline__ void next() {
      if (++depth < p.depth) return;
      depth = 0;
      token += kTokens;
      if (token == p.token_blocks * kTokens) token = 0;
    }
  };

  // In a ring of kStages. Weights first: they do not depend on the kernel before.
  template <int kStages>
  static __device__ __forceinline__ void run(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                             uint64_t* full, uint64_t* empty, const Share& share) {
    Weights weights(p, share.begin);
    const int first = min(kStages, share.count);
    for (int i = 0; i < first; ++i, weights.next()) weights.ask(ring + i * kBytes, full + i);
    wait_for_previous();
    Activations x(p, share.begin);
    for (int i = 0; i < first; ++i, x.next()) x.ask(map, ring + i * kBytes, full + i);
    for (int i = kStages, slot = 0, parity = 0; i < share.count; ++i, weights.next(), x.next()) {
      wait(empty + slot, parity);
      weights.ask(ring + slot * kBytes, full + slot);
      x.ask(map, ring + slot * kBytes, full + slot);
      advance<kStages>(slot, parity);
    }
  }

  // The same by two or three threads, each of a warp of its own: where stages are short, one cannot ask for all of
  // them in time. A barrier waits for the arrival of the one that asks for words, which names the bytes of all, so the
  // others may be ahead.
  template <int kStages, bool kWordsToo = true, bool kScalesToo = true>
  static __device__ __forceinline__ void run_weights(const Int4Arguments& p, uint8_t* ring, uint64_t* full,
                                                     uint64_t* empty, const Share& share) {
    Weights weights(p, share.begin);
    for (int i = 0, slot = 0, parity = 1; i < share.count; ++i, weights.next()) {
      wait(empty + slot, parity);  // does not wait in the first turn
      weights.template ask<kWordsToo, kScalesToo>(ring + slot * kBytes, full + slot);
      advance<kStages>(slot, parity);
    }
  }
  template <int kStages>
  static __device__ __forceinline__ void run_activations(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                                         uint64_t* full, uint64_t* empty, const Share& share) {
    prefetch(map);
    Activations x(p, share.begin);
    if (p.mates > 1) cluster_wait_alone();  // the mate's barriers are ready
    wait_for_previous();
    const int mask = 1 << share.rank | 1 << (share.rank + p.sharers);
    for (int i = 0, slot = 0, parity = 1; i < share.count; ++i, x.next()) {
      wait(empty + slot, parity);
      if (p.mates > 1) x.ask_for_both(map, ring + slot * kBytes, full + slot, share.mate, mask);
      else x.ask(map, ring + slot * kBytes, full + slot);
      advance<kStages>(slot, parity);
    }
  }
};

// Sums of a strip that is shared by the blocks of a cluster: each block adds up a part of them, in the blocks' order.
template <int kThreads, int kVectors>
struct ClusterSum {
  static constexpr int kItems = kThreads * kVectors;

  // Items of a block; the last one may have fewer.
  static __device__ __forceinline__ int each_of(const Int4Arguments& p) { return (kItems + p.sharers - 1) / p.sharers; }
  static __device__ __forceinline__ int mine_of(const Int4Arguments& p, int rank) {
    return min(each_of(p), kItems - rank * each_of(p));
  }

  // By one thread, before `barriers_ready`.
  static __device__ __forceinline__ void prepare(const Int4Arguments& p, int rank, uint64_t* arrived) {
    barrier_init(arrived, 1);
    arrive_expecting(arrived, mine_of(p, rank) * p.sharers * 16);
  }

  // Hands sums to `use(thread, vector, sum)`. `parts`: shared memory for kItems float4, and one more a block.
  template <class Use>
  static __device__ __forceinline__ void run(const Int4Arguments& p, const Share& share, float4* parts,
                                             uint64_t* arrived, const float (&sum)[4 * kVectors], Use use) {
    const int rank = share.rank, each = each_of(p), mine = mine_of(p, rank), first = share.mate * p.sharers;
    static_assert(kItems < 1 << 15);
    const uint32_t inverse = 0xffffffff / each + 1;  // exact for all items: their product with its error is below 2^32
    cluster_wait();                                  // all blocks have begun
    if (p.mates > 1) cluster_arrive_again();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int item = i * kThreads + threadIdx.x, owner = __umulhi(item, inverse);
      const uint32_t to = shared_address(parts + rank * each + item - owner * each);
      push(address_in(to, first + owner), sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3],
           address_in(shared_address(arrived), first + owner));
    }
    wait_for_previous();
    wait(arrived, 0);
    for (int item = threadIdx.x; item < mine; item += kThreads) {
      float4 all = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int i = 0; i < p.sharers; ++i) add(all, parts[i * each + item]);
      use((rank * each + item) % kThreads, (rank * each + item) / kThreads, all);
    }
    if (p.mates > 1) cluster_wait();  // until then a mate may still release slots here
  }
};

// What every block begins with: the barriers of its ring, and of its cluster's sums, which are ready then.
template <int kStages, int kThreads, class Sum>
__device__ __forceinline__ void begin_block(const Int4Arguments& p, const Share& share, uint64_t* full, uint64_t* empty,
                                            uint64_t* sums_arrived) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      barrier_init(full + i, 1), barrier_init(empty + i, p.mates * arrivals(p, kThreads));
    if (p.sharers > 0) Sum::prepare(p, share.rank, sums_arrived);
    barriers_ready();
  }
  __syncthreads();
  if (p.sharers > 0) cluster_arrive();
  let_next_begin();
}

// Blocks of that many tokens have kTiles × kGroups × 64 outputs. The largest ones have no clusters to add up sums, for
// which there would be no room. A multiprocessor has room for two of the smallest, so that the next kernel's weights
// arrive while this one multiplies.
template <int kTokens, int kGroups, int kTiles>
struct ShapeOf {
  static constexpr int kOutputs = kGroups * kTiles * 64;
  static constexpr int kBlocks = kTokens <= 64 && kOutputs == 128 ? 2 : 1;  // of a multiprocessor
  // Registers of a thread that multiplies, and of one that fetches.
  static constexpr int kMultiply = kBlocks == 2 ? 104 : kGroups == 4 ? 112 : 232;
  static constexpr int kFetch = kBlocks == 2 || kGroups == 4 ? 24 : 40;
  using Stage = Fetch<kTokens, kGroups * kTiles>;
  static constexpr int kSumBytes = kOutputs * kTokens <= 128 * 128 ? kOutputs * kTokens * 4 + 128 : 0;
  static constexpr int kStages = std::min(12, (224 / kBlocks * 1024 - kSumBytes) / Stage::kBytes);
  static constexpr int kBytes = kStages * Stage::kBytes + kSumBytes;
};

// kGroups warpgroups multiply kTiles × 64 outputs each; a thread of up to three warps of one more fetches.
template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(kGroups * 128 + 128, ShapeOf<kTokens, kGroups, kTiles>::kBlocks)
    int4_narrow_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  using Shape = ShapeOf<kTokens, kGroups, kTiles>;
  using Stage = typename Shape::Stage;
  constexpr int kThreads = kGroups * 128, kVectors = kTiles * kTokens / 8;
  constexpr int kStages = Shape::kStages, kPair = kZeros ? 4 : 2;
  constexpr int kStrip = kGroups * kTiles;
  static_assert(kStrip <= 4, "as they are packed");
  __shared__ uint64_t full[2 * kStages];
  uint64_t* empty = full + kStages;
  using Sum = ClusterSum<kThreads, kVectors>;
  __shared__ uint64_t arrived;
  __shared__ int is_last[2];
  const Share share(p);
  begin_block<kStages, kThreads, Sum>(p, share, full, empty, &arrived);
  if (threadIdx.x >= kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kFetch));
    const int fetcher = (threadIdx.x - kThreads) / 32;
    if (fetcher >= p.fetchers || !elect()) return;
    if (p.fetchers == 1) Stage::template run<kStages>(p, &map, ring, full, empty, share);
    else if (fetcher == 1) Stage::template run_activations<kStages>(p, &map, ring, full, empty, share);
    else if (p.fetchers == 2) Stage::template run_weights<kStages>(p, ring, full, empty, share);
    else if (fetcher == 0) Stage::template run_weights<kStages, true, false>(p, ring, full, empty, share);
    else Stage::template run_weights<kStages, false, true>(p, ring, full, empty, share);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kMultiply));
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float sum[kTiles][kTokens / 2];
  float (&all)[kVectors * 4] = *reinterpret_cast<float (*)[kVectors * 4]>(&sum);
  // Addresses that stay in registers: the compiler would make them anew at every stage.
  const uint32_t my_barrier = keep(shared_address(full));
  const uint32_t mate_barrier =
      p.mates > 1 ? address_in(my_barrier, share.rank + (1 - share.mate) * p.sharers) : my_barrier;
  const uint32_t my_words = keep(shared_address(ring)) + Stage::kWords + group * kTiles * 2048 + warp * 512 + lane * 16;
  const uint32_t my_scales =
      keep(shared_address(ring)) + Stage::kScales + (group * kTiles * 64 + warp * 16 + lane / 4 * 2) * kPair;
  int unit = share.begin / p.depth, tile0 = 0, token = 0, slot = 0, parity = 0;
  for (int left = share.count, depth = share.begin - unit * p.depth; left > 0; depth = 0, ++unit) {
    const int here = min(p.depth - depth, left);
    left -= here;
    tile0 = unit / p.token_blocks * (kGroups * kTiles), token = unit % p.token_blocks * kTokens;
#pragma unroll
    for (int j = 0; j < kVectors * 4; ++j) all[j] = 0;
    const int second = min(kStrip, p.tiles64 - tile0) * 64 * kPair;
    multiply_strip<T, Shape, kTokens, kTiles, kHalfGroups, kZeros, kMixed, true>(
        p, sum, here, ring, my_barrier, mate_barrier, my_words, my_scales, second, lane, slot, parity);
    if (p.sharers != 0) break;
    if (join<kThreads, kVectors>(p, unit, all, is_last))
      write_strip<T, kTokens>(p, sum, tile0 * 64 + group * kTiles * 64 + warp * 16 + lane / 4 * 2,
                              token + lane % 4 * 2);
  }
  if (p.sharers == 0) return;
  if (p.sharers > 1) {
    auto* parts = reinterpret_cast<float4*>(ring + kStages * Stage::kBytes);
    write_cluster<T, kTokens, kTiles, Sum>(p, all, tile0, token, share, parts, &arrived);
    return;
  }
  cluster_wait();  // all blocks have begun
  cluster_arrive_again();
  wait_for_previous();
  write_strip<T, kTokens>(p, sum, tile0 * 64 + group * kTiles * 64 + warp * 16 + lane / 4 * 2, token + lane % 4 * 2);
  cluster_wait();  // until then a mate may still release slots here
}

template <class T, int kTokens, bool kHalfGroups, bool kZeros, bool kMixed>
void narrow(const Call& c) {
  static std::atomic<uint64_t> ready{0};  // devices that know of the shared memory it needs
  launch(int4_narrow_sm90<T, kTokens, 2, 1, kHalfGroups, kZeros, kMixed>, ready, ShapeOf<kTokens, 2, 1>::kBytes,
         2 * 128 + 128, c);
}

template <class T, bool kHalfGroups, bool kZeros, bool kMixed>
void narrow(const Call& c) {
  switch (c.part.tokens) {
    case 32:
      return narrow<T, 32, kHalfGroups, kZeros, kMixed>(c);
    case 64:
      return narrow<T, 64, kHalfGroups, kZeros, kMixed>(c);
    default:
      return narrow<T, 128, kHalfGroups, kZeros, kMixed>(c);
  }
}

template <class T, bool kMixed>
void narrow(const Call& c) {
  if (c.p.stages_per_group == 0)
    c.p.scale_bytes == 4 ? narrow<T, true, true, kMixed>(c) : narrow<T, true, false, kMixed>(c);
  else c.p.scale_bytes == 4 ? narrow<T, false, true, kMixed>(c) : narrow<T, false, false, kMixed>(c);
}

}  // namespace
}  // namespace ktinject::cuda::int4::narrow

namespace ktinject::cuda::int4 {

void run_narrow_sm90(const Call& c, bool fp16) {
  if (fp16) c.p.fp16_scales ? narrow::narrow<__half, false>(c) : narrow::narrow<__half, true>(c);
  else c.p.fp16_scales ? narrow::narrow<__nv_bfloat16, true>(c) : narrow::narrow<__nv_bfloat16, false>(c);
}

}  // namespace ktinject::cuda::int4
