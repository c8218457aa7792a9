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

// Where a stage lies on the line.
struct Place {
  int unit, depth;
  __device__ Place(int position, int depths) : unit(position / depths), depth(position % depths) {}
  __device__ void next(int depths) {
    if (++depth == depths) depth = 0, ++unit;
  }
};

// One warp asks for a stage's words and scales, a lane a strip of 64 outputs, and for its activations.
//
//   stage   activations [kTokens][64], words of kStrips × 64 outputs, their scales (kScaleBytes a strip of 64)
template <int kTokens, int kStrips>
struct Fetch {
  static constexpr int kWords = kTokens * 128;
  static constexpr int kScales = kWords + kStrips * 2048;
  static constexpr int kScaleBytes = 512;  // room for two groups of 4-byte scales
  static constexpr int kBytes = kScales + (kStrips * kScaleBytes + 1023) / 1024 * 1024;

  static __device__ __forceinline__ void weights(const Int4Arguments& p, Place at, uint8_t* stage, uint64_t* full) {
    const int lane = threadIdx.x % 32;
    const int groups = p.stages_per_group == 0 ? 2 : 1;
    const int group = p.stages_per_group == 0 ? 2 * at.depth : at.depth / p.stages_per_group;
    const int scale_bytes = groups * 64 * p.scale_bytes;
    const int first = at.unit % p.strips * kStrips, real = min(kStrips, p.tiles64 - first);
    if (lane == 0) arrive_expecting(full, real * (2048 + scale_bytes) + kTokens * 128);
    if (lane < real) {
      const auto tile = static_cast<size_t>(first + lane);
      copy_once(stage + kWords + lane * 2048, p.words + (tile * p.depth + at.depth) * 2048, 2048, full);
      copy(stage + kScales + lane * kScaleBytes, p.scales + (tile * p.groups + group) * 64 * p.scale_bytes, scale_bytes,
           full);
    }
  }
  static __device__ __forceinline__ void activations(const Int4Arguments& p, const CUtensorMap* map, Place at,
                                                     uint8_t* stage, uint64_t* full) {
    if (threadIdx.x % 32 == 0) copy_tile(stage, map, at.depth * 64, at.unit / p.strips * kTokens, full);
  }

  // All stages of a block, in a ring of kStages. Weights first: they do not depend on the kernel before.
  template <int kStages>
  static __device__ __forceinline__ void run(const Int4Arguments& p, const CUtensorMap* map, uint8_t* ring,
                                             uint64_t* full, uint64_t* empty, int begin, int count) {
    Place ahead(begin, p.depth);
    for (int i = 0; i < min(kStages, count); ++i, ahead.next(p.depth)) weights(p, ahead, ring + i * kBytes, full + i);
    wait_for_previous();
    Place at(begin, p.depth);
    for (int i = 0; i < min(kStages, count); ++i, at.next(p.depth))
      activations(p, map, at, ring + i * kBytes, full + i);
    for (int i = kStages, slot = 0, parity = 0; i < count; ++i, at.next(p.depth)) {
      wait(empty + slot, parity);
      weights(p, at, ring + slot * kBytes, full + slot);
      activations(p, map, at, ring + slot * kBytes, full + slot);
      if (++slot == kStages) slot = 0, parity ^= 1;
    }
  }
};

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
constexpr int kFewStrips = 4;  // of 64 outputs a block: a warp has 32
constexpr int kFewStages = 6;

template <class T, int kTokens, bool kHalfGroups>
__global__ void __launch_bounds__(kFewThreads + 32, kTokens <= 16 ? 2 : 1)
    int4_few_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  __shared__ uint64_t full[kFewStages], empty[kFewStages];
  __shared__ int is_last;
  using Stage = Fetch<kTokens, kFewStrips>;
  constexpr int kColumns = kTokens / 8, kTiles = 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.x * p.share, count = min(p.share, p.line - begin);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kFewStages; ++i) barrier_init(full + i, 1), barrier_init(empty + i, kFewWarps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_begin();
  if (warp == kFewWarps) {
    Stage::template run<kFewStages>(p, &map, ring, full, empty, begin, count);
    return;
  }

  float sum[kTiles * kColumns * 4] = {};  // scaled
  float group[kTiles][kColumns][4] = {};  // of the group so far
  float scale[kTiles][2];
  uint32_t zeros[kTiles][2];
  auto close_group = [&] {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& s = sum[(i * kColumns + j) * 4 + c];
          s = fmaf(group[i][j][c], scale[i][c / 2], s);
          group[i][j][c] = 0;
        }
  };

  Place at(begin, p.depth);
  for (int i = 0, slot = 0, parity = 0; i < count; ++i) {
    const uint8_t* stage = ring + slot * Stage::kBytes;
    const uint8_t* scales = stage + Stage::kScales + warp / 2 * Stage::kScaleBytes;
    wait(full + slot, parity);
    uint4 words[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      words[t] = *reinterpret_cast<const uint4*>(stage + Stage::kWords + (warp * kTiles + t) * 512 + lane * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half == 0 || kHalfGroups) {
        if (half == 1) close_group();
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
          read_scales<T>(scale[t], zeros[t], scales + (half * 64 + (warp % 2 * kTiles + t) * 16) * p.scale_bytes,
                         lane / 4, p.scale_bytes, p.fp16_scales);
      }
      uint32_t x[kColumns][4];  // 8 tokens × 32 inputs each
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int row = j * 8 + lane % 8, piece = half * 4 + lane / 8;
        load_matrices(x[j], stage + row * 128 + ((piece ^ row) & 7) * 16);
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        uint32_t a[4];
        to_operand<T>(a, half ? words[t].z : words[t].x, zeros[t]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) Float16<T>::multiply(group[t][j], a, x[j][0], x[j][1]);
        to_operand<T>(a, half ? words[t].w : words[t].y, zeros[t]);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) Float16<T>::multiply(group[t][j], a, x[j][2], x[j][3]);
      }
    }
    __syncwarp();
    if (lane == 0) arrive(empty + slot);
    if (++slot == kFewStages) slot = 0, parity ^= 1;

    const int unit = at.unit;
    const bool ends = at.depth + 1 == p.depth || i + 1 == count;
    if (kHalfGroups || (at.depth + 1) % p.stages_per_group == 0 || ends) close_group();
    at.next(p.depth);
    if (!ends) continue;
    if (join<kFewThreads, kTiles * kColumns>(p, unit, sum, &is_last)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int output = unit % p.strips * (64 * kFewStrips) + (warp * kTiles + t) * 16 + lane / 4 * 2;
        const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          write<T>(p, sum + (t * kColumns + j) * 4, output, unit / p.strips * kTokens + j * 8 + lane % 4 * 2, bias0,
                   bias1);
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles * kColumns * 4; ++j) sum[j] = 0;
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
                                                  const float (&scale)[2], const uint32_t (&pairs)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t steps = Float16<T>::add(codes<T>(word, 4 * i), zeros[i & 1]);
    if constexpr (kMixed) {
      const auto pair = *reinterpret_cast<const typename Float16<T>::Pair*>(&steps);
      const auto product =
          Float16<T>::pair(static_cast<float>(pair.x) * scale[i & 1], static_cast<float>(pair.y) * scale[i & 1]);
      a[i] = *reinterpret_cast<const uint32_t*>(&product);
    } else {
      a[i] = Float16<T>::scaled(steps, pairs[i & 1]);
    }
  }
}

template <int kTokens>
constexpr int kManyStages = kTokens == 64 ? 7 : 8;

template <class T, int kTokens, bool kMixed>
__global__ void __launch_bounds__(kManyThreads + 128, 1)
    int4_many_sm90(const Int4Arguments p, const __grid_constant__ CUtensorMap map) {
  extern __shared__ __align__(1024) uint8_t ring[];
  constexpr int kTiles = 256 / kTokens;  // of 64 outputs a warpgroup
  constexpr int kStages = kManyStages<kTokens>;
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
    if (threadIdx.x < kManyThreads + 32) Stage::template run<kStages>(p, &map, ring, full, empty, begin, count);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float sum[kTiles][kTokens / 2];
    Place at(begin, p.depth);
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
          const uint4 words =
              *reinterpret_cast<const uint4*>(stage + Stage::kWords + tile * 2048 + warp * 512 + lane * 16);
          const uint32_t each[4] = {words.x, words.y, words.z, words.w};
          wgmma_wait<1>();  // the product before the last has read its registers
          if (t == 1 && held >= 0) {
            if (lane == 0) arrive(empty + held);
            held = -1;
          }
          float scale[2];
          uint32_t zeros[2], pairs[2];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (j == 0 || (j == 2 && p.stages_per_group == 0)) {
              const uint8_t* scales = stage + Stage::kScales + tile * Stage::kScaleBytes;
              read_scales<T>(scale, zeros, scales + ((j / 2) * 64 + warp * 16) * p.scale_bytes, lane / 4, p.scale_bytes,
                             p.fp16_scales);
              if constexpr (!kMixed) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                  const auto pair = Float16<T>::pair(scale[c], scale[c]);
                  pairs[c] = *reinterpret_cast<const uint32_t*>(&pair);
                }
              }
            }
            to_scaled_operand<T, kMixed>(a[t & 1] + 4 * j, each[j], zeros, scale, pairs);
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
      const int unit = at.unit++;
      at.depth = 0;
      float (&all)[kTiles * kTokens / 2] = *reinterpret_cast<float (*)[kTiles * kTokens / 2]>(&sum);
      if (join<kManyThreads, kTiles * kTokens / 8>(p, unit, all, &is_last)) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int output = unit % p.strips * (128 * kTiles) + (group * kTiles + t) * 64 + warp * 16 + lane / 4 * 2;
          const float bias0 = bias_of(p, output), bias1 = bias_of(p, output + 1);
#pragma unroll
          for (int j = 0; j < kTokens / 8; ++j)
            write<T>(p, sum[t] + 4 * j, output, unit / p.strips * kTokens + j * 8 + lane % 4 * 2, bias0, bias1);
        }
      }
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

template <class T, int kTokens, bool kHalfGroups>
void few(const Int4Arguments& p, const CUtensorMap& map, int blocks, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> ready{0};  // devices that know of the shared memory it needs
  launch(int4_few_sm90<T, kTokens, kHalfGroups>, ready, kFewStages * Fetch<kTokens, kFewStrips>::kBytes,
         kFewThreads + 32, p, map, blocks, device, stream);
}

template <class T, int kTokens, bool kMixed>
void many(const Int4Arguments& p, const CUtensorMap& map, int blocks, int device, cudaStream_t stream) {
  static std::atomic<uint64_t> ready{0};
  launch(int4_many_sm90<T, kTokens, kMixed>, ready, kManyStages<kTokens> * Fetch<kTokens, 512 / kTokens>::kBytes,
         kManyThreads + 128, p, map, blocks, device, stream);
}

template <class T>
void dispatch(const Int4Arguments& p, const CUtensorMap& map, const Partition& part, bool mixed, int device,
              cudaStream_t stream) {
  const bool half_groups = p.stages_per_group == 0;
  const int blocks = part.blocks;
  switch (part.tokens) {
    case 8:
      return half_groups ? few<T, 8, true>(p, map, blocks, device, stream)
                         : few<T, 8, false>(p, map, blocks, device, stream);
    case 16:
      return half_groups ? few<T, 16, true>(p, map, blocks, device, stream)
                         : few<T, 16, false>(p, map, blocks, device, stream);
    case 32:
      return half_groups ? few<T, 32, true>(p, map, blocks, device, stream)
                         : few<T, 32, false>(p, map, blocks, device, stream);
    case 64:
      return mixed ? many<T, 64, true>(p, map, blocks, device, stream)
                   : many<T, 64, false>(p, map, blocks, device, stream);
    default:
      return mixed ? many<T, 128, true>(p, map, blocks, device, stream)
                   : many<T, 128, false>(p, map, blocks, device, stream);
  }
}

}  // namespace

Partition partition_sm90(int n, int k, int m, int multiprocessors) {
  const int tokens = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
  const int outputs = tokens <= 32 ? 64 * kFewStrips : 128 * (256 / tokens);
  return cut(n, k, m, tokens, outputs, multiprocessors * (tokens <= 16 ? 2 : 1));
}

void run_sm90(Int4Arguments p, const Partition& part, bool fp16, int device, cudaStream_t stream) {
  const CUtensorMap map = map_of(p, part.tokens, fp16);
  if (fp16) dispatch<__half>(p, map, part, !p.fp16_scales, device, stream);
  else dispatch<__nv_bfloat16>(p, map, part, p.fp16_scales, device, stream);
}

}  // namespace ktinject::int4
