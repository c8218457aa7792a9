// fn is read once a row, by as many thread blocks as it has runs of kColumns columns: a warp takes kEach of its
// outputs. Their sums are left in `scratch`. The last block of a row adds them up, always in the same order. One of its
// warps then normalises comb, a lane for each value, while the others collapse the streams.
#include "cuda/decode_streams.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/recurrent.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kStreams = HyperConnection::kStreams, kOutputs = HyperConnection::kOutputs;
constexpr int kColumns = HyperConnection::kColumns;
constexpr int kEach = kOutputs / kWarps;
constexpr int kPieces = kColumns / (4 * kWarp);
static_assert(kColumns == kThreads && kOutputs % kWarps == 0 && 2 * kStreams * kStreams == kWarp);

// Exact to fp32, unlike that of recurrent.cuh: what is summed up here counts in all layers that follow.
__device__ __forceinline__ float exact_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The sum of what the lanes hold that differ in the bits of `low` and `high`.
__device__ __forceinline__ float sum_over(float x, int low, int high) {
  x += __shfl_xor_sync(kAll, x, low);
  return x + __shfl_xor_sync(kAll, x, high);
}

// Weight o of a row, of w before the norm: scaled, and with its base.
__device__ __forceinline__ float weight_of(const HyperConnection& p, const float* w, float norm, int kind, int o) {
  return fmaf(w[o] * norm, p.scale[kind], p.base[o]);
}

// One warp; a row of comb is four lanes, and the upper half of the warp does the same again.
__device__ __forceinline__ void write_weights(const HyperConnection& p, const float* w, float norm, int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, at = lane % (kStreams * kStreams);
  if (lane < kStreams) p.post[row * kStreams + lane] = 2 * exact_sigmoid(weight_of(p, w, norm, 1, kStreams + lane));
  const float x = weight_of(p, w, norm, 2, 2 * kStreams + at);
  float largest = fmaxf(x, __shfl_xor_sync(kAll, x, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
  float value = expf(x - largest);
  value = value / sum_over(value, 1, 2) + p.eps;
  value = value / (sum_over(value, kStreams, 2 * kStreams) + p.eps);
  for (int i = 1; i < p.iterations; ++i) {
    value = value / (sum_over(value, 1, 2) + p.eps);
    value = value / (sum_over(value, kStreams, 2 * kStreams) + p.eps);
  }
  if (lane < kStreams * kStreams) p.comb[row * kStreams * kStreams + lane] = value;
}

// All warps but the first.
template <class T>
__device__ __forceinline__ void collapse(const HyperConnection& p, const float* w, float norm, int row) {
  constexpr int kValues = 16 / sizeof(T);
  const T* streams = static_cast<const T*>(p.streams) + static_cast<size_t>(row) * kStreams * p.n;
  T* out = static_cast<T*>(p.collapsed) + static_cast<size_t>(row) * p.n;
  float pre[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) pre[s] = exact_sigmoid(weight_of(p, w, norm, 0, s)) + p.eps;
  const int first = static_cast<int>(threadIdx.x) - kWarp, step = kThreads - kWarp;
  const int runs = p.n % kValues == 0 ? p.n / kValues : 0;
  for (int i = first; i < runs; i += step) {
    float sum[kValues] = {};
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      const uint4 words = __ldcg(reinterpret_cast<const uint4*>(streams + static_cast<size_t>(s) * p.n) + i);
      T values[kValues];
      memcpy(values, &words, sizeof values);
#pragma unroll
      for (int j = 0; j < kValues; ++j) sum[j] = fmaf(pre[s], load(values[j]), sum[j]);
    }
    T found[kValues];
#pragma unroll
    for (int j = 0; j < kValues; ++j) found[j] = store<T>(sum[j]);
    uint4 words;
    memcpy(&words, found, sizeof words);
    reinterpret_cast<uint4*>(out)[i] = words;
  }
  for (int i = runs * kValues + first; i < p.n; i += step) {
    float sum = 0;
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
      sum = fmaf(pre[s], load(read_written(streams + static_cast<size_t>(s) * p.n + i)), sum);
    out[i] = store<T>(sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) hyper_connection_kernel(const HyperConnection p) {
  __shared__ alignas(16) float x[kColumns];
  __shared__ float w[kOutputs + 1];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int row = static_cast<int>(blockIdx.y), blocks = static_cast<int>(gridDim.x);
  const int columns = kStreams * p.n, first = static_cast<int>(blockIdx.x) * kColumns;
  float4 weights[kEach][kPieces];
#pragma unroll
  for (int o = 0; o < kEach; ++o)
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int column = first + 4 * (i * kWarp + lane);
      const float* from = p.fn + static_cast<size_t>(warp * kEach + o) * columns + column;
      weights[o][i] = column < columns ? __ldg(reinterpret_cast<const float4*>(from)) : float4{};
    }
  release_next();
  await_previous();

  const int own = first + static_cast<int>(threadIdx.x);
  const T* streams = static_cast<const T*>(p.streams) + static_cast<size_t>(row) * columns;
  x[threadIdx.x] = own < columns ? load(read_written(streams + own)) : 0;
  __syncthreads();
  float sums[kEach] = {}, squares = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const float4 v = *reinterpret_cast<const float4*>(x + 4 * (i * kWarp + lane));
    squares = fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, fmaf(v.w, v.w, squares))));
#pragma unroll
    for (int o = 0; o < kEach; ++o) {
      const float4 f = weights[o][i];
      sums[o] = fmaf(v.x, f.x, fmaf(v.y, f.y, fmaf(v.z, f.z, fmaf(v.w, f.w, sums[o]))));
    }
  }
  float* left = p.scratch + (static_cast<size_t>(row) * blocks + blockIdx.x) * (kOutputs + 1);
#pragma unroll
  for (int o = 0; o < kEach; ++o) {
    const float sum = warp_sum(sums[o]);
    if (lane == 0) left[warp * kEach + o] = sum;
  }
  squares = warp_sum(squares);
  if (warp == 0 && lane == 0) left[kOutputs] = squares;
  const unsigned before = count_block(p.block_counts + row, static_cast<unsigned>(blocks));
  if (!is_last_block(before, static_cast<unsigned>(blocks))) return;

  const float* all = p.scratch + static_cast<size_t>(row) * blocks * (kOutputs + 1);
  for (int o = warp; o <= kOutputs; o += kWarps) {
    float sum = 0;
    for (int b = lane; b < blocks; b += kWarp) sum += __ldcg(all + b * (kOutputs + 1) + o);
    sum = warp_sum(sum);
    if (lane == 0) w[o] = sum;
  }
  __syncthreads();
  const float norm = rsqrtf(w[kOutputs] / static_cast<float>(columns) + p.norm_eps);
  if (warp == 0) write_weights(p, w, norm, row);
  else collapse<T>(p, w, norm, row);
}

template <class T>
__global__ void __launch_bounds__(kThreads) mix_streams_kernel(const MixStreams p) {
  __shared__ float weights[kStreams + kStreams * kStreams];
  release_next();
  await_previous();
  const int at = static_cast<int>(threadIdx.x), row = static_cast<int>(blockIdx.y);
  if (at < kStreams) weights[at] = rounded<T>(__ldcg(p.post + row * kStreams + at));
  else if (at < kStreams + kStreams * kStreams)
    weights[at] = rounded<T>(__ldcg(p.comb + row * kStreams * kStreams + at - kStreams));
  __syncthreads();
  const int i = static_cast<int>(blockIdx.x) * kThreads + at;
  if (i >= p.n) return;
  const size_t first = static_cast<size_t>(row) * kStreams * p.n + i;
  const T* streams = static_cast<const T*>(p.streams) + first;
  const float y = load(read_written(static_cast<const T*>(p.y) + static_cast<size_t>(row) * p.n + i));
  float x[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) x[s] = load(read_written(streams + static_cast<size_t>(s) * p.n));
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
    float mixed = 0;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) mixed = fmaf(weights[kStreams + s * kStreams + k], x[s], mixed);
    static_cast<T*>(p.out)[first + static_cast<size_t>(k) * p.n] =
        store<T>(rounded<T>(weights[k] * y) + rounded<T>(mixed));
  }
}

void check(int rows, int n, const char* name) {
  if (rows > UINT16_MAX) throw std::invalid_argument(std::string(name) + ": more rows than a CUDA grid has blocks");
  if (n > INT32_MAX / kOutputs) throw std::invalid_argument(std::string(name) + ": streams of too many values");
}

template <class Run>
void with_type(DType dtype, Run run) {
  if (dtype == DType::f32) run(float{});
  else if (dtype == DType::f16) run(__half{});
  else run(__nv_bfloat16{});
}

dim3 grid_of(int values, int rows) {
  return {static_cast<unsigned>((values + kThreads - 1) / kThreads), static_cast<unsigned>(rows)};
}

}  // namespace

void hyper_connection(const HyperConnection& p, DType dtype, Stream to) {
  check(p.rows, p.n, "hyper_connection");
  const auto addresses = reinterpret_cast<uintptr_t>(p.fn) | reinterpret_cast<uintptr_t>(p.streams) |
                         reinterpret_cast<uintptr_t>(p.collapsed);
  if (addresses % 16 != 0) throw std::invalid_argument("hyper_connection: addresses must be multiples of 16");
  if (p.iterations < 1) throw std::invalid_argument("hyper_connection: at least one iteration");
  if (p.rows < 1 || p.n < 1) return;
  const OnStream stream(to);
  with_type(dtype, [&]<class T>(T) {
    launch_early("launching hyper_connection", hyper_connection_kernel<T>,
                 {grid_of(kStreams * p.n, p.rows), dim3(kThreads), stream}, p);
  });
}

void mix_streams(const MixStreams& p, DType dtype, Stream to) {
  check(p.rows, p.n, "mix_streams");
  if (p.rows < 1 || p.n < 1) return;
  const OnStream stream(to);
  with_type(dtype, [&]<class T>(T) {
    launch_early("launching mix_streams", mix_streams_kernel<T>, {grid_of(p.n, p.rows), dim3(kThreads), stream}, p);
  });
}

}  // namespace ktinject::cuda
