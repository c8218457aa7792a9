// Many tokens, in blocks of 256 outputs, or of 128 with 256 tokens. int4_narrow_sm90.cu has smaller ones.
#include <algorithm>

#include "cuda/int4_multiply_sm90.cuh"

namespace ktinject::cuda::int4 {
namespace {

// Blocks of that many tokens have kTiles × kGroups × 64 outputs. Beyond 64 tokens no clusters add up sums.
template <int kTokens_, int kGroups_, int kTiles_>
struct ShapeOf {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_, kTiles = kTiles_;
  static constexpr int kOutputs = kGroups * kTiles * 64, kSets = 1;
  using Stage = Fetch<kTokens, kGroups * kTiles>;
  static constexpr int kSumBytes = kTokens <= 64 ? kOutputs * kTokens * 4 : 0;
  static constexpr int kStages = std::min(12, (224 * 1024 - kSumBytes) / Stage::kBytes);
  static constexpr int kBytes = kStages * Stage::kBytes + kSumBytes;
  // Registers of a thread that multiplies, and of one that fetches.
  static constexpr int kMultiply = kGroups == 4 ? 112 : 232, kFetch = kGroups == 4 ? 24 : 40;

  static __device__ __forceinline__ void fetch(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                               uint64_t* full, uint64_t* empty, const Share& share, int warp) {
    if (warp == 0 && elect()) Stage::template run<kStages>(p, map, ring, full, empty, share);
  }
};

template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(kGroups * 128 + 128, 1)
    int4_many_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  run_block<T, ShapeOf<kTokens, kGroups, kTiles>, kHalfGroups, kZeros, kMixed>(p, &map);
}

template <class T, int kTokens, int kGroups, int kTiles, bool kHalfGroups, bool kZeros, bool kMixed>
void many(const Call& c) {
  static SharedMemory shared;
  launch(int4_many_sm90<T, kTokens, kGroups, kTiles, kHalfGroups, kZeros, kMixed>, shared,
         ShapeOf<kTokens, kGroups, kTiles>::kBytes, kGroups * 128 + 128, c);
}

}  // namespace

void run_many_sm90(const Call& c, bool fp16) {
  for_kind(c, fp16, [&]<class T, bool kHalfGroups, bool kZeros, bool kMixed>() {
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
  });
}

}  // namespace ktinject::cuda::int4
