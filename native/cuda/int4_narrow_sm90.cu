// Many tokens, in blocks of 128 outputs, for layers that are too small to fill the GPU with larger ones.
//
// They differ from those of int4_many_sm90.cu in that any number of blocks up to eight may share a strip, in that three
// threads ask for copies, and in that blocks of two strips may fetch activations for each other, from the L2 once. The
// last is chosen by nothing: on an H200 it took longer in 178 of 185 cells, and so little less in the others that no
// rule would hold.
#include <algorithm>

#include "cuda/int4_multiply_sm90.cuh"

namespace ktinject::cuda::int4::narrow {
namespace {

// How the stages of a block are asked for: by three threads, each of a warp of its own, for where stages are short, one
// cannot ask for all of them in time. A barrier waits for the arrival of the one that asks for words, which names the
// bytes of all, so the others may be ahead.
template <int kTokens, int kTiles>
struct Fetch : int4::Fetch<kTokens, kTiles, true> {
  using Base = int4::Fetch<kTokens, kTiles, true>;
  static constexpr int kBytes = Base::kBytes;

  template <int kStages, bool kWordsToo, bool kScalesToo>
  static __device__ __forceinline__ void run_weights(const Int4Arguments& p, uint8_t* ring, uint64_t* full,
                                                     uint64_t* empty, const Share<true>& share) {
    typename Base::Weights weights(p, share.begin);
    for (int i = 0, slot = 0, parity = 1; i < share.count; ++i, weights.next()) {
      wait(empty + slot, parity);  // does not wait in the first turn
      weights.template ask<kWordsToo, kScalesToo>(ring + slot * kBytes, full + slot);
      advance<kStages>(slot, parity);
    }
  }

  template <int kStages>
  static __device__ __forceinline__ void run_activations(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                                         uint64_t* full, uint64_t* empty, const Share<true>& share) {
    prefetch(map);
    int token = share.begin / p.depth % p.token_blocks * kTokens, depth = share.begin % p.depth;
    if (p.mates > 1) cluster_wait_alone();  // the mate's barriers are ready
    wait_for_previous();
    const int mask = 1 << share.rank | 1 << (share.rank + p.sharers), half = share.mate * (kTokens / 2);
    for (int i = 0, slot = 0, parity = 1; i < share.count; ++i) {
      wait(empty + slot, parity);
      uint8_t* const stage = ring + slot * kBytes;
      if (p.mates > 1)  // half of them, for this block and its mate, which fetches the other half
        copy_tile_to(stage + half * 128, map, depth * 64, token + half, full + slot, mask);
      else copy_tile(stage, map, depth * 64, token, full + slot);
      advance<kStages>(slot, parity);
      if (++depth < p.depth) continue;
      depth = 0;
      token += kTokens;
      if (token == p.token_blocks * kTokens) token = 0;
    }
  }
};

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

// kGroups warpgroups multiply kTiles × 64 outputs each; three threads of one more fetch.
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
  using Sum = ClusterSum<kThreads, kVectors, true>;
  __shared__ uint64_t arrived;
  __shared__ int is_last[2];
  const Share<true> share(p);
  begin_block<kStages, kThreads, Sum>(p, share, full, empty, &arrived);
  if (threadIdx.x >= kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kFetch));
    const int fetcher = (threadIdx.x - kThreads) / 32;
    if (fetcher == 3 || !elect()) return;
    if (fetcher == 0) Stage::template run_weights<kStages, true, false>(p, ring, full, empty, share);
    else if (fetcher == 1) Stage::template run_activations<kStages>(p, &map, ring, full, empty, share);
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
