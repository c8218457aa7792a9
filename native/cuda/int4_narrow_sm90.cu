// Many tokens, in blocks of 128 outputs, for layers that are too small to fill the GPU with larger ones.
//
// They differ from those of int4_many_sm90.cu in that any number of blocks up to eight may share a strip, and in that
// three threads ask for copies.
#include <algorithm>

#include "cuda/int4_multiply_sm90.cuh"

namespace ktinject::cuda::int4::narrow {
namespace {

// How the stages of a block are asked for: by three threads, each of a warp of its own, for where stages are short, one
// cannot ask for all of them in time. A barrier waits for the arrival of the one that asks for words, which names the
// bytes of all, so the others may be ahead.
template <int kTokens, int kTiles>
struct Fetch : int4::Fetch<kTokens, kTiles> {
  using Base = int4::Fetch<kTokens, kTiles>;
  static constexpr int kBytes = Base::kBytes;

  template <int kStages, bool kWordsToo, bool kScalesToo>
  static __device__ __forceinline__ void run_weights(const Int4Arguments& p, uint8_t* ring, uint64_t* full,
                                                     uint64_t* empty, const Share& share) {
    typename Base::Weights weights(p, share.begin);
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
    int token = share.begin / p.depth % p.token_blocks * kTokens, depth = share.begin % p.depth;
    wait_for_previous();
    for (int i = 0, slot = 0, parity = 1; i < share.count; ++i) {
      wait(empty + slot, parity);
      copy_tile(ring + slot * kBytes, map, depth * 64, token, full + slot);
      advance<kStages>(slot, parity);
      if (++depth < p.depth) continue;
      depth = 0;
      token += kTokens;
      if (token == p.token_blocks * kTokens) token = 0;
    }
  }
};

// Blocks of that many tokens and of 128 outputs. A multiprocessor has room for two of up to 64 tokens, so that the next
// kernel's weights arrive while this one multiplies.
template <int kTokens_>
struct ShapeOf {
  static constexpr int kTokens = kTokens_, kGroups = 2, kTiles = 1;
  static constexpr int kOutputs = kGroups * kTiles * 64, kSets = 1;
  static constexpr int kBlocks = kTokens <= 64 ? 2 : 1;  // of a multiprocessor
  // Registers of a thread that multiplies, and of one that fetches.
  static constexpr int kMultiply = kBlocks == 2 ? 104 : 232, kFetch = kBlocks == 2 ? 24 : 40;
  using Stage = Fetch<kTokens, kGroups * kTiles>;
  static constexpr int kSumBytes = kOutputs * kTokens * 4 + 128;
  static constexpr int kStages = std::min(12, (224 / kBlocks * 1024 - kSumBytes) / Stage::kBytes);
  static constexpr int kBytes = kStages * Stage::kBytes + kSumBytes;

  static __device__ __forceinline__ void fetch(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                               uint64_t* full, uint64_t* empty, const Share& share, int warp) {
    if (warp == 3 || !elect()) return;
    if (warp == 0) Stage::template run_weights<kStages, true, false>(p, ring, full, empty, share);
    else if (warp == 1) Stage::template run_activations<kStages>(p, map, ring, full, empty, share);
    else Stage::template run_weights<kStages, false, true>(p, ring, full, empty, share);
  }
};

template <class T, int kTokens, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(3 * 128, ShapeOf<kTokens>::kBlocks)
    int4_narrow_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  run_block<T, ShapeOf<kTokens>, kHalfGroups, kZeros, kMixed>(p, &map);
}

template <class T, int kTokens, bool kHalfGroups, bool kZeros, bool kMixed>
void narrow(const Call& c) {
  static SharedMemory shared;
  launch(int4_narrow_sm90<T, kTokens, kHalfGroups, kZeros, kMixed>, shared, ShapeOf<kTokens>::kBytes, 3 * 128, c);
}

}  // namespace
}  // namespace ktinject::cuda::int4::narrow

namespace ktinject::cuda::int4 {

void run_narrow_sm90(const Call& c, bool fp16) {
  for_kind(c, fp16, [&]<class T, bool kHalfGroups, bool kZeros, bool kMixed>() {
    switch (c.part.tokens) {
      case 32:
        return narrow::narrow<T, 32, kHalfGroups, kZeros, kMixed>(c);
      case 64:
        return narrow::narrow<T, 64, kHalfGroups, kZeros, kMixed>(c);
      default:
        return narrow::narrow<T, 128, kHalfGroups, kZeros, kMixed>(c);
    }
  });
}

}  // namespace ktinject::cuda::int4
