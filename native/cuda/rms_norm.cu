// A thread block takes a row. A thread takes eight values at a time if rows are aligned. Rows of up to 8 * kMostThreads
// values stay in registers between the sum and the scaling; longer ones are read again.
#include "cuda/rms_norm.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "cuda/on_device.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kMostThreads = 1024;

__device__ float to_float(float value) { return value; }
__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ float from_float(float value) {
  return value;
}
template <>
__device__ __half from_float(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Run {
  T values[kCount];
};

// W: of the weight.
template <class T, class W, int kCount>
__global__ void __launch_bounds__(kMostThreads) rms_norm_kernel(const RmsNorm p) {
  using Values = Run<T, kCount>;
  const size_t at = static_cast<size_t>(blockIdx.x) * p.n;
  const auto* row = reinterpret_cast<const Values*>(static_cast<const T*>(p.x) + at);
  const auto* scales = static_cast<const Run<W, kCount>*>(p.weight);
  auto* to = reinterpret_cast<Values*>(static_cast<T*>(p.out) + at);
  const int runs = p.n / kCount, first = static_cast<int>(threadIdx.x);
  Values own{};
  float sum = 0;
  for (int i = first; i < runs; i += static_cast<int>(blockDim.x)) {
    const Values values = row[i];
    if (i == first) own = values;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum = fmaf(to_float(values.values[j]), to_float(values.values[j]), sum);
  }
  __shared__ float sums[kMostThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) total += sums[warp];
  const float scale = rsqrtf(total / static_cast<float>(p.n) + p.epsilon);
  for (int i = first; i < runs; i += static_cast<int>(blockDim.x)) {
    Values values = i == first ? own : row[i];
    const Run<W, kCount> weights = scales[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float normed = to_float(values.values[j]) * scale;
      values.values[j] = from_float<T>((to_float(weights.values[j]) + p.offset) *
                                       (p.rounds_first ? to_float(from_float<T>(normed)) : normed));
    }
    to[i] = values;
  }
}

template <class T, class W>
void launch(const RmsNorm& p, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(T) > 8 ? 8 : 16 / sizeof(T);
  const auto aligned =
      (reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.weight) | reinterpret_cast<uintptr_t>(p.out)) %
          16 ==
      0;
  const bool wide = aligned && p.n % kCount == 0;
  const int runs = wide ? p.n / kCount : p.n;
  const auto threads = static_cast<unsigned>(std::min(kMostThreads, (runs + 31) / 32 * 32));
  const auto blocks = static_cast<unsigned>(p.rows);
  if (wide) rms_norm_kernel<T, W, kCount><<<blocks, threads, 0, stream>>>(p);
  else rms_norm_kernel<T, W, 1><<<blocks, threads, 0, stream>>>(p);
}

template <class T>
void launch(const RmsNorm& p, cudaStream_t stream) {
  if (p.is_wide_weight) launch<T, float>(p, stream);
  else launch<T, T>(p, stream);
}

}  // namespace

void rms_norm(const RmsNorm& p, DType dtype, Stream to) {
  if (p.rows == 0) return;
  if (p.rows > INT32_MAX) throw std::invalid_argument("rms_norm: more rows than a CUDA grid has blocks");
  const OnStream stream(to);
  if (dtype == DType::f32) launch<float>(p, stream);
  else if (dtype == DType::f16) launch<__half>(p, stream);
  else launch<__nv_bfloat16>(p, stream);
  check_cuda(cudaGetLastError(), "launching the normalisation");
}

}  // namespace ktinject::cuda
