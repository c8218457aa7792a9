// int4 weights times bf16 or fp16 activations with sm_90's own instructions: weights and activations arrive by the bulk
// copy engine, completing on barriers; one warp asks for them, the others only multiply.
//
//   up to 32 tokens  int4_few_sm90: mma.m16n8k16 as on sm_80, sums of a group scaled in fp32
//   more             int4_many_sm90: wgmma m64n64k16 or m64n128k16, weights from registers, activations from shared
//   memory
//
// wgmma's sums stay in flight, so scales go to the weights before: each value is rounded once to the activations' type,
// which changes nothing for the scales that ktinject chooses itself (operators/int4_layout.py).
//
// Layout, line of stages and shared strips are those of int4_linear.cu. A launch may begin while the kernel before it
// is still running (programmatic dependent launch): until that has ended, only weights are read.
//
// Source: PTX ISA on wgmma, mbarrier, cp.async.bulk and griddepcontrol.
#include <cuda.h>

#include <atomic>
#include <type_traits>

#include "cuda/int4_tile.cuh"

namespace ktinject::int4 {
namespace {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Barriers in shared memory.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Bulk copies to shared memory; weights pass the L2 once and need not stay.
__device__ __forceinline__ void copy_once(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(0x12F0000000000000)
      : "memory");
}
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// A tile of x: 64 inputs × tokens, rows of 128 bytes whose 16-byte pieces are swizzled; zeros beyond the last token.
__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap* map, int input, int token, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(input), "r"(token), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <int kThreads>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

// A stage on the line.
template <int kTokens, int kTiles>
struct Place {
  int unit, tile, token, depth, group,
      left;  // tile: first of kTiles of 64 outputs; left: stages of the group, 0 in groups of 32

  __device__ Place(const Int4Arguments& p, int position) {
    unit = position / p.depth;
    tile = unit % p.strips * kTiles;
    token = unit / p.strips * kTokens;
    depth = position - unit * p.depth;
    group = p.stages_per_group == 0 ? 2 * depth : depth / p.stages_per_group;
    left = p.stages_per_group == 0 ? 0 : p.stages_per_group - depth % p.stages_per_group;
  }
  __device__ __forceinline__ void next(const Int4Arguments& p) {
    if (p.stages_per_group == 0) {
      group += 2;
    } else if (--left == 0) {
      left = p.stages_per_group;
      ++group;
    }
    if (++depth < p.depth) return;
    depth = group = 0;
    left = p.stages_per_group;
    ++unit;
    tile += kTiles;
    if (tile == p.strips * kTiles) tile = 0, token += kTokens;
  }
};

// One thread asks for the stages of a block.
//
//   stage   activations [kTokens][64]; words of kTiles × 64 outputs; scales, [groups][256] for each four tiles
template <int kTokens, int kTiles>
struct Fetch {
  static constexpr int kWords = kTokens * 128;
  static constexpr int kScales = kWords + kTiles * 2048;
  static constexpr int kScaleBytes = 2048;  // room for two groups of 4-byte scales of 256 outputs
  static constexpr int kBytes = kScales + kTiles / 4 * kScaleBytes;
  using At = Place<kTokens, kTiles>;

  static __device__ __forceinline__ void weights(const Int4Arguments& p, const At& at, uint8_t* stage, uint64_t* full) {
    const int groups = p.stages_per_group == 0 ? 2 : 1;
    const int real = min(kTiles, p.tiles64 - at.tile);
    arrive_expecting(full, real * (2048 + groups * 64 * p.scale_bytes) + kTokens * 128);
#pragma unroll
    for (int i = 0; i < kTiles; i += 4) {
      const int width = min(4, real - i);
      if (width <= 0) break;
      copy_once(stage + kWords + i * 2048, p.words + words_at(p, at.tile + i, at.depth), width * 2048, full);
      copy(stage + kScales + i / 4 * kScaleBytes, p.scales + scales_at(p, at.tile + i, at.group),
           width * groups * 64 * p.scale_bytes, full);
    }
  }

  // In a ring of kStages. Weights first: they do not depend on the kernel before.
  template <int kStages>
  static __device__ __forceinline__ void run(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                             uint64_t* full, uint64_t* empty, int begin, int count) {
    At ahead(p, begin);
    for (int i = 0; i < min(kStages, count); ++i, ahead.next(p)) weights(p, ahead, ring + i * kBytes, full + i);
    wait_for_previous();
    At at(p, begin);
    for (int i = 0; i < min(kStages, count); ++i, at.next(p))
      copy_tile(ring + i * kBytes, map, at.depth * 64, at.token, full + i);
    for (int i = kStages, slot = 0, parity = 0; i < count; ++i, at.next(p)) {
      wait(empty + slot, parity);
      weights(p, at, ring + slot * kBytes, full + slot);
      copy_tile(ring + slot * kBytes, map, at.depth * 64, at.token, full + slot);
      if (++slot == kStages) slot = 0, parity ^= 1;
    }
  }
};

// The scales of a lane's two outputs of an operand as they are stored, and their negative zero points.
template <class T, bool kZeros>
__device__ __forceinline__ uint32_t read_pair(uint32_t (&zeros)[2], const uint8_t* operand, int pair) {
  constexpr uint32_t kNegative = Float16<T>::kMagic | 0x80008000;
  if constexpr (kZeros) {
    const uint2 both = reinterpret_cast<const uint2*>(operand)[pair];
    zeros[0] = kNegative + __byte_perm(both.x, 0, 0x3232);
    zeros[1] = kNegative + __byte_perm(both.y, 0, 0x3232);
    return __byte_perm(both.x, both.y, 0x5410);
  } else {
    zeros[0] = zeros[1] = kNegative + 0x00080008;
    return reinterpret_cast<const uint32_t*>(operand)[pair];
  }
}

// Sums of a strip that several blocks share, kVectors float4 a thread: true for the block that has the whole sum. A
// block has at most two such shares: where it begins (slot 0) and where it ends (1).
template <int kThreads, int kVectors>
__device__ __forceinline__ bool join(const Int4Arguments& p, int unit, float (&sum)[4 * kVectors], int* is_last) {
  const int first = unit * p.depth / p.share, last = ((unit + 1) * p.depth - 1) / p.share;
  wait_for_previous();
  if (first == last) return true;
  constexpr size_t kPart = kThreads * kVectors;
  float4* mine = p.partials + (2 * blockIdx.x + (blockIdx.x == first)) * kPart + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    __stcg(mine + i * kThreads, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
  __threadfence();
  sync_consumers<kThreads>();
  if (threadIdx.x == 0) {
    *is_last = atomicAdd(&p.counters[unit], 1) == last - first;
    if (*is_last) p.counters[unit] = 0;
  }
  sync_consumers<kThreads>();
  if (!*is_last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < 4 * kVectors; ++i) sum[i] = 0;
#pragma unroll kVectors <= 2 ? 8 : kVectors <= 8 ? 2 : 1
  for (int block = first; block <= last; ++block) {
    const float4* part = p.partials + (2 * block + (block == first)) * kPart + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = __ldcg(part + i * kThreads);
      sum[4 * i] += v.x;
      sum[4 * i + 1] += v.y;
      sum[4 * i + 2] += v.z;
      sum[4 * i + 3] += v.w;
    }
  }
  return true;
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

// Few tokens.

constexpr int kFewWarps = 8;
constexpr int kFewThreads = 32 * kFewWarps;
constexpr int kFewTiles = 4;  // of 64 outputs a block: a warp has 32 outputs
// Two blocks fill a multiprocessor's shared memory: a third one, of the next kernel, must wait until one has ended,
// else that kernel's blocks would gather where this one ends first.
template <int kTokens>
constexpr int kFewStages = kTokens == 8    ? 7
                           : kTokens == 16 ? 7
                                           : 12;

template <class T, int kTokens, bool kHalfGroups, bool kZeros>
__global__ void __launch_bounds__(kFewThreads + 32, kTokens <= 16 ? 2 : 1)
    int4_few_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  constexpr int kStages = kFewStages<kTokens>;
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ int is_last;
  using Stage = Fetch<kTokens, kFewTiles>;
  constexpr int kColumns = kTokens / 8, kOperands = 2, kPair = kZeros ? 4 : 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.x * p.share, count = min(p.share, p.line - begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kFewWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_begin();
  if (warp == kFewWarps) {
    if (lane == 0) Stage::template run<kStages>(p, &map, ring, full, empty, begin, count);
    return;
  }

  float sum[kOperands * kColumns * 4] = {};  // scaled
  float group[kOperands][kColumns][4] = {};  // of the group so far
  typename Stage::At at(p, begin);
  for (int i = 0, slot = 0, parity = 0; i < count; ++i) {
    const uint8_t* stage = ring + slot * Stage::kBytes;
    const uint8_t* scales = stage + Stage::kScales + warp * kOperands * 16 * kPair;
    wait(full + slot, parity);
    auto close_group = [&](int half) {
#pragma unroll
      for (int t = 0; t < kOperands; ++t) {
        uint32_t unused[2];
        const int before = half ? min(4, p.tiles64 - at.tile) * 64 : 0;
        const uint32_t both = read_pair<T, kZeros>(unused, scales + (before + t * 16) * kPair, lane / 4);
        const float scale[2] = {scale_of(both & 0xffff, p.fp16_scales), scale_of(both >> 16, p.fp16_scales)};
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& s = sum[(t * kColumns + j) * 4 + c];
            s = fmaf(group[t][j][c], scale[c / 2], s);
            group[t][j][c] = 0;
          }
      }
    };
    uint4 words[kOperands];
#pragma unroll
    for (int t = 0; t < kOperands; ++t)
      words[t] = *reinterpret_cast<const uint4*>(stage + Stage::kWords + (warp * kOperands + t) * 512 + lane * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t x[kColumns][4];  // 8 tokens × 32 inputs each
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int row = j * 8 + lane % 8, piece = half * 4 + lane / 8;
        load_matrices(x[j], stage + row * 128 + ((piece ^ row) & 7) * 16);
      }
#pragma unroll
      for (int t = 0; t < kOperands; ++t) {
        uint32_t a[4], zeros[2];
        const int before = kHalfGroups && half ? min(4, p.tiles64 - at.tile) * 64 : 0;
        read_pair<T, kZeros>(zeros, scales + (before + t * 16) * kPair, lane / 4);
        to_operand<T>(a, half ? words[t].z : words[t].x, zeros);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) Float16<T>::multiply(group[t][j], a, x[j][0], x[j][1]);
        to_operand<T>(a, half ? words[t].w : words[t].y, zeros);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) Float16<T>::multiply(group[t][j], a, x[j][2], x[j][3]);
      }
      if (kHalfGroups) close_group(half);
    }
    const bool ends = at.depth + 1 == p.depth || i + 1 == count;
    if (!kHalfGroups && (at.left == 1 || ends)) close_group(0);
    __syncwarp();
    if (lane == 0) arrive(empty + slot);
    if (++slot == kStages) slot = 0, parity ^= 1;
    if (ends) {
      if (join<kFewThreads, kOperands * kColumns>(p, at.unit, sum, &is_last)) {
#pragma unroll
        for (int t = 0; t < kOperands; ++t) {
          const int output = at.tile * 64 + (warp * kOperands + t) * 16 + lane / 4 * 2;
          const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
          for (int j = 0; j < kColumns; ++j)
            write<T>(p, sum + (t * kColumns + j) * 4, output, at.token + j * 8 + lane % 4 * 2, bias0, bias1);
        }
      }
#pragma unroll
      for (int j = 0; j < kOperands * kColumns * 4; ++j) sum[j] = 0;
    }
    at.next(p);
  }
}

// Many tokens.

constexpr int kManyThreads = 256;  // two warpgroups that multiply; a third one fetches

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A tile of activations [tokens][64], rows of 128 bytes, swizzled: 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(const void* tile) {
  const uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
  return address | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// d [64 outputs, kTokens] += weights [64, 16] in registers · activations [kTokens, 16]ᵀ in shared memory.
template <class T, int kTokens>
__device__ __forceinline__ void wgmma(float (&d)[kTokens / 2], const uint32_t* a, uint64_t b);
template <>
__device__ __forceinline__ void wgmma<__nv_bfloat16, 64>(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma<__half, 64>(float (&d)[32], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma<__nv_bfloat16, 128>(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void wgmma<__half, 128>(float (&d)[64], const uint32_t* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

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

template <int kTokens>
constexpr int kManyStages = kTokens == 64 ? 7 : 8;

template <class T, int kTokens, bool kHalfGroups, bool kZeros, bool kMixed>
__global__ void __launch_bounds__(kManyThreads + 128, 1)
    int4_many_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  constexpr int kTiles = 256 / kTokens;  // of 64 outputs a warpgroup
  constexpr int kStages = kManyStages<kTokens>, kPair = kZeros ? 4 : 2;
  using Stage = Fetch<kTokens, 2 * kTiles>;
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ int is_last;
  const int begin = blockIdx.x * p.share, count = min(p.share, p.line - begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kManyThreads / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_begin();
  if (threadIdx.x >= kManyThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kManyThreads) Stage::template run<kStages>(p, &map, ring, full, empty, begin, count);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float sum[kTiles][kTokens / 2];
    typename Stage::At at(p, begin);
    for (int i = 0, slot = 0, parity = 0; i < count;) {
      const int stop = i + min(p.depth - at.depth, count - i);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) sum[t][j] = 0;
      int held = -1;  // the slot whose activations may still be read
      // Nothing but products touches the sums in here: the compiler would wait for them at every turn.
      for (; i < stop; ++i) {
        const uint8_t* stage = ring + slot * Stage::kBytes;
        wait(full + slot, parity);
        const uint64_t b = descriptor(stage);
        uint32_t a[2][16];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int tile = group * kTiles + t;
          const uint8_t* scales =
              stage + Stage::kScales + tile / 4 * Stage::kScaleBytes + (tile % 4 * 64 + warp * 16) * kPair;
          const uint4 words =
              *reinterpret_cast<const uint4*>(stage + Stage::kWords + tile * 2048 + warp * 512 + lane * 16);
          uint32_t zeros[2][2], both[2];
          both[0] = both[1] = read_pair<T, kZeros>(zeros[0], scales, lane / 4);
          if constexpr (kHalfGroups) {
            const int width = min(4, p.tiles64 - at.tile - tile / 4 * 4);
            both[1] = read_pair<T, kZeros>(zeros[1], scales + width * 64 * kPair, lane / 4);
          }
          wgmma_wait<1>();  // the product before the last has read its registers
          if (t == 1 && held >= 0 && lane == 0) arrive(empty + held);
          const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            constexpr int kSecond = kHalfGroups ? 1 : 0;
            to_scaled_operand<T, kMixed>(a[t & 1] + 4 * j, each[j], zeros[j / 2 * kSecond], both[j / 2]);
          }
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < 4; ++j) wgmma<T, kTokens>(sum[t], a[t & 1] + 4 * j, b + 2 * j);
          wgmma_commit();
        }
        held = slot;
        if (++slot == kStages) slot = 0, parity ^= 1;
      }
      wgmma_wait<0>();
      if (lane == 0) arrive(empty + held);
      float (&all)[kTiles * kTokens / 2] = *reinterpret_cast<float (*)[kTiles * kTokens / 2]>(&sum);
      if (join<kManyThreads, kTiles * kTokens / 8>(p, at.unit, all, &is_last)) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int output = at.tile * 64 + (group * kTiles + t) * 64 + warp * 16 + lane / 4 * 2;
          const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
          for (int j = 0; j < kTokens / 8; ++j)
            write<T>(p, sum[t] + 4 * j, output, at.token + j * 8 + lane % 4 * 2, bias0, bias1);
        }
      }
      at.depth = p.depth - 1;
      at.next(p);
    }
  }
}

// cuTensorMapEncodeTiled, from the driver and not from a library to link with.
CUtensorMap map_of(const Int4Arguments& p, int tokens, bool fp16) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "looking for cuTensorMapEncodeTiled");
    if (found == nullptr) throw std::runtime_error("int4_linear: the driver has no cuTensorMapEncodeTiled; update it.");
    return reinterpret_cast<Encode>(found);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(p.k), static_cast<cuuint64_t>(p.m)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(p.k) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(tokens)}, steps[2] = {1, 1};
  const CUresult result =
      encode(&map, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             const_cast<uint8_t*>(p.x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("int4_linear: describing the activations failed with driver error " +
                             std::to_string(result));
  return map;
}

using Kernel = void (*)(Int4Arguments, CUtensorMap);

void launch(Kernel kernel, std::atomic<uint64_t>& ready, int bytes, int threads, const Int4Arguments& p,
            const CUtensorMap& map, int blocks, int device, cudaStream_t stream) {
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((ready.load(std::memory_order_relaxed) & bit) == 0) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "asking for shared memory");
    ready.fetch_or(bit, std::memory_order_relaxed);
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p, map), "launch");
}

struct Call {
  const Int4Arguments& p;
  const CUtensorMap& map;
  int blocks, device;
  cudaStream_t stream;
};

template <class T, int kTokens, bool kHalfGroups, bool kZeros>
void few(const Call& c) {
  static std::atomic<uint64_t> ready{0};  // devices that know of the shared memory it needs
  launch(int4_few_sm90<T, kTokens, kHalfGroups, kZeros>, ready, kFewStages<kTokens> * Fetch<kTokens, kFewTiles>::kBytes,
         kFewThreads + 32, c.p, c.map, c.blocks, c.device, c.stream);
}

template <class T, int kTokens, bool kHalfGroups, bool kZeros, bool kMixed>
void many(const Call& c) {
  static std::atomic<uint64_t> ready{0};
  launch(int4_many_sm90<T, kTokens, kHalfGroups, kZeros, kMixed>, ready,
         kManyStages<kTokens> * Fetch<kTokens, 512 / kTokens>::kBytes, kManyThreads + 128, c.p, c.map, c.blocks,
         c.device, c.stream);
}

template <class T, bool kHalfGroups, bool kZeros>
void dispatch(int tokens, bool mixed, const Call& c) {
  switch (tokens) {
    case 8:
      return few<T, 8, kHalfGroups, kZeros>(c);
    case 16:
      return few<T, 16, kHalfGroups, kZeros>(c);
    case 32:
      return few<T, 32, kHalfGroups, kZeros>(c);
    case 64:
      return mixed ? many<T, 64, kHalfGroups, kZeros, true>(c) : many<T, 64, kHalfGroups, kZeros, false>(c);
    default:
      return mixed ? many<T, 128, kHalfGroups, kZeros, true>(c) : many<T, 128, kHalfGroups, kZeros, false>(c);
  }
}

template <class T>
void dispatch(int tokens, bool mixed, const Call& c) {
  const bool zeros = c.p.scale_bytes == 4;
  if (c.p.stages_per_group == 0)
    zeros ? dispatch<T, true, true>(tokens, mixed, c) : dispatch<T, true, false>(tokens, mixed, c);
  else zeros ? dispatch<T, false, true>(tokens, mixed, c) : dispatch<T, false, false>(tokens, mixed, c);
}

}  // namespace

Partition partition_sm90(int n, int k, int m, int multiprocessors) {
  const int tokens = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
  const int outputs = tokens <= 32 ? 64 * kFewTiles : 128 * (256 / tokens);
  const Partition one = cut(n, k, m, tokens, outputs, multiprocessors);
  // Two blocks on a multiprocessor hide each other's waits, but more blocks share a strip: not worth it for little
  // work.
  return tokens <= 16 && one.share >= 16 ? cut(n, k, m, tokens, outputs, 2 * multiprocessors) : one;
}

void run_sm90(Int4Arguments p, const Partition& part, bool fp16, int device, cudaStream_t stream) {
  const CUtensorMap map = map_of(p, part.tokens, fp16);
  const Call call{p, map, part.blocks, device, stream};
  if (fp16) dispatch<__half>(part.tokens, !p.fp16_scales, call);
  else dispatch<__nv_bfloat16>(part.tokens, p.fp16_scales, call);
}

}  // namespace ktinject::int4
