// A block takes up to eight query heads that share keys, and a share of the cache; a warp 16 places of it at a time.
// Scores are q k^T with mma.m16n8k16, heads as rows, and the weights, as they lie in the registers then, are the A
// operand of the product with the values. The inputs of a product may come in any order as long as both operands agree,
// which is used twice: a lane's part of a key (and query) is 16 bytes in one piece, and so is its part of a value.
//
//   lane 4g + t   queries:  head g, values 32 j + 8t .. + 7
//                 keys:     places g and 8 + g, the same values
//                 values:   places 2t, 2t + 1, 2t + 8, 2t + 9, values 64 h + 8g .. + 7, column i of product i
//
// Norm and rotation of the queries and of the new key happen in these registers: the partner of a value in the rotation
// is in the same lane. Each warp has a softmax of its own, joined in shared memory, then by the last block to arrive.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda/decode_ops.hpp"
#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kHeads = 8;
constexpr int kPlaces = 16;
template <int kSize>
constexpr int kWarpsFor = kSize > 128 ? 8 : 16;

// A lane's part of a head.
template <class T, int kSize>
__device__ void read_part(const T* from, int t, bool there, uint4 (&out)[kSize / 32]) {
#pragma unroll
  for (int j = 0; j < kSize / 32; ++j)
    out[j] = there ? __ldcg(reinterpret_cast<const uint4*>(from + j * 32 + t * 8)) : uint4{0, 0, 0, 0};
}

// Norms a head, if `is_normed`, and rotates it.
template <class T, int kSize>
__device__ void prepare(uint4 (&head)[kSize / 32], bool is_normed, const uint4 (&weight)[kSize / 32],
                        const uint4 (&cos)[kSize / 32], const uint4 (&sin)[kSize / 32], float eps, int t) {
  constexpr int kBlocks = kSize / 32;
  float values[kBlocks][8];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) unpack<T>(head[j], values[j]);
  if (is_normed) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i) sum = fmaf(values[j][i], values[j][i], sum);
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float scale = rsqrtf(sum / kSize + eps);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float weights[8];
      unpack<T>(weight[j], weights);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[j][i] = rounded<T>(weights[i] * rounded<T>(values[j][i] * scale));
    }
  }
  float turned[kBlocks][8];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kBlocks == 1) {
        const float other = __shfl_xor_sync(kAll, values[0][i], 2);
        turned[0][i] = t < 2 ? -other : other;
      } else {
        const float other = values[(j + kBlocks / 2) % kBlocks][i];
        turned[j][i] = j < kBlocks / 2 ? -other : other;
      }
    }
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    float c[8], s[8];
    unpack<T>(cos[j], c);
    unpack<T>(sin[j], s);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[j][i] = rounded<T>(values[j][i] * c[i]) + rounded<T>(turned[j][i] * s[i]);
    head[j] = pack<T>(values[j]);
  }
}

template <class T, int kSize>
__global__ void __launch_bounds__(kWarpsFor<kSize>* kWarp) attention_kernel(const Attention p) {
  constexpr int kWarps = kWarpsFor<kSize>, kBlocks = kSize / 32;
  constexpr int kRun = kSize < 64 ? 4 : 8, kHalves = kSize < 64 ? 1 : kSize / 64;  // of a value: pieces, of so many
  constexpr int kStride = kSize + 2;
  extern __shared__ float joined[];  // [kWarps][kHeads][kStride]: values, greatest score, sum
  __shared__ uint4 new_key[kSize / 8];
  __shared__ float factors[kWarps][kHeads], top[kHeads], total[kHeads];
  __shared__ bool is_last;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int group = p.q_heads / p.kv_heads, chunks = (group + kHeads - 1) / kHeads;
  const int kv = static_cast<int>(blockIdx.x) / chunks, chunk = static_cast<int>(blockIdx.x) % chunks;
  const int heads = min(kHeads, group - chunk * kHeads), head = kv * group + chunk * kHeads;
  const int batch = static_cast<int>(blockIdx.y), split = static_cast<int>(blockIdx.z);
  const auto* q = static_cast<const T*>(p.q) + static_cast<size_t>(batch) * p.q_stride + (head + g) * kSize;
  const auto* k = static_cast<const T*>(p.k) + static_cast<size_t>(batch) * p.kv_stride + kv * kSize;
  const auto* v = static_cast<const T*>(p.v) + static_cast<size_t>(batch) * p.kv_stride + kv * kSize;
  const auto* cos = static_cast<const T*>(p.cos) + static_cast<size_t>(batch) * p.rotation_stride;
  const auto* sin = static_cast<const T*>(p.sin) + static_cast<size_t>(batch) * p.rotation_stride;
  T* keys = static_cast<T*>(p.keys) + batch * p.batch_stride + kv * p.head_stride;
  T* values = static_cast<T*>(p.values) + batch * p.batch_stride + kv * p.head_stride;
  const auto* mask = reinterpret_cast<const unsigned char*>(p.mask) + batch * p.mask_stride;
  auto share_of = [&](int last) { return ((last + p.splits) / p.splits + kPlaces - 1) / kPlaces * kPlaces; };
  uint4 q_weight[kBlocks], k_weight[kBlocks];
  read_part<T, kSize>(static_cast<const T*>(p.q_weight), t, p.q_weight != nullptr, q_weight);
  read_part<T, kSize>(static_cast<const T*>(p.k_weight), t, p.k_weight != nullptr, k_weight);
  {
    // The cache into L2, meanwhile. The place may still be that of the step before, which does no harm here.
    const int last = static_cast<int>(*static_cast<const volatile int64_t*>(p.place)), begin = split * share_of(last);
    const size_t bytes = static_cast<size_t>(max(0, min(last, begin + share_of(last)) - begin)) * kSize * sizeof(T);
    for (size_t at = threadIdx.x * size_t{128}; at < bytes; at += kWarps * kWarp * size_t{128}) {
      const size_t from = static_cast<size_t>(begin) * kSize * sizeof(T) + at;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const std::byte*>(keys) + from));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(reinterpret_cast<const std::byte*>(values) + from));
    }
  }
  release_next();
  await_previous();

  const int now = static_cast<int>(__ldcg(reinterpret_cast<const long long*>(p.place)));
  uint4 query[kBlocks], fresh[kBlocks], c[kBlocks], s[kBlocks];
  read_part<T, kSize>(q, t, g < heads, query);
  read_part<T, kSize>(k, t, true, fresh);
  read_part<T, kSize>(cos, t, true, c);
  read_part<T, kSize>(sin, t, true, s);
  const int share = share_of(now), first = split * share, end = min(now + 1, first + share);
  // The new key is prepared by another warp than the one that has its place, which has nothing else to do if places are
  // few.
  const bool has_new = first <= now && now < end;
  if (has_new && warp == ((now - first) / kPlaces + kWarps / 2) % kWarps) {
    prepare<T, kSize>(fresh, p.k_weight != nullptr, k_weight, c, s, p.eps, t);
    auto* cached = reinterpret_cast<uint4*>(keys + static_cast<size_t>(now) * kSize);
    if (g == 0)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) new_key[j * 4 + t] = cached[j * 4 + t] = fresh[j];
    for (int i = lane; i < kSize / 8; i += kWarp)
      reinterpret_cast<uint4*>(values + static_cast<size_t>(now) * kSize)[i] =
          __ldcg(reinterpret_cast<const uint4*>(v) + i);
  }
  if (first + warp * kPlaces < end)  // else it finds nothing
    prepare<T, kSize>(query, p.q_weight != nullptr, q_weight, c, s, p.eps, t);
  if (has_new) __syncthreads();

  float most = -INFINITY, sum = 0, found[kHalves][kRun][2] = {};
  for (int base = first + warp * kPlaces; base < end; base += kWarps * kPlaces) {
    bool there[2][2], allowed[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = base + n * 8 + 2 * t + i;
        there[n][i] = at < end;
        allowed[n][i] = there[n][i] && __ldcg(mask + at) != 0;
      }
    uint4 key[2][kBlocks];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = base + n * 8 + g;
      const auto* from = reinterpret_cast<const uint4*>(keys + static_cast<size_t>(at) * kSize);
#pragma unroll
      for (int j = 0; j < kBlocks; ++j)
        key[n][j] = at == now ? new_key[j * 4 + t] : at < end ? __ldcg(from + j * 4 + t) : uint4{0, 0, 0, 0};
    }
    float scores[2][2] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        multiply<T>(scores[n], query[j].x, query[j].y, key[n][j].x, key[n][j].y);
        multiply<T>(scores[n], query[j].z, query[j].w, key[n][j].z, key[n][j].w);
      }
    float greatest = most;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores[n][i] = allowed[n][i] ? scores[n][i] * p.scale : -INFINITY;
        greatest = fmaxf(greatest, scores[n][i]);
      }
    greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, 1));
    greatest = fmaxf(greatest, __shfl_xor_sync(kAll, greatest, 2));
    const float base_score = greatest == -INFINITY ? 0.0f : greatest;
    const float shrink = __expf(most - base_score);
    most = greatest;
    sum *= shrink;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores[n][i] = __expf(scores[n][i] - base_score);
        sum += scores[n][i];
      }
    const uint32_t a0 = pair<T>(scores[0][0], scores[0][1]), a2 = pair<T>(scores[1][0], scores[1][1]);
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      // Four places of a piece; those that nobody has written may hold anything.
      alignas(16) uint16_t piece[2][2][kRun];
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = base + n * 8 + 2 * t + i;
          const T* from = (at == now ? v : values + static_cast<size_t>(at) * kSize) + h * 64 + g * kRun;
          if constexpr (kRun == 8)
            *reinterpret_cast<uint4*>(piece[n][i]) =
                there[n][i] ? __ldcg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
          else
            *reinterpret_cast<uint2*>(piece[n][i]) =
                there[n][i] ? __ldcg(reinterpret_cast<const uint2*>(from)) : uint2{0, 0};
        }
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        found[h][i][0] *= shrink;
        found[h][i][1] *= shrink;
        multiply<T>(found[h][i], a0, a2, piece[0][0][i] | static_cast<uint32_t>(piece[0][1][i]) << 16,
                    piece[1][0][i] | static_cast<uint32_t>(piece[1][1][i]) << 16);
      }
    }
  }
  sum += __shfl_xor_sync(kAll, sum, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);

  // Column c of product i is value 64 h + kRun * c + i.
  float* mine = joined + (warp * kHeads + g) * kStride;
#pragma unroll
  for (int h = 0; h < kHalves; ++h)
#pragma unroll
    for (int i = 0; i < kRun; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) mine[h * 64 + kRun * (2 * t + c) + i] = found[h][i][c];
  if (t == 0) {
    mine[kSize] = most;
    mine[kSize + 1] = sum;
  }
  __syncthreads();
  // How much each warp's part counts for a head; the greatest score and the sum of all.
  const int parts = min(kWarps, (end - first + kPlaces - 1) / kPlaces);  // the other warps have found nothing
  // A warp a head, a lane a part.
  if (warp < kHeads) {
    const float* from = joined + (lane * kHeads + warp) * kStride + kSize;
    const float most_here = lane < parts ? from[0] : -INFINITY;
    float all = most_here;
    for (int step = kWarp / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
    const float factor = most_here == -INFINITY ? 0.0f : __expf(most_here - all);
    const float whole = warp_sum(lane < parts ? factor * from[1] : 0.0f);
    if (lane < parts) factors[lane][warp] = factor;
    if (lane == 0) {
      top[warp] = all;
      total[warp] = whole;
    }
  }
  __syncthreads();
  T* out = static_cast<T*>(p.out) + (static_cast<size_t>(batch) * p.q_heads + head) * kSize;
  const size_t cell = static_cast<size_t>(batch) * gridDim.x + blockIdx.x;
  float* scratch = p.scratch + cell * p.splits * kHeads * kStride;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kSize; i += kWarps * kWarp) {
    const int row = i / kSize, at = i % kSize;
    float value = 0;
    for (int part = 0; part < parts; ++part) value += factors[part][row] * joined[(part * kHeads + row) * kStride + at];
    if (p.splits == 1) {
      out[i] = store<T>(value / total[row]);
      continue;
    }
    float* to = scratch + (split * kHeads + row) * kStride;
    to[at] = value;
    if (at == 0) {
      to[kSize] = top[row];
      to[kSize + 1] = total[row];
    }
  }
  if (p.splits == 1) return;

  // The same for the parts of the blocks, by the last one to arrive.
  __threadfence();
  __syncthreads();
  // Back at zero when all have arrived.
  if (threadIdx.x == 0)
    is_last = atomicInc(p.arrived + cell, static_cast<unsigned>(p.splits) - 1) == static_cast<unsigned>(p.splits) - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  float (*shares)[kHeads] = reinterpret_cast<float (*)[kHeads]>(joined);  // [splits][kHeads]
  if (warp < heads) {                                                     // a warp a head, a lane a part
    const float* from = scratch + (lane * kHeads + warp) * kStride + kSize;
    const bool is_part = lane < p.splits;
    const float most_here = is_part ? __ldcg(from) : -INFINITY, sum_here = is_part ? __ldcg(from + 1) : 0;
    float all = most_here;
    for (int step = kWarp / 2; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(kAll, all, step));
    const float factor = all == -INFINITY ? 0.0f : __expf(most_here - all);
    const float whole = warp_sum(factor * sum_here);
    if (is_part) shares[lane][warp] = factor / whole;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < heads * kSize; i += kWarps * kWarp) {
    const int row = i / kSize;
    const float* from = scratch + row * kStride + i % kSize;
    float value = 0;
#pragma unroll 8
    for (int part = 0; part < p.splits; ++part)
      value += shares[part][row] * __ldcg(from + static_cast<size_t>(part) * kHeads * kStride);
    out[i] = store<T>(value);
  }
}

template <class T, int kSize>
void run(const Attention& p, int device, cudaStream_t stream) {
  constexpr size_t kBytes = sizeof(float) * kWarpsFor<kSize> * kHeads * (kSize + 2);
  static std::atomic<uint64_t> ready{0};
  const uint64_t bit = uint64_t{1} << (device % 64);
  if ((ready.load(std::memory_order_relaxed) & bit) == 0) {
    check_cuda(cudaFuncSetAttribute(attention_kernel<T, kSize>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(kBytes)),
               "attention: asking for shared memory");
    ready.fetch_or(bit, std::memory_order_relaxed);
  }
  const int chunks = (p.q_heads / p.kv_heads + kHeads - 1) / kHeads;
  launch_early("launching attention", attention_kernel<T, kSize>,
               {dim3(static_cast<unsigned>(p.kv_heads * chunks), static_cast<unsigned>(p.batch),
                     static_cast<unsigned>(p.splits)),
                dim3(kWarpsFor<kSize> * kWarp), stream, kBytes},
               p);
}

}  // namespace

void attention(const Attention& p, DType dtype, Stream to) {
  if (dtype == DType::f32) throw std::invalid_argument("attention: fp32 is not served");
  if (p.splits < 1 || p.splits > kWarp) throw std::invalid_argument("attention: 1 to 32 splits");
  if (p.kv_heads < 1 || p.q_heads % p.kv_heads != 0)
    throw std::invalid_argument("attention: query heads must be a multiple of those of keys");
  const OnStream stream(to);
  auto with = [&]<class T>(T) {
    if (p.size == 32) run<T, 32>(p, to.device, stream);
    else if (p.size == 64) run<T, 64>(p, to.device, stream);
    else if (p.size == 128) run<T, 128>(p, to.device, stream);
    else if (p.size == 256) run<T, 256>(p, to.device, stream);
    else throw std::invalid_argument("attention: the size of a head must be 32, 64, 128 or 256");
  };
  if (dtype == DType::bf16) with(__nv_bfloat16{});
  else with(__half{});
}

}  // namespace ktinject::cuda
