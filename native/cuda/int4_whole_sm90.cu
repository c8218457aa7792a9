// 17 to 512 tokens, in blocks of 64, 128 or 192 outputs whose sums are whole: nothing is added up between blocks.
//
// Up to 128 tokens a block, converting the weights of a stage takes a warpgroup longer than multiplying them. So where
// there is room, several sets of warpgroups take turns at the stages, and add up their sums in shared memory at the
// end.
#include <algorithm>
#include <iterator>
#include <utility>

#include "cuda/int4_multiply_sm90.cuh"

namespace ktinject::cuda::int4::whole {
namespace {

// Blocks of kTokens and kGroups × 64 outputs. A warpgroup multiplies 64 outputs; kSets × kGroups of them take turns.
template <int kTokens, int kGroups, int kSets_>
struct ShapeOf {
  static constexpr int kSets = kSets_, kWarpgroups = kSets * kGroups;
  static constexpr int kThreads = kWarpgroups * 128, kVectors = kTokens / 8;
  // A stage: activations [kTokens][64]; words of kGroups × 64 outputs; their scales of up to two groups.
  struct Stage {
    static constexpr int kWords = kTokens * 128;
    static constexpr int kScales = kWords + kGroups * 2048;
    static constexpr int kSecond = kGroups * 256;  // room for a group of 4-byte scales
    static constexpr int kBytes = (kScales + 2 * kSecond + 1023) / 1024 * 1024;
  };
  static_assert(Stage::kWords % 1024 == 0, "activations are swizzled");
  static constexpr int kStages = std::min(16, 224 * 1024 / Stage::kBytes) / kSets * kSets;
  static constexpr int kBytes = kStages * Stage::kBytes;
  // When all stages are done, the ring has sums that sets hand to each other.
  static_assert(kVectors * (kSets - 1) * kGroups * 128 * 16 <= kBytes);
  // Registers of a thread that multiplies, and of one that fetches.
  static constexpr int kMultiply = kWarpgroups == 4 ? 112 : kWarpgroups == 3 ? 160 : 232;
  static constexpr int kFetch = kWarpgroups == 4 ? 32 : kWarpgroups == 3 ? 32 : 40;
};

// Asks for the words or the scales of a block's stages. Its tiles may be of two strips, as they are packed.
template <class Shape, int kGroups>
struct Fetch {
  using Stage = typename Shape::Stage;
  const Int4Arguments& p;
  int tiles, first;        // of the block, and of these, those of its first strip
  int widths[2];           // tiles of both strips
  const uint8_t* from[2];  // where the block's tiles begin in them

  __device__ Fetch(const Int4Arguments& p, int tile, bool words) : p(p) {
    tiles = min(kGroups, p.tiles64 - tile);
    first = min(tiles, 4 - tile % 4);
    widths[0] = strip_width(p, tile);
    from[0] = words ? p.words + words_at(p, tile, 0) : p.scales + scales_at(p, tile, 0);
    widths[1] = 0, from[1] = from[0];
    if (first == tiles) return;
    widths[1] = strip_width(p, tile + first);
    from[1] = words ? p.words + words_at(p, tile + first, 0) : p.scales + scales_at(p, tile + first, 0);
  }
  __device__ int bytes() const {  // of a stage, with activations
    return tiles * (2048 + (p.stages_per_group == 0 ? 2 : 1) * 64 * p.scale_bytes) + Stage::kWords;
  }
  // `each`: bytes of a tile.
  __device__ __forceinline__ void ask(uint8_t* to, int each, uint64_t* full, uint64_t policy) const {
    copy(to, from[0], first * each, full, policy);
    if (kGroups > 1 && first < tiles) copy(to + first * each, from[1], (tiles - first) * each, full, policy);
  }
  __device__ __forceinline__ void next(int each) {
    from[0] += widths[0] * each;
    from[1] += widths[1] * each;
  }

  static __device__ __forceinline__ void run_words(const Int4Arguments& p, uint8_t* ring, uint64_t* full,
                                                   uint64_t* empty, int tile) {
    Fetch words(p, tile, true);
    const uint64_t policy = p.token_blocks == 1 ? kOnce : kNormal;
    const int bytes = words.bytes();
    for (int i = 0, slot = 0, parity = 1; i < p.depth; ++i, words.next(2048)) {
      wait(empty + slot, parity);  // does not wait in the first turn
      arrive_expecting(full + slot, bytes);
      words.ask(ring + slot * Stage::kBytes + Stage::kWords, 2048, full + slot, policy);
      advance<Shape::kStages>(slot, parity);
    }
  }
  static __device__ __forceinline__ void run_scales(const Int4Arguments& p, uint8_t* ring, uint64_t* full,
                                                    uint64_t* empty, int tile) {
    Fetch scales(p, tile, false);
    const int each = 64 * p.scale_bytes, stages = p.stages_per_group;
    for (int i = 0, slot = 0, parity = 1, left = stages; i < p.depth; ++i) {
      wait(empty + slot, parity);
      uint8_t* const to = ring + slot * Stage::kBytes + Stage::kScales;
      scales.ask(to, each, full + slot, kNormal);
      if (stages == 0) {
        scales.next(each);
        scales.ask(to + Stage::kSecond, each, full + slot, kNormal);
      }
      if (--left <= 0) scales.next(each), left = stages;
      advance<Shape::kStages>(slot, parity);
    }
  }
  static __device__ __forceinline__ void run_activations(const CUtensorMap* map, uint8_t* ring, uint64_t* full,
                                                         uint64_t* empty, int depth, int token) {
    prefetch(map);
    wait_for_previous();
    for (int i = 0, slot = 0, parity = 1; i < depth; ++i) {
      wait(empty + slot, parity);
      copy_tile(ring + slot * Stage::kBytes, map, i * 64, token, full + slot);
      advance<Shape::kStages>(slot, parity);
    }
  }
};

template <class T, int kTokens, int kGroups, int kSets, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(ShapeOf<kTokens, kGroups, kSets>::kThreads + 128, 1)
    int4_whole_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  using Shape = ShapeOf<kTokens, kGroups, kSets>;
  using Stage = typename Shape::Stage;
  constexpr int kStages = Shape::kStages, kThreads = Shape::kThreads, kVectors = Shape::kVectors;
  constexpr int kPair = kZeros ? 4 : 2;
  __shared__ uint64_t full[2 * kStages];
  uint64_t* empty = full + kStages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, arrivals(p, kGroups * 128));
    barriers_ready();
  }
  __syncthreads();
  let_next_begin();
  const int tile0 = blockIdx.x / p.token_blocks * kGroups, token = blockIdx.x % p.token_blocks * kTokens;
  if (threadIdx.x >= kThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Shape::kFetch));
    const int fetcher = (threadIdx.x - kThreads) / 32;
    if (fetcher == 3 || !elect()) return;
    if (fetcher == 0) Fetch<Shape, kGroups>::run_words(p, ring, full, empty, tile0);
    else if (fetcher == 1) Fetch<Shape, kGroups>::run_activations(&map, ring, full, empty, p.depth, token);
    else Fetch<Shape, kGroups>::run_scales(p, ring, full, empty, tile0);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Shape::kMultiply));
  // Of the first lane, so that the compiler knows it to be the same for all: else it has wgmma wait for each other.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0), group = warpgroup % kGroups,
            set = warpgroup / kGroups;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t my_barrier = keep(shared_address(full));
  const uint32_t my_words = keep(shared_address(ring)) + Stage::kWords + group * 2048 + warp * 512 + lane * 16;
  const uint32_t my_scales =
      keep(shared_address(ring)) + Stage::kScales + (group * 64 + warp * 16 + lane / 4 * 2) * kPair;
  float sum[1][kTokens / 2];
#pragma unroll
  for (int j = 0; j < kTokens / 2; ++j) sum[0][j] = 0;
  int slot = set, parity = 0;
  const int count = (p.depth - set + kSets - 1) / kSets;  // one at least: int4_blocks.cpp sees to it
  multiply_strip<T, Shape, kTokens, 1, kHalfGroups, kZeros, kMixed>(p, sum, count, ring, my_barrier, my_words,
                                                                    my_scales, Stage::kSecond, lane, slot, parity);
  if constexpr (kSets > 1) {
    // Set `s` adds up the vectors v with v % kSets == s.
    constexpr int kItems = kGroups * 128;
    float4* const parts = reinterpret_cast<float4*>(ring) + group * 128 + threadIdx.x % 128;
    sync_consumers<kThreads>();  // nobody reads stages any more
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float* s = sum[0] + 4 * v;
      const int from = (set - v % kSets + kSets) % kSets;
      if (from != 0) parts[(v * (kSets - 1) + from - 1) * kItems] = make_float4(s[0], s[1], s[2], s[3]);
    }
    sync_consumers<kThreads>();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v % kSets != set) continue;
      float* s = sum[0] + 4 * v;
#pragma unroll
      for (int i = 0; i < kSets - 1; ++i) {
        const float4 other = parts[(v * (kSets - 1) + i) * kItems];
        s[0] += other.x, s[1] += other.y, s[2] += other.z, s[3] += other.w;
      }
    }
  }
  wait_for_previous();
  const int output = (tile0 + group) * 64 + warp * 16 + lane / 4 * 2, at = token + lane % 4 * 2;
  const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (kSets == 1 || v % kSets == set) write<T>(p, sum[0] + 4 * v, output, at + v * 8, bias0, bias1);
}

template <class T, int kTokens, int kGroups, int kSets, bool kHalfGroups, bool kZeros, bool kMixed>
void whole(const Call& c) {
  static SharedMemory shared;
  using Shape = ShapeOf<kTokens, kGroups, kSets>;
  launch(int4_whole_sm90<T, kTokens, kGroups, kSets, kHalfGroups, kZeros, kMixed>, shared, Shape::kBytes,
         Shape::kThreads + 128, c);
}

template <class T, bool kHalfGroups, bool kZeros, bool kMixed, size_t... kEach>
void one_of(const Call& c, std::index_sequence<kEach...>) {
  auto run = [&]<size_t kOne>() {
    constexpr Whole kShape = kWhole[kOne];
    if (c.part.tokens != kShape.tokens || c.part.outputs != kShape.outputs) return false;
    whole<T, kShape.tokens, kShape.outputs / 64, kShape.sets, kHalfGroups, kZeros, kMixed>(c);
    return true;
  };
  if (!(run.template operator()<kEach>() || ...)) throw std::logic_error("int4_linear: there are no such blocks");
}

}  // namespace
}  // namespace ktinject::cuda::int4::whole

namespace ktinject::cuda::int4 {

void run_whole_sm90(const Call& c, bool fp16) {
  for_kind(c, fp16, [&]<class T, bool kHalfGroups, bool kZeros, bool kMixed>() {
    whole::one_of<T, kHalfGroups, kZeros, kMixed>(c, std::make_index_sequence<std::size(kWhole)>());
  });
}

}  // namespace ktinject::cuda::int4
