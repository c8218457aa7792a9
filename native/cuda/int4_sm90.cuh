// What the two kernels for sm_90 share: how the stages of a block are fetched, and how sums of several blocks become
// one.
//
// Layout and line of stages are those of int4_linear.cu. One thread asks the bulk copy engine for weights and
// activations, which completes on barriers; the other threads only multiply. A launch may begin while the kernel before
// it still runs (programmatic dependent launch). Until that has ended, only weights are read.
#pragma once

#include <type_traits>

#include "cuda/hopper.cuh"
#include "cuda/int4_tile.cuh"
#include "cuda/shared_memory.cuh"

namespace ktinject::cuda::int4 {

using namespace hopper;  // NOLINT

// The stages of a block: a share of the line, or of one strip.
struct Share {
  int begin, count;
  int rank = 0;  // in its cluster, among the sharers of a strip
  __device__ explicit Share(const Int4Arguments& p) {
    if (p.sharers == 0) {
      begin = blockIdx.x * p.share;
      count = min(p.share, p.line - begin);
      return;
    }
    const int unit = blockIdx.x / p.sharers;
    rank = blockIdx.x % p.sharers;
    begin = unit * p.depth + rank * p.depth / p.sharers;
    count = unit * p.depth + (rank + 1) * p.depth / p.sharers - begin;
  }
};

// The next slot of a ring, or the one kStep further, and the parity of its barriers.
template <int kStages, int kStep = 1>
__device__ __forceinline__ void advance(int& slot, int& parity) {
  static_assert(kStages % kStep == 0);
  if constexpr (kStep == 1) {
    if (++slot == kStages) slot = 0, parity ^= 1;
  } else {
    slot += kStep;
    if (slot >= kStages) slot -= kStages, parity ^= 1;
  }
}

// One thread asks for the stages of a block.
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
      const int real = min(kTiles, p.tiles64 - tile);
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
    // kWordsToo, kScalesToo: one thread may ask for the words, and another one for the scales.
    template <bool kWordsToo = true, bool kScalesToo = true>
    __device__ __forceinline__ void ask(uint8_t* stage, uint64_t* full) const {
      if constexpr (kWordsToo) arrive_expecting(full, bytes);
      const int all = min(kTiles, p.tiles64 - unit / p.token_blocks * kTiles);
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        const int real = kTiles < 4 ? all : min(4, all - 4 * i);
        if (real <= 0) break;
        if constexpr (kWordsToo) copy(stage + kWords + i * 2048 * 4, words[i], real * 2048, full, policy);
        if constexpr (!kScalesToo) continue;
        uint8_t* to = stage + kScales + i * kScaleBytes;
        const int group = real * 64 * p.scale_bytes;
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
    int unit, depth;
    __device__ Activations(const Int4Arguments& p, int begin) : p(p), unit(begin / p.depth), depth(begin % p.depth) {}
    __device__ __forceinline__ void ask(const CUtensorMap* map, uint8_t* stage, uint64_t* full) const {
      copy_tile(stage, map, depth * 64, p.token_blocks == 1 ? 0 : unit % p.token_blocks * kTokens, full);
    }
    __device__ __forceinline__ void next() {
      if (++depth == p.depth) depth = 0, ++unit;
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
};

// Hides from the compiler where a value comes from, so that it stays in its register.
__device__ __forceinline__ uint32_t keep(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

// How often the threads that multiply release a slot. As a rule the first lane of each warp does, after __syncwarp or
// the wait for a wgmma, which order it behind the reads of the other lanes. racecheck does not see that order; for it,
// every lane releases.
__device__ __forceinline__ int arrivals(const Int4Arguments& p, int threads) { return threads / (p.silent + 1); }

// The scales of a lane's two outputs of an operand as they are stored, and their negative zero points.
template <class T, bool kZeros>
__device__ __forceinline__ uint32_t read_pair(uint32_t (&zeros)[2], uint32_t address) {
  constexpr uint32_t kNegative = Float16<T>::kMagic | 0x80008000;
  if constexpr (kZeros) {
    const uint2 both = load_shared<uint2>(address);
    zeros[0] = kNegative + __byte_perm(both.x, 0, 0x3232);
    zeros[1] = kNegative + __byte_perm(both.y, 0, 0x3232);
    return __byte_perm(both.x, both.y, 0x5410);
  } else {
    zeros[0] = zeros[1] = kNegative + 0x00080008;
    return load_shared<uint32_t>(address);
  }
}

template <int kThreads>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

__device__ __forceinline__ void add(float4& sum, const float4& v) {
  sum.x += v.x;
  sum.y += v.y;
  sum.z += v.z;
  sum.w += v.w;
}

// Sums of a strip that blocks of the line share, kVectors float4 a thread: true for the block that has the whole sum.
// A block has at most two such shares: where it begins (slot 0) and where it ends (1).
//
// The block with a strip's first stages works on them last, after its share of another strip. As a rule the other
// blocks are done by then, and it adds their sums to its own. If not, the last block to finish adds up all, in the same
// order.
template <int kThreads, int kVectors>
__device__ __forceinline__ bool join(const Int4Arguments& p, int unit, float (&sum)[4 * kVectors], int (&is_last)[2]) {
  const int first = unit * p.depth / p.share, last = ((unit + 1) * p.depth - 1) / p.share, block = blockIdx.x;
  wait_for_previous();
  if (first == last) return true;
  constexpr size_t kPart = kThreads * kVectors;
  auto part = [&](int block) { return p.partials + (2 * block + (block == first)) * kPart + threadIdx.x; };
  auto add_rest = [&] {
#pragma unroll kVectors <= 2 ? 8 : kVectors <= 8 ? 2 : 1
    for (int other = first + 1; other <= last; ++other) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 v = __ldcg(part(other) + i * kThreads);
        sum[4 * i] += v.x;
        sum[4 * i + 1] += v.y;
        sum[4 * i + 2] += v.z;
        sum[4 * i + 3] += v.w;
      }
    }
  };
  if (block == first) {
    if (threadIdx.x == 0) {
      int arrived;
      asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(arrived) : "l"(p.counters + unit) : "memory");
      is_last[1] = arrived == last - first;
      if (is_last[1]) p.counters[unit] = 0;
    }
    sync_consumers<kThreads>();
    if (is_last[1]) {
      add_rest();
      return true;
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    __stcg(part(block) + i * kThreads, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  sync_consumers<kThreads>();
  if (threadIdx.x == 0) {  // releases what the barrier before has gathered, and acquires what the others released
    int arrived;
    asm volatile("atom.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(arrived) : "l"(p.counters + unit) : "memory");
    is_last[0] = arrived == last - first;
    if (is_last[0]) p.counters[unit] = 0;
  }
  sync_consumers<kThreads>();
  if (!is_last[0]) return false;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const float4 v = __ldcg(part(first) + i * kThreads);
    sum[4 * i] = v.x, sum[4 * i + 1] = v.y, sum[4 * i + 2] = v.z, sum[4 * i + 3] = v.w;
  }
  add_rest();
  return true;
}

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
    arrive_expecting(arrived, mine_of(p, rank) * (p.sharers - 1) * 16);
  }

  // Hands sums to `use(thread, vector, sum)`. `parts`: shared memory for kItems float4, and for one more a
  // block if the sharers do not divide them.
  template <class Use>
  static __device__ __forceinline__ void run(const Int4Arguments& p, const Share& share, float4* parts,
                                             uint64_t* arrived, const float (&sum)[4 * kVectors], Use use) {
    const int rank = share.rank, each = each_of(p), mine = mine_of(p, rank);
    static_assert(kItems < 1 << 15);
    const uint32_t inverse = 0xffffffff / each + 1;  // exact for all items: their product with its error is below 2^32
    cluster_wait();                                  // all blocks have begun
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int item = i * kThreads + threadIdx.x, owner = __umulhi(item, inverse);
      float4* const part = parts + rank * each + item - owner * each;
      if (owner == rank) {
        *part = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
        continue;
      }
      const uint32_t to = shared_address(part);
      push(address_in(to, owner), sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3],
           address_in(shared_address(arrived), owner));
    }
    wait_for_previous();
    sync_consumers<kThreads>();
    wait(arrived, 0);
    for (int item = threadIdx.x; item < mine; item += kThreads) {
      float4 all = make_float4(0, 0, 0, 0);
#pragma unroll 4
      for (int i = 0; i < p.sharers; ++i) add(all, parts[i * each + item]);
      use((rank * each + item) % kThreads, (rank * each + item) / kThreads, all);
    }
  }
};

// What every block begins with: the barriers of its ring, and of its cluster's sums, which are ready then.
template <int kStages, int kThreads, class Sum>
__device__ __forceinline__ void begin_block(const Int4Arguments& p, const Share& share, uint64_t* full, uint64_t* empty,
                                            uint64_t* sums_arrived) {
  if (threadIdx.x == 0) {
    const int releases = arrivals(p, kThreads);
    for (int i = 0; i < kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, releases);
    if (p.sharers > 0) Sum::prepare(p, share.rank, sums_arrived);
    barriers_ready();
  }
  __syncthreads();
  if (p.sharers > 0) cluster_arrive();
  let_next_begin();
}

// Write 16 outputs × 8 tokens as the tensor core leaves them: sums of two neighbouring outputs for two tokens a lane.
template <class T>
__device__ __forceinline__ void write(const Int4Arguments& p, const float* sum, int output, int token, float bias0,
                                      float bias1) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (token + c >= p.m || output >= p.n) continue;
    const float even = sum[c] + bias0, odd = sum[c + 2] + bias1;
    T* to = static_cast<T*>(p.y) + static_cast<size_t>(token + c) * p.n + output;
    if (p.n % 2 == 0) {
      *reinterpret_cast<typename Float16<T>::Pair*>(to) = Float16<T>::pair(even, odd);
    } else {
      to[0] = Float16<T>::one(even);
      if (output + 1 < p.n) to[1] = Float16<T>::one(odd);
    }
  }
}
__device__ __forceinline__ float bias_of(const Int4Arguments& p, int output) {
  return p.bias != nullptr && output < p.n ? p.bias[output] : 0.f;
}

struct Call {
  const Int4Arguments& p;
  const Partition& part;
  const CUtensorMap& map;
  int device;
  cudaStream_t stream;
};
void run_few_sm90(const Call& c, bool fp16);
void run_many_sm90(const Call& c, bool fp16);
void run_narrow_sm90(const Call& c, bool fp16);
void run_whole_sm90(const Call& c, bool fp16);

inline void launch(void (*kernel)(Int4Arguments, CUtensorMap), SharedMemory& shared, int bytes, int threads,
                   const Call& c) {
  shared.allow("int4_linear", kernel, static_cast<size_t>(bytes), c.device);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(c.p.sharers), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(c.part.blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = c.stream;
  config.attrs = attributes;
  config.numAttrs = c.p.sharers != 0 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, c.p, c.map), "launch");
}

}  // namespace ktinject::cuda::int4
