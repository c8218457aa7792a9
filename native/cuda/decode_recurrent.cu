// Mamba-2: a thread block has kValues values of a head, with their rows of its state, and a warp some of these rows,
// each as long as the 32 lanes. A row needs no other one: it is read, moved on, multiplied with C, and written.
//
// The blocks of a group of heads count when they are done with the inputs of the convolution and have left their y in
// `scratch`. The last one moves the inputs of B and C on, and norms the group's y.
#include "cuda/decode_recurrent.hpp"

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

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kValues = Mamba2::kValues;
constexpr int kRows = kValues / kWarps;  // of the state, that a warp works on

// What a block works on.
struct Block {
  int row, head, first, group;  // first: of the head's values
  unsigned peers;               // blocks that work on the group
  float* state;                 // of its first value

  __device__ __forceinline__ explicit Block(const Mamba2& p) {
    const int splits = p.head_size / kValues, shared = p.heads / p.groups;
    row = static_cast<int>(blockIdx.y);
    head = static_cast<int>(blockIdx.x) / splits;
    first = static_cast<int>(blockIdx.x) % splits * kValues;
    group = head / shared;
    peers = static_cast<unsigned>(shared * splits);
    state = p.states + ((static_cast<size_t>(row) * p.heads + head) * p.head_size + first) * p.state_size;
  }
};

// A channel of the convolution: first B's of the block's group, then C's, then x's of its values.
__device__ __forceinline__ int index_of(const Mamba2& p, const Block& block, int i) {
  const int values = p.heads * p.head_size;
  if (i < p.state_size) return values + block.group * p.state_size + i;
  if (i < 2 * p.state_size) return values + (p.groups + block.group - 1) * p.state_size + i;
  return block.head * p.head_size + block.first + i - 2 * p.state_size;
}

__device__ __forceinline__ int channels(const Mamba2& p) { return p.heads * p.head_size + 2 * p.groups * p.state_size; }

template <class T>
__device__ __forceinline__ Channel<T> channel_of(const Mamba2& p, const Block& block, int index) {
  return {p.inputs, p.taps_weight, channels(p), block.row, index, p.taps};
}

template <class T>
__device__ __forceinline__ T newest(const Mamba2& p, const Block& block, int index) {
  return read_written(static_cast<const T*>(p.mixed) + block.row * p.stride + index);
}

// Fetches into L2 what the block reads, while the kernel before still runs.
template <class T>
__device__ __forceinline__ void prefetch(const Mamba2& p, const Block& block) {
  constexpr int kFloats = static_cast<int>(kLine / sizeof(float));
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread * kFloats; i < kValues * p.state_size; i += kThreads * kFloats) prefetch_line(block.state + i);
  // A line has the taps of several channels.
  const int step = static_cast<int>(kLine / sizeof(T)) / p.taps;
  for (int i = thread * step; i < 2 * p.state_size + kValues; i += kThreads * step)
    channel_of<T>(p, block, index_of(p, block, i)).prefetch();
  if (thread == 0 && p.then != nullptr)
    prefetch_share(p.then, p.then_bytes, static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x),
                   static_cast<int>(gridDim.x * gridDim.y));
}

// Leaves B, C and x behind the convolution in `mixed`. Those of x move on; other blocks may not have read the others
// yet.
template <class T>
__device__ __forceinline__ void convolve(const Mamba2& p, const Block& block, float* mixed) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * p.state_size + kValues; i += kThreads) {
    const int index = index_of(p, block, i);
    const Channel<T> channel = channel_of<T>(p, block, index);
    const float bias = p.taps_bias == nullptr ? 0 : load(static_cast<const T*>(p.taps_bias)[index]);
    T inputs[kMostTaps];
    channel.read(p.taps, newest<T>(p, block, index), inputs);
    mixed[i] = rounded<T>(silu(channel.convolved(p.taps, bias, inputs)));
    if (i >= 2 * p.state_size) channel.write(p.taps, inputs);
  }
}

// All threads call it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[kWarps];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float all = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) all += sums[warp];
  return all;
}

// The last block of a group norms its y silu(z).
template <class T>
__device__ __forceinline__ void write_group(const Mamba2& p, const Block& block) {
  const int size = p.heads / p.groups * p.head_size, first = block.group * size;
  const size_t row = static_cast<size_t>(block.row) * p.heads * p.head_size;
  const T* gates = static_cast<const T*>(p.z) + block.row * p.stride;
  auto gated = [&](int i) { return __ldcg(p.scratch + row + i) * silu(load(read_written(gates + i))); };
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads) {
    const float value = gated(first + i);
    sum = fmaf(value, value, sum);
  }
  const float scale = rsqrtf(block_sum(sum) / static_cast<float>(size) + p.eps);
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kThreads)
    static_cast<T*>(p.out)[row + first + i] =
        store<T>(rounded<T>(gated(first + i) * scale) * read_parameter<T>(p.norm, p.is_wide_norm, first + i));
}

// kPieces: state_size / 32.
template <class T, int kPieces>
__global__ void __launch_bounds__(kThreads) mamba2_kernel(const Mamba2 p) {
  constexpr int kState = kPieces * kWarp;
  __shared__ float mixed[2 * kState + kValues];  // B, C and x
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const Block block(p);
  prefetch<T>(p, block);
  const float a = -expf(read_parameter<T>(p.a_log, p.is_wide_a_log, block.head));
  const float dt_bias = rounded<T>(read_parameter<T>(p.dt_bias, p.is_wide_dt_bias, block.head));
  const float d = read_parameter<T>(p.d, p.is_wide_d, block.head);
  release_next();
  await_previous();

  float held[kRows][kPieces];
  float* own = block.state + warp * kRows * kState + lane;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int n = 0; n < kPieces; ++n) held[r][n] = __ldcg(own + r * kState + n * kWarp);
  const float given = load(read_written(static_cast<const T*>(p.dt) + block.row * p.stride + block.head));
  const float dt = rounded<T>(softplus(rounded<T>(given + dt_bias))), decay = expf(dt * a);
  convolve<T>(p, block, mixed);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int value = warp * kRows + r;
    const float x = mixed[2 * kState + value];
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kPieces; ++n) {
      const int i = n * kWarp + lane;
      held[r][n] = fmaf(held[r][n], decay, rounded<T>(rounded<T>(dt * mixed[i]) * x));
      sum = fmaf(rounded<T>(held[r][n]), mixed[kState + i], sum);
    }
    const float y = rounded<T>(warp_sum(sum)), skipped = p.is_wide_d ? x * d : rounded<T>(x * d);
    if (lane == 0)
      p.scratch[(static_cast<size_t>(block.row) * p.heads + block.head) * p.head_size + block.first + value] =
          rounded<T>(y + skipped);
  }
  unsigned* cell = p.block_counts + static_cast<size_t>(block.row) * p.groups + block.group;
  const unsigned before = count_block(cell, block.peers);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int n = 0; n < kPieces; ++n) own[r * kState + n * kWarp] = held[r][n];
  if (!is_last_block(before, block.peers)) return;
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kState; i += kThreads) {
    const int index = index_of(p, block, i);
    const Channel<T> channel = channel_of<T>(p, block, index);
    T inputs[kMostTaps];
    channel.read(p.taps, newest<T>(p, block, index), inputs);
    channel.write(p.taps, inputs);
  }
  write_group<T>(p, block);
}

template <class T>
__global__ void __launch_bounds__(kThreads) short_convolution_kernel(const ShortConvolution p) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x), row = static_cast<int>(blockIdx.y);
  const Channel<T> channel(p.inputs, p.taps_weight, p.n, row, i < p.n ? i : 0, p.taps);
  channel.prefetch();
  release_next();
  await_previous();
  if (i >= p.n) return;
  const T* projected = static_cast<const T*>(p.projected) + row * p.stride + i;
  const float before = load(read_written(projected)), behind = load(read_written(projected + p.n));
  T inputs[kMostTaps];
  channel.read(p.taps, store<T>(before * load(read_written(projected + 2 * p.n))), inputs);
  const float bias = p.taps_bias == nullptr ? 0 : load(static_cast<const T*>(p.taps_bias)[i]);
  static_cast<T*>(p.out)[static_cast<size_t>(row) * p.n + i] =
      store<T>(behind * channel.convolved(p.taps, bias, inputs));
  channel.write(p.taps, inputs);
}

void check(int rows, int taps, DType dtype, const std::string& name) {
  if (dtype == DType::f32) throw std::invalid_argument(name + ": fp32 is not served");
  if (taps < 2 || taps > kMostTaps) throw std::invalid_argument(name + ": a convolution of 2 to 8 inputs");
  if (rows > UINT16_MAX) throw std::invalid_argument(name + ": more rows than a CUDA grid has blocks");
}

template <class T>
void run(const Mamba2& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.heads * (p.head_size / kValues));
  auto with = [&]<int kPieces>() {
    launch_early("launching mamba2", mamba2_kernel<T, kPieces>,
                 {dim3(blocks, static_cast<unsigned>(p.rows)), dim3(kThreads), stream}, p);
  };
  switch (p.state_size / kWarp) {
    case 1:
      return with.template operator()<1>();
    case 2:
      return with.template operator()<2>();
    case 4:
      return with.template operator()<4>();
    default:
      return with.template operator()<8>();
  }
}

}  // namespace

void mamba2(const Mamba2& p, DType dtype, Stream to) {
  check(p.rows, p.taps, dtype, "mamba2");
  if (p.state_size != 32 && p.state_size != 64 && p.state_size != 128 && p.state_size != 256)
    throw std::invalid_argument("mamba2: a state must have 32, 64, 128 or 256 values");
  if (p.head_size < kValues || p.head_size % kValues != 0)
    throw std::invalid_argument("mamba2: the size of a head must be a multiple of 32");
  if (p.groups < 1 || p.heads < p.groups || p.heads % p.groups != 0)
    throw std::invalid_argument("mamba2: heads must be a multiple of groups");
  if (reinterpret_cast<uintptr_t>(p.then) % 16 != 0)
    throw std::invalid_argument("mamba2: addresses must be multiples of 16");
  if (p.rows < 1) return;
  const OnStream stream(to);
  if (dtype == DType::bf16) run<__nv_bfloat16>(p, stream);
  else run<__half>(p, stream);
}

void short_convolution(const ShortConvolution& p, DType dtype, Stream to) {
  check(p.rows, p.taps, dtype, "short_convolution");
  if (p.rows < 1 || p.n < 1) return;
  const OnStream stream(to);
  auto with = [&]<class T>(T) {
    launch_early("launching short_convolution", short_convolution_kernel<T>,
                 {dim3(static_cast<unsigned>((p.n + kThreads - 1) / kThreads), static_cast<unsigned>(p.rows)),
                  dim3(kThreads), stream},
                 p);
  };
  if (dtype == DType::bf16) with(__nv_bfloat16{});
  else with(__half{});
}

}  // namespace ktinject::cuda
