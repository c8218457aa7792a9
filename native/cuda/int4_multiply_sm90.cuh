// What the kernels for many tokens share: wgmma with weights from registers and activations from shared memory.
//
// The sums of wgmma stay in flight, so the weights are scaled before. Each value is rounded once to the activations'
// type. That changes nothing for scales that ktinject has chosen itself (operators/linears/int4_layout.py).
#pragma once

#include "cuda/int4_sm90.cuh"

namespace ktinject::cuda::int4 {

// A word's codes, scaled, as the A operand. kMixed: the scales are of the other 16-bit type, and the product is fp32.
template <class T, bool kMixed>
__device__ __forceinline__ void to_scaled_operand(uint32_t* a, uint32_t word, const uint32_t (&zeros)[2],
                                                  uint32_t both) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t steps = Float16<T>::add(codes<T>(word, 4 * i), zeros[i & 1]);
    if constexpr (kMixed) {
      const auto pair = *reinterpret_cast<const typename Float16<T>::Pair*>(&steps);
      const float scale = scale_of(i & 1 ? both >> 16 : both & 0xffff, std::is_same_v<T, __nv_bfloat16>);
      const auto product = Float16<T>::pair(static_cast<float>(pair.x) * scale, static_cast<float>(pair.y) * scale);
      a[i] = *reinterpret_cast<const uint32_t*>(&product);
    } else {
      a[i] = Float16<T>::scaled(steps, __byte_perm(both, 0, i & 1 ? 0x3232 : 0x1010));
    }
  }
}

// Adds up `count` stages of one strip: a warpgroup's kTiles × 64 outputs. my_…: addresses in shared memory, this
// lane's. `second`: where the stage's second group begins.
template <class T, class Shape, int kTokens, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
__device__ __forceinline__ void multiply_strip(const Int4Arguments& p, float (&sum)[kTiles][kTokens / 2], int count,
                                               const uint8_t* ring, uint32_t my_barrier, uint32_t my_words,
                                               uint32_t my_scales, int second, int lane, int& slot, int& parity) {
  using Stage = typename Shape::Stage;
  constexpr int kStages = Shape::kStages, kPair = kZeros ? 4 : 2;
  uint4 words;                    // of the tile that is converted
  uint32_t zeros[2][2], both[2];  // of both halves of its stage
  uint32_t a[2][16];              // the operand that is multiplied, and the next one
  int held = -1;                  // the slot before, whose activations may still be read
  auto take = [&](int tile) {
    const uint32_t scales = my_scales + slot * Stage::kBytes + tile * 64 * kPair;
    words = load_shared<uint4>(my_words + slot * Stage::kBytes + tile * 2048);
    both[0] = both[1] = read_pair<T, kZeros>(zeros[0], scales);
    if constexpr (kHalfGroups) both[1] = read_pair<T, kZeros>(zeros[1], scales + second);
  };
  auto convert = [&](uint32_t (&to)[16], int j) {
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
    to_scaled_operand<T, kMixed>(to + 4 * j, each[j], zeros[kHalfGroups ? j / 2 : 0], both[j / 2]);
  };
  auto release = [&](int used) {
    if (used < 0 || (lane & p.silent) != 0) return;
    arrive(my_barrier + (kStages + used) * 8);
  };
  // sums += now · activations, while the codes of `tile` become `next`. `turns`: it is of the next stage.
  auto multiply = [&](float (&sums)[kTokens / 2], const uint32_t (&now)[16], uint32_t (&next)[16], int tile,
                      bool turns) {
    const uint64_t b = descriptor(ring + slot * Stage::kBytes);
    const int before = held;
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wgmma<T, kTokens>(sums, now + 4 * j, b + 2 * j);
      wgmma_commit();
      if (j == 0) {
        if (turns) {
          held = slot;
          advance<kStages, Shape::kSets>(slot, parity);
          wait(my_barrier + slot * 8, parity);
        }
        take(tile);
      }
      wgmma_wait<4>();  // the product that read what is written now
      convert(next, j);
    }
    if (kTiles == 1 || !turns) release(before);
  };
  wait(my_barrier + slot * 8, parity);
  take(0);
#pragma unroll
  for (int j = 0; j < 4; ++j) convert(a[0], j);
  auto last = [&](float (&sums)[kTokens / 2], const uint32_t (&now)[16]) {
    const uint64_t b = descriptor(ring + slot * Stage::kBytes);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma<T, kTokens>(sums, now + 4 * j, b + 2 * j);
    wgmma_commit();
    wgmma_wait<0>();
    if (kTiles == 1) release(held);
    release(slot);
    advance<kStages, Shape::kSets>(slot, parity);
  };
  int rest = count - 1;
  if constexpr (kTiles == 1) {
    for (; rest >= 2; rest -= 2) {
      multiply(sum[0], a[0], a[1], 0, true);
      multiply(sum[0], a[1], a[0], 0, true);
    }
    if (rest > 0) {
      multiply(sum[0], a[0], a[1], 0, true);
      last(sum[0], a[1]);
    } else {
      last(sum[0], a[0]);
    }
  } else {
    for (; rest > 0; --rest) {
      multiply(sum[0], a[0], a[1], 1, false);
      multiply(sum[1], a[1], a[0], 0, true);
    }
    multiply(sum[0], a[0], a[1], 1, false);
    last(sum[1], a[1]);
  }
}

// Writes the sums of a strip that is wholly this block's. `output`: the first of this lane's.
template <class T, int kTokens, int kTiles>
__device__ __forceinline__ void write_strip(const Int4Arguments& p, const float (&sum)[kTiles][kTokens / 2], int output,
                                            int token) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const float bias0 = bias_of(p, output + t * 64), bias1 = bias_of(p, output + t * 64 + 1);
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) write<T>(p, sum[t] + 4 * j, output + t * 64, token + j * 8, bias0, bias1);
  }
}

// Writes the sums of a strip that is a cluster's: a part of them a block. `run`: what Sum wants besides.
template <class T, int kTokens, int kTiles, class Sum, class... Run>
__device__ __forceinline__ void write_cluster(const Int4Arguments& p, const float (&sum)[kTiles * kTokens / 2],
                                              int tile0, int token, const Run&... run) {
  Sum::run(p, run..., sum, [&](int thread, int vector, const float4& whole) {
    const int tile = thread / 128 * kTiles + vector / (kTokens / 8);
    const int output = (tile0 + tile) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4 * 2;
    const float each[4] = {whole.x, whole.y, whole.z, whole.w};
    write<T>(p, each, output, token + vector % (kTokens / 8) * 8 + thread % 4 * 2, bias_of(p, output),
             bias_of(p, output + 1));
  });
}

// A block that has a share of the line of stages, or that is one of a cluster. Shape: kGroups warpgroups multiply
// kTiles × 64 outputs each with kTokens tokens, and those of one more `fetch`.
template <class T, class Shape, bool kHalfGroups, bool kZeros, bool kMixed>
__device__ __forceinline__ void run_block(const Int4Arguments& p, const CUtensorMap* map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  using Stage = typename Shape::Stage;
  constexpr int kTokens = Shape::kTokens, kGroups = Shape::kGroups, kTiles = Shape::kTiles;
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
    Shape::fetch(p, map, ring, full, empty, share, (threadIdx.x - kThreads) / 32);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kMultiply));
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float sum[kTiles][kTokens / 2];
  float (&all)[kVectors * 4] = *reinterpret_cast<float (*)[kVectors * 4]>(&sum);
  // Addresses that stay in registers: the compiler would make them anew at every stage.
  const uint32_t my_barrier = keep(shared_address(full));
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
    multiply_strip<T, Shape, kTokens, kTiles, kHalfGroups, kZeros, kMixed>(p, sum, here, ring, my_barrier, my_words,
                                                                           my_scales, second, lane, slot, parity);
    if (p.sharers != 0) break;
    if (join<kThreads, kVectors>(p, unit, all, is_last))
      write_strip<T, kTokens>(p, sum, tile0 * 64 + group * kTiles * 64 + warp * 16 + lane / 4 * 2,
                              token + lane % 4 * 2);
  }
  if (p.sharers == 0) return;
  auto* parts = reinterpret_cast<float4*>(ring + kStages * Stage::kBytes);
  write_cluster<T, kTokens, kTiles, Sum>(p, all, tile0, token, share, parts, &arrived);
}

// Calls `run<T, kHalfGroups, kZeros, kMixed>` for the kind of a product's weights and activations.
template <class Run>
void for_kind(const Call& c, bool fp16, Run run) {
  auto of_scales = [&]<class T, bool kMixed>() {
    if (c.p.stages_per_group == 0)
      c.p.scale_bytes == 4 ? run.template operator()<T, true, true, kMixed>()
                           : run.template operator()<T, true, false, kMixed>();
    else
      c.p.scale_bytes == 4 ? run.template operator()<T, false, true, kMixed>()
                           : run.template operator()<T, false, false, kMixed>();
  };
  if (fp16)
    c.p.fp16_scales ? of_scales.template operator()<__half, false>() : of_scales.template operator()<__half, true>();
  else
    c.p.fp16_scales ? of_scales.template operator()<__nv_bfloat16, true>()
                    : of_scales.template operator()<__nv_bfloat16, false>();
}

}  // namespace ktinject::cuda::int4
