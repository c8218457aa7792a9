// Many tokens, in blocks of 256 outputs, or of 128 with 256 tokens. int4_narrow_sm90.cu has smaller ones.
#include <algorithm>

#include "cuda/int4_multiply_sm90.cuh"

namespace ktinject::cuda::int4 {
namespace {

// Blocks of that many tokens have kTiles × kGroups × 64 outputs. Beyond 64 tokens no clusters add up sums.
template <int kTokens, int kGroups, int kTiles>
struct ShapeOf {
  static constexpr int kOutputs = kGroups * kTiles * 64;
  using Stage = Fetch<kTokens, kGroups * kTiles>;
  static constexpr int kSumBytes = kTokens <= 64 ? kOutputs * kTokens * 4 : 0;
  static constexpr int kStages = std::min(12, (224 * 1024 - kSumBytes) / Stage::kBytes);
  static constexpr int kBytes = kStages * Stage::kBytes + kSumBytes;
};

// kGroups warpgroups multiply kTiles × 64 outputs each; one more fetches.
template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(kGroups * 128 + 128, 1)
    int4_many_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  using Shape = ShapeOf<kTokens, kGroups, kTiles>;
  using Stage = typename Shape::Stage;
  constexpr int kThreads = kGroups * 128, kVectors = kTiles * kTokens / 8;
  constexpr int kStages = Shape::kStages, kPair = kZeros ? 4 : 2;
  constexpr int kStrip = kGroups * kTiles;
  static_assert(kStrip <= 4, "as they are packed");
  __shared__ uint64_t full[2 * kStages];
  uint64_t* empty = full + kStages;
  using Sum = ClusterSum<kThreads, kVectors, false>;
  __shared__ uint64_t arrived;
  __shared__ int is_last[2];
  const Share<false> share(p);
  begin_block<kStages, kThreads, Sum>(p, share, full, empty, &arrived);
  if (threadIdx.x >= kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kGroups == 4 ? 24 : 40));
    if (threadIdx.x < kThreads + 32 && elect()) Stage::template run<kStages>(p, &map, ring, full, empty, share);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kGroups == 4 ? 112 : 232));
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
    multiply_strip<T, Shape, kTokens, kTiles, kHalfGroups, kZeros, kMixed, false>(
        p, sum, here, ring, my_barrier, 0, my_words, my_scales, second, lane, slot, parity);
    if (p.sharers != 0) break;
    if (join<kThreads, kVectors>(p, unit, all, is_last))
      write_strip<T, kTokens>(p, sum, tile0 * 64 + group * kTiles * 64 + warp * 16 + lane / 4 * 2,
                              token + lane % 4 * 2);
  }
  if (p.sharers == 0) return;
  auto* parts = reinterpret_cast<float4*>(ring + kStages * Stage::kBytes);
  write_cluster<T, kTokens, kTiles, Sum>(p, all, tile0, token, share, parts, &arrived);
}

template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
void many(const Call& c) {
  static std::atomic<uint64_t> ready{0};  // devices that know of the shared memory it needs
  launch(int4_many_sm90<T, kTokens, kGroups, kTiles, kHalfGroups, kZeros, kMixed>, ready,
         ShapeOf<kTokens, kGroups, kTiles>::kBytes, kGroups * 128 + 128, c);
}

template <class T, bool kHalfGroups, bool kZeros, bool kMixed>
void many(const Call& c) {
  switch (c.part.tokens) {  // outputs are those of `outputs_of`
    case 32:
      return many<T, 32, 4, 1, kHalfGroups, kZeros, kMixed>(c);
    case 64:
      return many<T, 64, 4, 1, kHalfGroups, kZeros, kMixed>(c);
    case 128:
      return many<T, 128, 2, 2, kHalfGroups, kZeros, kMixed>(c);
    default:
      return many<T, 256, 2, 1, kHalfGroups, kZeros, kMixed>(c);
  }
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

}  // namespace ktinject::cuda::int4
