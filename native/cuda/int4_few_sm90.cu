// Few tokens: mma.m16n8k16 as on sm_80, sums of a stage scaled in fp32.
//
// Four warps have 64 outputs each. Activations and their sums, which are the same for all outputs, are read and
// computed once for four operands. A warp reads its next stage from shared memory while it multiplies this one.
//
// Codes go to the tensor core as they come out of the words: as base + code, which is exact. The sums of a stage start
// at minus (base + zero point) · Σ x, which is one more product, with constant weights. So a word costs seven
// instructions instead of eleven. The sums become up to 17 times as large as the result (fp16: 129 times), over at most
// 64 inputs. fp32 has room for that.
#include "cuda/int4_sm90.cuh"

namespace ktinject::cuda::int4 {
namespace {

constexpr int kFewTiles = 4;  // of 64 outputs a block
constexpr int kFewWarps = kFewTiles;
constexpr int kFewThreads = 32 * kFewWarps;
constexpr int kOperands = 4;  // of 16 outputs a warp
// Two blocks fill a multiprocessor's shared memory, so a block of the next kernel waits until one of them has ended.
// Otherwise the next kernel's blocks would gather on the multiprocessors where this kernel ends first.
constexpr int kFewStages = 7;

// A pair of 16-bit floats: 1, or minus what a code of 8 becomes.
template <class T>
constexpr uint32_t kOne = std::is_same_v<T, __half> ? 0x3c003c00 : 0x3f803f80;
template <class T>
constexpr uint32_t kMinusEight = std::is_same_v<T, __half> ? 0xe408e408 : 0xc308c308;
template <class T>
constexpr float kBase = std::is_same_v<T, __half> ? 1024 : 128;

// The scales of a lane's two outputs; of the activations' type as a rule.
template <class T>
__device__ __forceinline__ void scales_of(float (&scale)[2], uint32_t both, bool fp16) {
  constexpr bool kUsual = std::is_same_v<T, __half>;
  scale[0] = scale_of(both & 0xffff, kUsual);
  scale[1] = kUsual ? scale_of(both >> 16, true) : __uint_as_float(both & 0xffff0000);
  if (fp16 != kUsual) {
    asm volatile("");  // a jump, and not both
    scale[0] = scale_of(both & 0xffff, !kUsual);
    scale[1] = scale_of(both >> 16, !kUsual);
  }
}

// A stage in registers, but for its scales.
template <int kTokens>
struct Held {
  uint32_t x[kTokens / 8][2][4];  // 8 tokens × 32 inputs each
  uint4 words[kOperands];
  int slot;
};

// Reads a stage of the ring, at `x` and `words` of this lane.
template <int kTokens>
__device__ __forceinline__ void read_stage(Held<kTokens>& h, uint32_t x, uint32_t words) {
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) load_matrices(h.x[j][half], (x ^ half * 64) + j * 1024);
#pragma unroll
  for (int t = 0; t < kOperands; ++t) h.words[t] = load_shared<uint4>(words + t * 512);
}

// Reads the scales of a stage: of two outputs each, with their zero points. `width`: tiles of the strip.
template <bool kZeros, int kParts>
__device__ __forceinline__ void read_pairs(uint2 (&pairs)[kParts][kOperands], uint32_t scales, int width) {
  constexpr int kPair = kZeros ? 4 : 2;
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int t = 0; t < kOperands; ++t) {
      const uint32_t at = scales + t * 16 * kPair + part * width * 64 * kPair;
      if constexpr (kZeros) pairs[part][t] = load_shared<uint2>(at);
      else pairs[part][t].x = load_shared<uint32_t>(at);
    }
}

// off += activations of a group times an operand of equal weights.
template <class T, int kTokens, bool kHalfGroups>
__device__ __forceinline__ void sum_activations(float (&off)[kTokens / 8][4], const Held<kTokens>& h, int part,
                                                const uint32_t (&constant)[4]) {
#pragma unroll
  for (int half = part; half < (kHalfGroups ? part + 1 : 2); ++half)
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      Float16<T>::multiply(off[j], constant, h.x[j][half][0], h.x[j][half][1]);
      Float16<T>::multiply(off[j], constant, h.x[j][half][2], h.x[j][half][3]);
    }
}

// Adds the products of operand `t` over a group to the strip's sums, scaled. `off`: the sums of the group's activations
// times `constant`; `pair`: scales of two outputs, with their zero points.
template <class T, int kTokens, bool kHalfGroups, bool kZeros>
__device__ __forceinline__ void multiply_operand(float* sum, const Held<kTokens>& h, int part, int t, const uint2& pair,
                                                 const float (&off)[kTokens / 8][4], uint32_t magic, bool fp16_scales) {
  constexpr int kColumns = kTokens / 8;
  float scale[2], zeros[2] = {1, 1}, d[kColumns][4];
  uint32_t both = pair.x;
  if constexpr (kZeros) {
    both = __byte_perm(pair.x, pair.y, 0x5410);
    zeros[0] = -kBase<T> - static_cast<float>(pair.x >> 16);
    zeros[1] = -kBase<T> - static_cast<float>(pair.y >> 16);
  }
  scales_of<T>(scale, both, fp16_scales);
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) d[j][c] = kZeros ? zeros[c / 2] * off[j][c] : off[j][c];
  const uint32_t each[4] = {h.words[t].x, h.words[t].y, h.words[t].z, h.words[t].w};
#pragma unroll
  for (int step = kHalfGroups ? 2 * part : 0; step < (kHalfGroups ? 2 * part + 2 : 4); ++step) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(a[i]) : "r"(each[step] >> 4 * i), "r"(magic));
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      Float16<T>::multiply(d[j], a, h.x[j][step / 2][step % 2 * 2], h.x[j][step / 2][step % 2 * 2 + 1]);
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& s = sum[(t * kColumns + j) * 4 + c];
      s = fmaf(d[j][c], scale[c / 2], s);
    }
}

// Writes the sums of a strip that is wholly this block's.
template <class T, int kTokens>
__device__ __forceinline__ void write_strip(const Int4Arguments& p, const float* sum, int tile, int token, int warp,
                                            int lane) {
  constexpr int kColumns = kTokens / 8;
#pragma unroll
  for (int t = 0; t < kOperands; ++t) {
    const int output = tile * 64 + (warp * kOperands + t) * 16 + lane / 4 * 2;
    const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      write<T>(p, sum + (t * kColumns + j) * 4, output, token + j * 8 + lane % 4 * 2, bias0, bias1);
  }
}

// Writes the sums of a strip that is a cluster's: a part of them a block.
template <class T, int kTokens>
__device__ __forceinline__ void write_cluster(const Int4Arguments& p, const Share& share, float4* parts,
                                              uint64_t* arrived, const float (&sum)[kOperands * kTokens / 2], int tile,
                                              int token) {
  constexpr int kColumns = kTokens / 8;
  ClusterSum<kFewThreads, kOperands * kColumns>::run(
      p, share, parts, arrived, sum, [&](int thread, int vector, const float4& all) {
        const int output = tile * 64 + (thread / 32 * kOperands + vector / kColumns) * 16 + thread % 32 / 4 * 2;
        const float each[4] = {all.x, all.y, all.z, all.w};
        write<T>(p, each, output, token + vector % kColumns * 8 + thread % 4 * 2, bias_of(p, output),
                 bias_of(p, output + 1));
      });
}

template <class T, int kTokens, bool kHalfGroups, bool kZeros>
__global__ void __launch_bounds__(kFewThreads + 32, 2)
    int4_few_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  constexpr int kStages = kFewStages;
  __shared__ uint64_t full[2 * kStages];
  uint64_t* empty = full + kStages;
  __shared__ uint64_t arrived;
  __shared__ int is_last[2];
  using Stage = Fetch<kTokens, kFewTiles>;
  constexpr int kColumns = kTokens / 8, kVectors = kOperands * kColumns, kPair = kZeros ? 4 : 2;
  constexpr int kParts = kHalfGroups ? 2 : 1;  // groups of a stage
  using Sum = ClusterSum<kFewThreads, kVectors>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Share share(p);
  begin_block<kStages, kFewThreads, Sum>(p, share, full, empty, &arrived);
  if (threadIdx.x >= kFewThreads) {
    if (elect()) Stage::template run<kStages>(p, &map, ring, full, empty, share);
    return;
  }

  // Addresses and constants that stay in registers: the compiler would make them anew at every stage.
  uint32_t constant[4];  // an operand of equal weights
#pragma unroll
  for (uint32_t& c : constant) c = keep(kZeros ? kOne<T> : kMinusEight<T>);
  const uint32_t magic = keep(Float16<T>::kMagic), base = keep(shared_address(ring));
  const uint32_t my_x = base + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
  const uint32_t my_words = base + Stage::kWords + warp * kOperands * 512 + lane * 16;
  const uint32_t my_scales = base + Stage::kScales + (warp * kOperands * 16 + lane / 4 * 2) * kPair;
  const uint32_t my_barrier = keep(shared_address(full));
  float sum[kVectors * 4] = {};
  int slot = 0, parity = 0;
  auto take = [&](Held<kTokens>& h) {
    wait(my_barrier + slot * 8, parity);
    read_stage<kTokens>(h, my_x + slot * Stage::kBytes, my_words + slot * Stage::kBytes);
    h.slot = slot;
    advance<kStages>(slot, parity);
  };
  // `width`: tiles of the strip.
  auto multiply = [&](const Held<kTokens>& h, int width) {
    uint2 pairs[kParts][kOperands];
    read_pairs<kZeros>(pairs, my_scales + h.slot * Stage::kBytes, width);
    __syncwarp();
    if ((lane & p.silent) == 0) arrive(my_barrier + (kStages + h.slot) * 8);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float off[kColumns][4] = {};
      sum_activations<T, kTokens, kHalfGroups>(off, h, part, constant);
#pragma unroll
      for (int t = 0; t < kOperands; ++t)
        multiply_operand<T, kTokens, kHalfGroups, kZeros>(sum, h, part, t, pairs[part][t], off, magic, p.fp16_scales);
    }
  };

  int unit = share.begin / p.depth;
  for (int left = share.count, depth = share.begin - unit * p.depth; left > 0; depth = 0, ++unit) {
    const int tile = unit / p.token_blocks * kFewTiles, token = unit % p.token_blocks * kTokens;
    const int here = min(left, p.depth - depth), width = min(kFewTiles, p.tiles64 - tile);
    Held<kTokens> one, two;
    take(one);
    int rest = here - 1;
    for (; rest >= 2; rest -= 2) {
      take(two);
      multiply(one, width);
      take(one);
      multiply(two, width);
    }
    if (rest > 0) take(two);
    multiply(one, width);
    if (rest > 0) multiply(two, width);
    left -= here;
    if (p.sharers == 0) {
      if (join<kFewThreads, kVectors>(p, unit, sum, is_last)) write_strip<T, kTokens>(p, sum, tile, token, warp, lane);
#pragma unroll
      for (int j = 0; j < kVectors * 4; ++j) sum[j] = 0;
    } else {
      auto* parts = reinterpret_cast<float4*>(ring + kStages * Stage::kBytes);
      write_cluster<T, kTokens>(p, share, parts, &arrived, sum, tile, token);
    }
  }
}

template <class T, int kTokens, bool kHalfGroups, bool kZeros>
void few(const Call& c) {
  static SharedMemory shared;
  // A ring, and room for the sums of the other blocks of a cluster.
  constexpr int kBytes = kFewStages * Fetch<kTokens, kFewTiles>::kBytes + kFewTiles * 64 * kTokens * 4;
  launch(int4_few_sm90<T, kTokens, kHalfGroups, kZeros>, shared, kBytes, kFewThreads + 32, c);
}

template <class T, int kTokens>
void few(const Call& c) {
  if (c.p.stages_per_group == 0)
    c.p.scale_bytes == 4 ? few<T, kTokens, true, true>(c) : few<T, kTokens, true, false>(c);
  else c.p.scale_bytes == 4 ? few<T, kTokens, false, true>(c) : few<T, kTokens, false, false>(c);
}

template <class T>
void few(const Call& c) {
  c.part.tokens == 8 ? few<T, 8>(c) : few<T, 16>(c);
}

}  // namespace

void run_few_sm90(const Call& c, bool fp16) { fp16 ? few<__half>(c) : few<__nv_bfloat16>(c); }

}  // namespace ktinject::cuda::int4
