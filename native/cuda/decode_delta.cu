// A thread block has kColumns columns of the state of one head, all key_size rows of them, so k S and q S are sums
// within the block. It reads its part of the state once and writes it once:
//
//   o = q (decay S + k delta) = decay (q S) + (q k) delta,    delta = beta (v - decay (k S))
//
// Both sums need the state before the update only. A warp reads 4 rows at a time, 8 lanes each. Every block computes
// the convolution for q and k of its head again, which is little.
//
// The blocks of a head of keys count when they are done with the inputs of the convolution and have left their o in
// `scratch`. The last one moves the inputs of q and k on, and norms the heads' o.
#include "cuda/decode_delta.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/prefetch.cuh"
#include "cuda/recurrent.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kColumns = GatedDelta::kColumns;
constexpr int kLanes = kColumns / 4;      // that read a row of the block's columns, 16 bytes each
constexpr int kThreads = kLanes * kWarp;  // so that they read kWarp rows at a time
constexpr int kWarps = kThreads / kWarp;
// Added to the square of a length before its root: what transformers' l2norm has.
constexpr float kLengthEpsilon = 1e-6f;

// What a block works on, and where its tensors lie.
template <class T>
struct Block {
  int row, key_head, shared;  // shared: heads of values that a head of keys has
  int member, head, column;   // which of those; the same of all; the first column
  float* state;               // the first row of the columns

  __device__ __forceinline__ explicit Block(const GatedDelta& p) {
    const int splits = p.value_size / kColumns;
    shared = p.value_heads / p.key_heads;
    row = static_cast<int>(blockIdx.y);
    head = static_cast<int>(blockIdx.x) / splits;
    column = static_cast<int>(blockIdx.x) % splits * kColumns;
    key_head = head / shared, member = head % shared;
    const size_t index = static_cast<size_t>(row) * p.value_heads + head;
    state = p.states + index * p.key_size * p.value_size + column;
  }
  // Blocks that work on a head of keys.
  __device__ __forceinline__ unsigned peers(const GatedDelta& p) const {
    return static_cast<unsigned>(shared * (p.value_size / kColumns));
  }
  __device__ __forceinline__ const T* of(const DeltaInput& input) const {
    return static_cast<const T*>(input.data) + row * input.row_stride + key_head * input.head_stride;
  }
};

// A channel of q, k or v, and its new input.
template <class T>
struct Mixed {
  const T* newest;
  Channel<T> channel;
};

// i: first q's channels, then k's, then the block's columns of v.
template <class T>
__device__ __forceinline__ Mixed<T> mixed_of(const GatedDelta& p, const Block<T>& block, int i) {
  const T* newest;
  int index;
  if (i < p.key_size) {
    newest = block.of(p.q) + i;
    index = block.key_head * p.key_size + i;
  } else if (i < 2 * p.key_size) {
    newest = block.of(p.k) + i - p.key_size;
    index = (p.key_heads + block.key_head) * p.key_size + i - p.key_size;
  } else {
    const int at = block.column + i - 2 * p.key_size;
    newest = block.of(p.v) + block.member * p.value_size + at;
    index = 2 * p.key_heads * p.key_size + block.head * p.value_size + at;
  }
  const int channels = 2 * p.key_heads * p.key_size + p.value_heads * p.value_size;
  return {newest, {p.inputs, p.taps_weight, channels, block.row, index, p.taps}};
}

// Fetches into L2 what the block reads, while the kernel before still runs.
template <class T>
__device__ __forceinline__ void prefetch(const GatedDelta& p, const Block<T>& block) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < p.key_size; i += kThreads)
    prefetch_line(block.state + static_cast<size_t>(i) * p.value_size);
  // A line has the taps of several channels.
  const int step = static_cast<int>(kLine / sizeof(T)) / p.taps;
  for (int i = thread * step; i < 2 * p.key_size + kColumns; i += kThreads * step)
    mixed_of(p, block, i).channel.prefetch();
  if (thread == 0 && p.then != nullptr)
    prefetch_share(p.then, p.then_bytes, static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x),
                   static_cast<int>(gridDim.x * gridDim.y));
}

// Factors that make q and k as long as the rule wants them, and q k after that.
struct Lengths {
  float q, k, product;
};

// Each warp computes them. mixed: q and k of a head, [2 * keys].
template <int kKeys>
__device__ __forceinline__ Lengths find_lengths(const float* mixed, int lane) {
  float qq = 0, kk = 0, qk = 0;
#pragma unroll
  for (int i = 0; i < kKeys; i += kWarp) {
    const float q = mixed[i + lane], k = mixed[kKeys + i + lane];
    qq = fmaf(q, q, qq);
    kk = fmaf(k, k, kk);
    qk = fmaf(q, k, qk);
  }
  const float q = rsqrtf(warp_sum(qq) + kLengthEpsilon) / sqrtf(static_cast<float>(kKeys));
  const float k = rsqrtf(warp_sum(kk) + kLengthEpsilon);
  return {q, k, warp_sum(qk) * q * k};
}

__device__ __forceinline__ void add(float4& to, float factor, const float4& x) {
  to.x = fmaf(factor, x.x, to.x);
  to.y = fmaf(factor, x.y, to.y);
  to.z = fmaf(factor, x.z, to.z);
  to.w = fmaf(factor, x.w, to.w);
}

// Adds up what the lanes of a warp have that work on the same columns.
__device__ __forceinline__ void add_rows(float4& x) {
#pragma unroll
  for (int step = kLanes; step < kWarp; step *= 2) {
    x.x += __shfl_xor_sync(kAll, x.x, step);
    x.y += __shfl_xor_sync(kAll, x.y, step);
    x.z += __shfl_xor_sync(kAll, x.z, step);
    x.w += __shfl_xor_sync(kAll, x.w, step);
  }
}

// Leaves k S and q S of each warp in `sums`, [kWarps][2][kColumns]. held: the thread's part of the state.
template <int kPieces>
__device__ __forceinline__ void multiply_state(const float* mixed, const float4 (&held)[kPieces], float* sums) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  float4 with_k{0, 0, 0, 0}, with_q{0, 0, 0, 0};
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    const int i = n * kWarp + thread / kLanes;
    add(with_q, mixed[i], held[n]);
    add(with_k, mixed[kPieces * kWarp + i], held[n]);
  }
  add_rows(with_k);
  add_rows(with_q);
  if (lane < kLanes) {
    auto* to = reinterpret_cast<float4*>(sums + warp * 2 * kColumns);
    to[lane] = with_k;
    to[kLanes + lane] = with_q;
  }
}

// A warp norms the o of a head and multiplies it with silu(z).
template <class T>
__device__ __forceinline__ void write_head(const GatedDelta& p, const Block<T>& block, int member, int lane) {
  constexpr int kMost = GatedDelta::kMostSize / kWarp;
  const size_t first =
      (static_cast<size_t>(block.row) * p.value_heads + block.key_head * block.shared + member) * p.value_size;
  const T* gates = block.of(p.z) + member * p.value_size;
  float values[kMost], sum = 0;
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    const int i = n * kWarp + lane;
    values[n] = i < p.value_size ? rounded<T>(__ldcg(p.scratch + first + i)) : 0;
    sum = fmaf(values[n], values[n], sum);
  }
  const float scale = rsqrtf(warp_sum(sum) / static_cast<float>(p.value_size) + p.eps);
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    const int i = n * kWarp + lane;
    if (i >= p.value_size) break;
    const float normed = rounded<T>(values[n] * scale) * read_parameter<T>(p.norm, p.is_wide_norm, i);
    const float gate = load(__ldcg(gates + i));
    static_cast<T*>(p.out)[first + i] = store<T>((p.is_wide_norm ? normed : rounded<T>(normed)) * silu(gate));
  }
}

// kPieces: key_size / 32.
template <class T, int kPieces>
__global__ void __launch_bounds__(kThreads) delta_kernel(const GatedDelta p) {
  constexpr int kKeys = kPieces * kWarp;
  __shared__ float mixed[2 * kKeys];  // q and k behind the convolution
  alignas(16) __shared__ float values[kColumns], deltas[kColumns];
  alignas(16) __shared__ float sums[kWarps * 2 * kColumns];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const Block<T> block(p);
  prefetch(p, block);
  const float a_log = read_parameter<T>(p.a_log, p.is_wide_a_log, block.head);
  const float dt_bias = read_parameter<T>(p.dt_bias, p.is_wide_dt_bias, block.head);
  release_next();
  await_previous();

  float4 held[kPieces];
  const size_t own = static_cast<size_t>(thread / kLanes) * p.value_size + thread % kLanes * 4;
#pragma unroll
  for (int n = 0; n < kPieces; ++n)
    held[n] =
        __ldcg(reinterpret_cast<const float4*>(block.state + own + static_cast<size_t>(n) * kWarp * p.value_size));
  const float beta = rounded<T>(sigmoid(load(__ldcg(block.of(p.b) + block.member))));
  const float decay = expf(-expf(a_log) * softplus(load(__ldcg(block.of(p.a) + block.member)) + dt_bias));
  for (int i = thread; i < 2 * kKeys + kColumns; i += kThreads) {
    const Mixed<T> from = mixed_of(p, block, i);
    T inputs[kMostTaps];
    from.channel.read(p.taps, __ldcg(from.newest), inputs);
    const float x = rounded<T>(silu(from.channel.convolved(p.taps, 0, inputs)));
    if (i < 2 * kKeys) {
      mixed[i] = x;  // the other blocks of this head of keys may not have read these inputs yet
    } else {
      values[i - 2 * kKeys] = x;
      from.channel.write(p.taps, inputs);
    }
  }
  __syncthreads();
  const Lengths lengths = find_lengths<kKeys>(mixed, lane);
  multiply_state(mixed, held, sums);
  __syncthreads();
  if (thread < kColumns) {
    float with_k = 0, with_q = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      with_k += sums[other * 2 * kColumns + thread];
      with_q += sums[(other * 2 + 1) * kColumns + thread];
    }
    const float delta = beta * (values[thread] - decay * lengths.k * with_k);
    deltas[thread] = lengths.k * delta;
    p.scratch[(static_cast<size_t>(block.row) * p.value_heads + block.head) * p.value_size + block.column + thread] =
        decay * lengths.q * with_q + lengths.product * delta;
  }
  unsigned* cell = p.block_counts + static_cast<size_t>(block.row) * p.key_heads + block.key_head;
  const unsigned before = count_block(cell, block.peers(p));
  const float4 update = *reinterpret_cast<const float4*>(deltas + thread % kLanes * 4);
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    float4 next{decay * held[n].x, decay * held[n].y, decay * held[n].z, decay * held[n].w};
    add(next, mixed[kKeys + n * kWarp + thread / kLanes], update);
    *reinterpret_cast<float4*>(block.state + own + static_cast<size_t>(n) * kWarp * p.value_size) = next;
  }
  if (!is_last_block(before, block.peers(p))) return;
  for (int i = thread; i < 2 * kKeys; i += kThreads) {
    const Mixed<T> from = mixed_of(p, block, i);
    T inputs[kMostTaps];
    from.channel.read(p.taps, __ldcg(from.newest), inputs);
    from.channel.write(p.taps, inputs);
  }
  for (int member = warp; member < block.shared; member += kWarps) write_head(p, block, member, lane);
}

template <class T>
void run(const GatedDelta& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.value_heads * (p.value_size / kColumns));
  auto with = [&]<int kPieces>() {
    launch_early("launching gated_delta", delta_kernel<T, kPieces>,
                 {dim3(blocks, static_cast<unsigned>(p.rows)), dim3(kThreads), stream}, p);
  };
  switch (p.key_size / kWarp) {
    case 1:
      return with.template operator()<1>();
    case 2:
      return with.template operator()<2>();
    case 3:
      return with.template operator()<3>();
    case 4:
      return with.template operator()<4>();
    case 5:
      return with.template operator()<5>();
    case 6:
      return with.template operator()<6>();
    case 7:
      return with.template operator()<7>();
    default:
      return with.template operator()<8>();
  }
}

}  // namespace

void gated_delta(const GatedDelta& p, DType dtype, Stream to) {
  auto is_size = [](int size) { return size >= kWarp && size <= GatedDelta::kMostSize && size % kWarp == 0; };
  if (dtype == DType::f32) throw std::invalid_argument("gated_delta: fp32 is not served");
  if (!is_size(p.key_size) || !is_size(p.value_size))
    throw std::invalid_argument("gated_delta: the size of a head must be a multiple of 32, up to 256");
  if (p.taps < 2 || p.taps > kMostTaps) throw std::invalid_argument("gated_delta: a convolution of 2 to 8 inputs");
  if (p.key_heads < 1 || p.value_heads < p.key_heads || p.value_heads % p.key_heads != 0)
    throw std::invalid_argument("gated_delta: heads of values must be a multiple of those of keys");
  if (p.rows > UINT16_MAX) throw std::invalid_argument("gated_delta: more rows than a CUDA grid has blocks");
  if ((reinterpret_cast<uintptr_t>(p.states) | reinterpret_cast<uintptr_t>(p.then)) % 16 != 0)
    throw std::invalid_argument("gated_delta: addresses must be multiples of 16");
  if (p.rows < 1) return;
  const OnStream stream(to);
  if (dtype == DType::bf16) run<__nv_bfloat16>(p, stream);
  else run<__half>(p, stream);
}

}  // namespace ktinject::cuda
