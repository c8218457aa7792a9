// A warp rotates a query head. One more block writes the cache, and norms the latent with all its threads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>

#include "cuda/decode_ops.hpp"
#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMostPairs = 4;  // that a lane turns

// Rotates x [rope] to `to`, which may be x; by one warp.
template <class T>
__device__ void rotate(const Latent& p, const T* x, T* to, const T* cos, const T* sin) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, half = p.rope / 2;
  float a[kMostPairs] = {}, b[kMostPairs] = {};
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = j * kWarp + lane;
    if (i >= half) break;
    a[j] = load(read_written(x + (p.turns_neighbours ? 2 * i : i)));
    b[j] = load(read_written(x + (p.turns_neighbours ? 2 * i + 1 : i + half)));
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kMostPairs; ++j) {
    const int i = j * kWarp + lane;
    if (i >= half) break;
    const float c = load(read_written(cos + i)), s = load(read_written(sin + i));
    to[i] = store<T>(rounded<T>(a[j] * c) - rounded<T>(b[j] * s));
    to[i + half] = store<T>(rounded<T>(b[j] * c) + rounded<T>(a[j] * s));
  }
}

template <class T>
__global__ void __launch_bounds__(kWarps* kWarp) latent_kernel(const Latent p) {
  __shared__ float sums[kWarps];
  release_next();
  await_previous();
  const int warp = static_cast<int>(threadIdx.x) / kWarp, row = static_cast<int>(blockIdx.y);
  const auto* cos = static_cast<const T*>(p.cos) + row * p.rotation_stride;
  const auto* sin = static_cast<const T*>(p.sin) + row * p.rotation_stride;
  if (blockIdx.x + 1 < gridDim.x) {
    const int head = static_cast<int>(blockIdx.x) * kWarps + warp;
    if (head >= p.heads) return;
    T* q = static_cast<T*>(p.q) + row * p.q_stride + static_cast<int64_t>(head) * (p.nope + p.rope) + p.nope;
    return rotate(p, q, q, cos, sin);
  }
  const int64_t first = __ldcg(reinterpret_cast<const long long*>(p.cache_position));
  const int64_t position = first + (p.is_consecutive ? row : 0);
  const auto* kv = static_cast<const T*>(p.kv) + row * p.kv_stride;
  if (warp == 0)
    rotate(p, kv + p.rank, static_cast<T*>(p.values) + row * p.values_stride + position * p.rope, cos, sin);
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < p.rank; i += kWarps * kWarp) {
    const float value = load(read_written(kv + i));
    sum = fmaf(value, value, sum);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) sums[warp] = sum;
  __syncthreads();
  float all = 0;
  for (const float other : sums) all += other;
  const float scale = rsqrtf(all / static_cast<float>(p.rank) + p.eps);
  T* keys = static_cast<T*>(p.keys) + row * p.keys_stride + position * p.rank;
  for (int i = static_cast<int>(threadIdx.x); i < p.rank; i += kWarps * kWarp)
    keys[i] = store<T>(load(static_cast<const T*>(p.norm)[i]) * rounded<T>(load(read_written(kv + i)) * scale));
}

}  // namespace

void latent(const Latent& p, DType dtype, Stream stream) {
  if (dtype == DType::f32) throw std::invalid_argument("latent: fp32 is not served");
  if (p.rows < 1 || p.heads < 1 || p.rank < 1 || p.nope < 0 || p.rope < 2 || p.rope % 2 != 0 ||
      p.rope > 2 * kMostPairs * kWarp)
    throw std::invalid_argument("latent: rotated values are even, up to " + std::to_string(2 * kMostPairs * kWarp));
  const OnStream on(stream);
  const Launch launch{dim3(static_cast<unsigned>((p.heads + kWarps - 1) / kWarps + 1), static_cast<unsigned>(p.rows)),
                      dim3(kWarps * kWarp), on};
  if (dtype == DType::bf16) launch_early("launching latent", latent_kernel<__nv_bfloat16>, launch, p);
  else launch_early("launching latent", latent_kernel<__half>, launch, p);
}

}  // namespace ktinject::cuda
