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
// lane's. `second`: where the stage's second group begins. kMates: there may be a mate, and it waits for slots, too.
template <class T, class Shape, int kTokens, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed, bool kMates>
__device__ __forceinline__ void multiply_strip(const Int4Arguments& p, float (&sum)[kTiles][kTokens / 2], int count,
                                               const uint8_t* ring, uint32_t my_barrier, uint32_t mate_barrier,
                                               uint32_t my_words, uint32_t my_scales, int second, int lane, int& slot,
                                               int& parity) {
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
    if constexpr (kMates) {
      if (p.mates > 1) arrive_there(mate_barrier + (kStages + used) * 8);
    }
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
          advance<kStages>(slot, parity);
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
    advance<kStages>(slot, parity);
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

}  // namespace ktinject::cuda::int4
