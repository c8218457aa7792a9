// What the kernels of layers share whose tokens leave a state of fixed size: the short convolution of a step's token,
// and how the thread blocks of a group of heads find out which of them is the last.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/prefetch.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {

constexpr int kMostTaps = 8;

// Of few instructions: their results are rounded to 16 bits.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
__device__ inline float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// A parameter of fp32 or, if it is not wide, of the model's dtype.
template <class T>
__device__ __forceinline__ float read_parameter(const void* from, bool is_wide, size_t at) {
  return is_wide ? static_cast<const float*>(from)[at] : load(static_cast<const T*>(from)[at]);
}

// A channel of a causal convolution.
template <class T>
struct Channel {
  T* held;           // [taps]: its last inputs, the newest last
  const T* weights;  // [taps]

  __device__ __forceinline__ Channel(void* inputs, const void* weights, int channels, int row, int index, int taps)
      : held(static_cast<T*>(inputs) + (static_cast<size_t>(row) * channels + index) * taps),
        weights(static_cast<const T*>(weights) + static_cast<size_t>(index) * taps) {}

  // The inputs with the new one, the oldest left out.
  __device__ __forceinline__ void read(int taps, T newest, T (&inputs)[kMostTaps]) const {
#pragma unroll
    for (int j = 0; j < kMostTaps; ++j)
      if (j < taps) inputs[j] = j + 1 < taps ? read_written(held + j + 1) : newest;
  }
  __device__ __forceinline__ void write(int taps, const T (&inputs)[kMostTaps]) const {
#pragma unroll
    for (int j = 0; j < kMostTaps; ++j)
      if (j < taps) held[j] = inputs[j];
  }
  __device__ __forceinline__ float convolved(int taps, float bias, const T (&inputs)[kMostTaps]) const {
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kMostTaps; ++j)
      if (j < taps) sum = fmaf(load(inputs[j]), load(weights[j]), sum);
    return rounded<T>(sum);
  }
  __device__ __forceinline__ void prefetch() const {
    prefetch_line(held);
    prefetch_line(weights);
  }
};

// Counts this block. Returns how many came before it, to thread 0; all have then left what they wrote, and read what
// the last one may overwrite. The cell is back at zero when all have come. All threads call it.
__device__ __forceinline__ unsigned count_block(unsigned* cell, unsigned blocks) {
  __threadfence();
  __syncthreads();
  return threadIdx.x == 0 ? atomicInc(cell, blocks - 1) : 0;
}

// Whether this block is the last of so many. All threads call it, with what `count_block` gave to thread 0.
__device__ __forceinline__ bool is_last_block(unsigned before, unsigned blocks) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) is_last = before == blocks - 1;
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
  return true;
}

}  // namespace ktinject::cuda
