#include "cuda/decode_choose.hpp"

#include <algorithm>
#include <stdexcept>

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 64;   // a row
constexpr int kMostRows = 65535;  // of a choice: a dimension of a grid

// Keys in the order of scores. Of equal scores the first token has the greatest key (-0 equals 0). NaN is the greatest
// of all, as in PyTorch. No key is zero.
__device__ uint64_t key_of(float score, int token) {
  const uint32_t bits = score == 0 ? 0u : __float_as_uint(score);
  const uint32_t order = isnan(score) ? ~0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | static_cast<uint32_t>(~token);
}

__global__ void __launch_bounds__(kThreads) choose_kernel(const Choice p) {
  __shared__ uint64_t found[kThreads / kWarp];
  __shared__ bool is_last;
  release_next();
  await_previous();
  const int row = static_cast<int>(blockIdx.y);
  const float* scores = p.scores + static_cast<size_t>(row) * p.vocab;
  const float* noise = p.noise == nullptr ? nullptr : p.noise + static_cast<size_t>(row) * p.vocab;
  uint64_t best = 0;
  for (int at = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); at < p.vocab;
       at += static_cast<int>(gridDim.x) * kThreads) {
    // Greatest where exp(score) / noise is.
    const float score = noise == nullptr ? __ldcg(scores + at) : __ldcg(scores + at) - logf(__ldcg(noise + at));
    best = max(best, key_of(score, at));
  }
  for (int step = kWarp / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAll, best, step));
  if (threadIdx.x % kWarp == 0) found[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (const uint64_t other : found) best = max(best, other);
    atomicMax(reinterpret_cast<unsigned long long*>(p.best + row), best);
    __threadfence();
    const unsigned all = gridDim.x * gridDim.y - 1;
    is_last = atomicInc(p.block_counts, all) == all;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = static_cast<int>(threadIdx.x); i < p.rows; i += kThreads) {
    int64_t token = static_cast<uint32_t>(~__ldcg(reinterpret_cast<const unsigned long long*>(p.best + i)));
    p.best[i] = 0;
    const bool is_alive = __ldcg(reinterpret_cast<const long long*>(p.result) + p.rows + i) == 1;
    if (p.pad >= 0 && !is_alive) token = p.pad;
    p.result[i] = p.ids[i] = token;
    if (p.ends != nullptr && p.ends[min(token, static_cast<int64_t>(p.vocab - 1))]) p.result[p.rows + i] = 0;
    if (p.seen != nullptr) p.seen[static_cast<size_t>(i) * (p.vocab + 1) + min(token, int64_t{p.vocab})] = true;
  }
  if (threadIdx.x == 0) *p.length += 1;
}

__global__ void advance_kernel(int64_t* cache_position, int64_t* positions, bool* mask, int rows, int64_t mask_stride) {
  release_next();
  await_previous();
  const int row = static_cast<int>(threadIdx.x);
  const int64_t next = __ldcg(reinterpret_cast<const long long*>(cache_position)) + 1;
  __syncthreads();
  if (row >= rows) return;
  if (row == 0) *cache_position = next;
  positions[row] = __ldcg(reinterpret_cast<const long long*>(positions) + row) + 1;
  if (next < mask_stride) mask[row * mask_stride + next] = true;
}

template <class T>
__global__ void rotation_kernel(const int64_t* positions, const float* frequencies, T* cos, T* sin, int half,
                                float scale) {
  release_next();
  await_previous();
  const int row = static_cast<int>(blockIdx.x);
  const auto position = static_cast<float>(__ldcg(reinterpret_cast<const long long*>(positions) + row));
  for (int i = static_cast<int>(threadIdx.x); i < half; i += static_cast<int>(blockDim.x)) {
    const float angle = position * frequencies[i];
    const size_t at = static_cast<size_t>(row) * 2 * half + i;
    cos[at] = cos[at + half] = store<T>(cosf(angle) * scale);
    sin[at] = sin[at + half] = store<T>(sinf(angle) * scale);
  }
}

}  // namespace

void choose(const Choice& p, Stream stream) {
  if (p.rows < 1 || p.rows > kMostRows || p.vocab < 1)
    throw std::invalid_argument("choose: 1 to " + std::to_string(kMostRows) + " rows");
  const OnStream on(stream);
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (p.vocab + 4 * kThreads - 1) / (4 * kThreads)));
  launch_early("launching choose", choose_kernel, {dim3(blocks, static_cast<unsigned>(p.rows)), dim3(kThreads), on}, p);
}

void advance(int64_t* cache_position, int64_t* positions, bool* mask, int rows, int64_t mask_stride, Stream stream) {
  if (rows < 1 || rows > 1024) throw std::invalid_argument("advance: 1 to 1024 rows");
  const OnStream on(stream);
  launch_early("launching advance", advance_kernel, {dim3(1), dim3(static_cast<unsigned>(rows)), on}, cache_position,
               positions, mask, rows, mask_stride);
}

void rotation(const int64_t* positions, const float* frequencies, void* cos, void* sin, int rows, int half, float scale,
              DType dtype, Stream stream) {
  if (rows < 1 || half < 1) throw std::invalid_argument("rotation: nothing to rotate");
  const OnStream on(stream);
  auto with = [&]<class T>(T) {
    launch_early("launching rotation", rotation_kernel<T>,
                 {dim3(static_cast<unsigned>(rows)), dim3(static_cast<unsigned>(std::min(128, half))), on}, positions,
                 frequencies, static_cast<T*>(cos), static_cast<T*>(sin), half, scale);
  };
  if (dtype == DType::bf16) with(__nv_bfloat16{});
  else if (dtype == DType::f16) with(__half{});
  else with(float{});
}

}  // namespace ktinject::cuda
