// Many tokens: wgmma, weights from registers, activations from shared memory.
//
// wgmma's sums stay in flight, so scales go to the weights before: each value is rounded once to the activations' type,
// which changes nothing for the scales that ktinject chooses itself (operators/int4_layout.py).
#include "cuda/int4_sm90.cuh"

namespace ktinject::int4 {
namespace {

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

// Of kTiles × kGroups × 64 outputs a block.
template <int kTokens, int kGroups, int kTiles>
constexpr int kManyStages = [] {
  const int fit = (224 * 1024 - (kTokens == 64 ? kGroups * kTiles * 64 * kTokens * 4 : 0)) /
                  Fetch<kTokens, kGroups * kTiles>::kBytes;
  return fit < 12 ? fit : 12;
}();

// kGroups warpgroups multiply kTiles × 64 outputs each; one more fetches.
template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(kGroups * 128 + 128, 1)
    int4_many_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  constexpr int kThreads = kGroups * 128, kVectors = kTiles * kTokens / 8;
  constexpr int kStages = kManyStages<kTokens, kGroups, kTiles>, kPair = kZeros ? 4 : 2;
  constexpr int kStrip = kGroups * kTiles < 4 ? kGroups * kTiles : 4;
  using Stage = Fetch<kTokens, kGroups * kTiles>;
  __shared__ uint64_t full[kStages], empty[kStages];
  using Sum = ClusterSum<kThreads, kVectors>;
  __shared__ uint64_t arrived;
  __shared__ int is_last;
  const Share share(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kThreads / 32);
    if (p.sharers > 0) Sum::prepare(&arrived);
    barriers_ready();
  }
  __syncthreads();
  if (p.sharers > 0) cluster_arrive();
  let_next_begin();
  if (threadIdx.x >= kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGroups == 4 ? 24 : 40));
    if (threadIdx.x < kThreads + 32 && elect()) Stage::template run<kStages>(p, &map, ring, full, empty, share);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups == 4 ? 112 : 232));
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  float sum[kTiles][kTokens / 2];
  float (&all)[kVectors * 4] = *reinterpret_cast<float (*)[kVectors * 4]>(&sum);
  int unit = share.begin / p.depth, tile0 = 0, token = 0;
  for (int i = 0, slot = 0, parity = 0, depth = share.begin - unit * p.depth; i < share.count; depth = 0, ++unit) {
    const int stop = i + min(p.depth - depth, share.count - i);
    tile0 = unit / p.token_blocks * (kGroups * kTiles), token = unit % p.token_blocks * kTokens;
#pragma unroll
    for (int j = 0; j < kVectors * 4; ++j) all[j] = 0;
    // The products of two tiles are in flight, of one stage or of two. No jumps and nothing but products touch the sums
    // in here: the compiler would wait for every product (WARPGROUP.DEPBAR between HGMMA in the assembly shows it).
    int held[2] = {-1, -1};  // slots whose activations may still be read
    auto multiply = [&](float (&d)[kTokens / 2], uint32_t (&a)[16], int t, int done) {
      const uint8_t* stage = ring + slot * Stage::kBytes;
      const int tile = group * kTiles + t;
      const uint8_t* scales =
          stage + Stage::kScales + tile / 4 * Stage::kScaleBytes + (tile % 4 * 64 + warp * 16) * kPair;
      const uint4 words = *reinterpret_cast<const uint4*>(stage + Stage::kWords + tile * 2048 + warp * 512 + lane * 16);
      uint32_t zeros[2][2], both[2];  // of both halves of the stage
      both[0] = both[1] = read_pair<T, kZeros>(zeros[0], scales, lane / 4);
      if constexpr (kHalfGroups) {
        const int width = min(kStrip, p.tiles64 - tile0 - tile / 4 * 4);
        both[1] = read_pair<T, kZeros>(zeros[1], scales + width * 64 * kPair, lane / 4);
      }
      wgmma_wait<1>();  // the product before the last has read its registers
      if (done >= 0 && lane == 0) arrive(empty + done);
      const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        to_scaled_operand<T, kMixed>(a + 4 * j, each[j], zeros[kHalfGroups ? j / 2 : 0], both[j / 2]);
      const uint64_t b = descriptor(stage);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) wgmma<T, kTokens>(d, a + 4 * j, b + 2 * j);
      wgmma_commit();
    };
    uint32_t a[2][16];
    auto next = [&](int& now_held) {
      now_held = slot;
      ++i;
      if (++slot == kStages) slot = 0, parity ^= 1;
    };
    if constexpr (kTiles == 1) {
      while (i + 1 < stop) {
        wait(full + slot, parity);
        multiply(sum[0], a[0], 0, held[0]);
        next(held[0]);
        wait(full + slot, parity);
        multiply(sum[0], a[1], 0, held[1]);
        next(held[1]);
      }
      if (i < stop) {
        wait(full + slot, parity);
        multiply(sum[0], a[0], 0, held[0]);
        next(held[0]);
      }
    } else {
      for (; i < stop; next(held[0])) {
        wait(full + slot, parity);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) multiply(sum[t], a[t & 1], t, t == 1 ? held[0] : -1);
      }
    }
    wgmma_wait<0>();
    if (lane == 0) {
      if (held[0] >= 0) arrive(empty + held[0]);
      if (held[1] >= 0) arrive(empty + held[1]);
    }
    if (p.sharers != 0) break;
    if (join<kThreads, kVectors>(p, unit, all, &is_last)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int output = tile0 * 64 + (group * kTiles + t) * 64 + warp * 16 + lane / 4 * 2;
        const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
        for (int j = 0; j < kTokens / 8; ++j)
          write<T>(p, sum[t] + 4 * j, output, token + j * 8 + lane % 4 * 2, bias0, bias1);
      }
    }
  }
  if (p.sharers == 0) return;
  auto* parts = reinterpret_cast<float4*>(ring + kStages * Stage::kBytes);
  Sum::run(p, parts, &arrived, all, [&](int thread, int vector, const float4& whole) {
    const int tile = thread / 128 * kTiles + vector / (kTokens / 8);
    const int output = (tile0 + tile) * 64 + thread / 32 % 4 * 16 + thread % 32 / 4 * 2;
    const float each[4] = {whole.x, whole.y, whole.z, whole.w};
    write<T>(p, each, output, token + vector % (kTokens / 8) * 8 + thread % 4 * 2, bias_of(p, output),
             bias_of(p, output + 1));
  });
}

template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
void many(const Call& c) {
  static std::atomic<uint64_t> ready{0};  // devices that know of the shared memory it needs
  constexpr int kBytes = kManyStages<kTokens, kGroups, kTiles> * Fetch<kTokens, kGroups * kTiles>::kBytes +
                         (kTokens == 64 ? kGroups * kTiles * 64 * kTokens * 4 : 0);
  launch(int4_many_sm90<T, kTokens, kGroups, kTiles, kHalfGroups, kZeros, kMixed>, ready, kBytes, kGroups * 128 + 128,
         c);
}

template <class T, bool kHalfGroups, bool kZeros, bool kMixed>
void many(const Call& c) {
  c.part.tokens == 64 ? many<T, 64, 4, 1, kHalfGroups, kZeros, kMixed>(c)
                      : many<T, 128, 2, 2, kHalfGroups, kZeros, kMixed>(c);
}

template <class T, bool kMixed>
void many(const Call& c) {
  if (c.p.stages_per_group == 0)
    c.p.scale_bytes == 4 ? many<T, true, true, kMixed>(c) : many<T, true, false, kMixed>(c);
  else c.p.scale_bytes == 4 ? many<T, false, true, kMixed>(c) : many<T, false, false, kMixed>(c);
}

}  // namespace

void run_many_sm90(const Call& c, bool fp16) {
  if (fp16) c.p.fp16_scales ? many<__half, false>(c) : many<__half, true>(c);
  else c.p.fp16_scales ? many<__nv_bfloat16, true>(c) : many<__nv_bfloat16, false>(c);
}

}  // namespace ktinject::int4
