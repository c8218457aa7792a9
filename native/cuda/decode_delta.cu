// A thread block has kColumns columns of the state of one head, all key_size rows of them, so k S and q S are sums
// within the block. It reads its part of the state once and writes it once:
//
//   o = q (decay S + k delta) = decay (q S) + (q k) delta,    delta = beta (v - decay (k S))
//
// Both sums need the state before the update only. A warp reads 4 rows at a time, 8 lanes each. Every block computes
// the convolution for q and k of its head again, which is little.
//
// The blocks of a head of keys count when they are done with the inputs of the convolution and have left their o, and
// the sum of its squares, in `scratch`. The last one moves the inputs of q and k on, and norms the heads' o.
//
// Code that runs once takes as long as fetching it takes. So a thread has two neighbouring channels of the convolution,
// whose inputs are 16 bytes where there are four of each, and what is left for the last block is little.
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

// What a block works on, and where its tensors lie. The grid is (parts of a head's columns, heads of values that share
// a head of keys, rows times heads of keys).
template <class T>
struct Block {
  int row, key_head, head, column;  // head: of values; the first column
  float* state;                     // the first row of the columns

  __device__ __forceinline__ explicit Block(const GatedDelta& p) {
    row = static_cast<int>(blockIdx.z) / p.key_heads;
    key_head = static_cast<int>(blockIdx.z) - row * p.key_heads;
    head = key_head * static_cast<int>(gridDim.y) + static_cast<int>(blockIdx.y);
    column = static_cast<int>(blockIdx.x) * kColumns;
    const size_t index = static_cast<size_t>(row) * p.value_heads + head;
    state = p.states + index * p.key_size * p.value_size + column;
  }
  __device__ __forceinline__ const T* of(const DeltaInput& input) const {
    return static_cast<const T*>(input.data) + row * input.row_stride + key_head * input.head_stride;
  }
};

// Neighbouring channels of q, k or v: their new inputs, and the first one's index among all channels.
template <class T>
struct Mixed {
  const T* newest;
  int index;
};

// i: first q's channels, then k's, then the block's columns of v.
template <class T>
__device__ __forceinline__ Mixed<T> mixed_of(const GatedDelta& p, const Block<T>& block, int i) {
  if (i < p.key_size) return {block.of(p.q) + i, block.key_head * p.key_size + i};
  const int k = i - p.key_size;
  if (k < p.key_size) return {block.of(p.k) + k, (p.key_heads + block.key_head) * p.key_size + k};
  const int at = block.column + k - p.key_size;
  return {block.of(p.v) + static_cast<int>(blockIdx.y) * p.value_size + at,
          2 * p.key_heads * p.key_size + block.head * p.value_size + at};
}

// The inputs of two channels of the convolution, or the factors of these: kTaps of each; if that is 0, as many as the
// layer has.
template <class T, int kTaps>
struct Window {
  static constexpr int kMost = kTaps > 0 ? kTaps : kMostTaps;
  static constexpr bool kIsWhole = kTaps * 2 * sizeof(T) == sizeof(uint4);
  T values[2][kMost];

  __device__ __forceinline__ void read(const T* from, int taps) {
    if constexpr (kIsWhole) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(from));
      memcpy(values, &words, sizeof words);
    } else {
      for_each(taps, [&](int c, int j) { values[c][j] = read_written(from + c * taps + j); });
    }
  }
  __device__ __forceinline__ void write(T* to, int taps) const {
    if constexpr (kIsWhole) {
      uint4 words;
      memcpy(&words, values, sizeof words);
      *reinterpret_cast<uint4*>(to) = words;
    } else {
      for_each(taps, [&](int c, int j) { to[c * taps + j] = values[c][j]; });
    }
  }
  // Leaves the oldest inputs out.
  __device__ __forceinline__ void move_on(const T (&newest)[2], int taps) {
    for_each(taps, [&](int c, int j) { values[c][j] = j + 1 < taps ? values[c][min(j + 1, kMost - 1)] : newest[c]; });
  }
  __device__ __forceinline__ float convolved(const Window& factors, int c, int taps) const {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kMost; ++j)
      if (kTaps > 0 || j < taps) sum = fmaf(load(values[c][j]), load(factors.values[c][j]), sum);
    return rounded<T>(sum);
  }

 private:
  template <class Use>
  static __device__ __forceinline__ void for_each(int taps, Use&& use) {
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int j = 0; j < kMost; ++j)
        if (kTaps > 0 || j < taps) use(c, j);
  }
};

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
  const float q = rsqrtf(warp_sum(qq) + kLengthEpsilon) * (1 / sqrtf(static_cast<float>(kKeys)));
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

// Where the o of a head of values lies: so many values, then the sums of the squares of their parts.
__device__ __forceinline__ float* scratch_of(const GatedDelta& p, int row, int head) {
  return p.scratch + (static_cast<size_t>(row) * p.value_heads + head) * (p.value_size + GatedDelta::kMostParts);
}

// The first warp: deltas, times the factor of k, and o of the block's columns, a lane each. sums: what
// `multiply_state` has left. values: of the block's columns of v.
template <class T>
__device__ __forceinline__ void find_delta(const GatedDelta& p, const Block<T>& block, const float* sums,
                                           const float* values, const Lengths& lengths, float beta, float decay,
                                           float* deltas, int lane) {
  float with_k = 0, with_q = 0;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    with_k += sums[other * 2 * kColumns + lane];
    with_q += sums[(other * 2 + 1) * kColumns + lane];
  }
  const float delta = beta * (values[lane] - decay * lengths.k * with_k);
  deltas[lane] = lengths.k * delta;
  const float o = rounded<T>(decay * lengths.q * with_q + lengths.product * delta), square = warp_sum(o * o);
  float* scratch = scratch_of(p, block.row, block.head);
  scratch[block.column + lane] = o;
  if (lane == 0) scratch[p.value_size + static_cast<int>(blockIdx.x)] = square;
}

// Norms the o of the heads of a head of keys, and multiplies them with silu(z).
template <class T>
__device__ __forceinline__ void write_heads(const GatedDelta& p, const Block<T>& block) {
  const int parts = static_cast<int>(gridDim.x), heads = static_cast<int>(gridDim.y);
  const T* gates = block.of(p.z);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < heads * p.value_size; i += kThreads) {
    const int member = i / p.value_size, at = i - member * p.value_size, head = block.key_head * heads + member;
    const float* scratch = scratch_of(p, block.row, head);
    const float gate = load(read_written(gates + i)), o = __ldcg(scratch + at);
    const float factor = read_parameter<T>(p.norm, p.is_wide_norm, at);
    float sum = 0;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) sum += __ldcg(scratch + p.value_size + part);
    const float normed = rounded<T>(o * rsqrtf(__fdividef(sum, static_cast<float>(p.value_size)) + p.eps)) * factor;
    const size_t first = (static_cast<size_t>(block.row) * p.value_heads + head) * p.value_size;
    static_cast<T*>(p.out)[first + at] = store<T>((p.is_wide_norm ? normed : rounded<T>(normed)) * silu(gate));
  }
}

// kPieces: key_size / 32. kTaps: 4, or 0 for any number.
template <class T, int kPieces, int kTaps>
__global__ void __launch_bounds__(kThreads) delta_kernel(const GatedDelta p) {
  constexpr int kKeys = kPieces * kWarp, kMixed = 2 * kKeys + kColumns;
  constexpr int kTurns = (kMixed / 2 + kThreads - 1) / kThreads;  // pairs of channels of a thread
  __shared__ float mixed[kMixed];                                 // q, k and columns of v behind the convolution
  alignas(16) __shared__ float deltas[kColumns];
  alignas(16) __shared__ float sums[kWarps * 2 * kColumns];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int taps = kTaps > 0 ? kTaps : p.taps;
  const Block<T> block(p);
  if (thread < kKeys) prefetch_line(block.state + static_cast<size_t>(thread) * p.value_size);
  Window<T, kTaps> windows[kTurns], factors[kTurns];
  Mixed<T> channels[kTurns];
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int i = 2 * (n * kThreads + thread);
    if (i >= kMixed) break;
    channels[n] = mixed_of(p, block, i);
    factors[n].read(static_cast<const T*>(p.taps_weight) + static_cast<size_t>(channels[n].index) * taps, taps);
  }
  if (thread == 0 && p.then != nullptr) {
    const unsigned each = gridDim.x * gridDim.y;
    prefetch_share(p.then, p.then_bytes, static_cast<int>(blockIdx.z * each + blockIdx.y * gridDim.x + blockIdx.x),
                   static_cast<int>(gridDim.z * each));
  }
  const float rate = -expf(read_parameter<T>(p.a_log, p.is_wide_a_log, block.head));
  const float dt_bias = read_parameter<T>(p.dt_bias, p.is_wide_dt_bias, block.head);
  release_next();
  await_previous();

  float4 held[kPieces];
  const size_t own = static_cast<size_t>(thread / kLanes) * p.value_size + thread % kLanes * 4;
#pragma unroll
  for (int n = 0; n < kPieces; ++n)
    held[n] =
        __ldcg(reinterpret_cast<const float4*>(block.state + own + static_cast<size_t>(n) * kWarp * p.value_size));
  const float b = load(read_written(block.of(p.b) + blockIdx.y)), a = load(read_written(block.of(p.a) + blockIdx.y));
  const int all = 2 * p.key_heads * p.key_size + p.value_heads * p.value_size;
  auto inputs_of = [&](int n) {
    return static_cast<T*>(p.inputs) + (static_cast<size_t>(block.row) * all + channels[n].index) * taps;
  };
#pragma unroll
  for (int n = 0; n < kTurns; ++n) {
    const int i = 2 * (n * kThreads + thread);
    if (i >= kMixed) break;
    const T newest[2] = {read_written(channels[n].newest), read_written(channels[n].newest + 1)};
    windows[n].read(inputs_of(n), taps);
    windows[n].move_on(newest, taps);
#pragma unroll
    for (int c = 0; c < 2; ++c) mixed[i + c] = rounded<T>(silu(windows[n].convolved(factors[n], c, taps)));
    // The other blocks of this head of keys may not have read the inputs of q and k yet.
    if (i >= 2 * kKeys) windows[n].write(inputs_of(n), taps);
  }
  const float beta = rounded<T>(sigmoid(b)), decay = expf(rate * softplus(a + dt_bias));
  __syncthreads();
  const Lengths lengths = find_lengths<kKeys>(mixed, lane);
  multiply_state(mixed, held, sums);
  __syncthreads();
  if (warp == 0) find_delta(p, block, sums, mixed + 2 * kKeys, lengths, beta, decay, deltas, lane);
  const unsigned peers = gridDim.x * gridDim.y, before = count_block(p.block_counts + blockIdx.z, peers);
  const float4 update = *reinterpret_cast<const float4*>(deltas + thread % kLanes * 4);
#pragma unroll
  for (int n = 0; n < kPieces; ++n) {
    float4 next{decay * held[n].x, decay * held[n].y, decay * held[n].z, decay * held[n].w};
    add(next, mixed[kKeys + n * kWarp + thread / kLanes], update);
    *reinterpret_cast<float4*>(block.state + own + static_cast<size_t>(n) * kWarp * p.value_size) = next;
  }
  if (!is_last_block(before, peers)) return;
#pragma unroll
  for (int n = 0; n < kTurns; ++n)
    if (2 * (n * kThreads + thread) < 2 * kKeys) windows[n].write(inputs_of(n), taps);
  write_heads(p, block);
}

template <class T>
void run(const GatedDelta& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.value_size / kColumns), static_cast<unsigned>(p.value_heads / p.key_heads),
                  static_cast<unsigned>(p.key_heads * p.rows));
  const bool is_aligned =
      (reinterpret_cast<uintptr_t>(p.inputs) | reinterpret_cast<uintptr_t>(p.taps_weight)) % sizeof(uint4) == 0;
  auto with = [&]<int kPieces>() {
    const bool has_four = p.taps == 4 && is_aligned;
    launch_early("launching gated_delta", has_four ? delta_kernel<T, kPieces, 4> : delta_kernel<T, kPieces, 0>,
                 {grid, dim3(kThreads), stream}, p);
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
  if (p.rows > UINT16_MAX / p.key_heads)
    throw std::invalid_argument("gated_delta: more rows than a CUDA grid has blocks");
  if ((reinterpret_cast<uintptr_t>(p.states) | reinterpret_cast<uintptr_t>(p.then)) % 16 != 0)
    throw std::invalid_argument("gated_delta: addresses must be multiples of 16");
  if (p.rows < 1) return;
  const OnStream stream(to);
  if (dtype == DType::bf16) run<__nv_bfloat16>(p, stream);
  else run<__half>(p, stream);
}

}  // namespace ktinject::cuda
