// Compressing: a thread block has a row, and a thread one of its d values, of which it goes through the window's slots
// twice: for the sum of the softmax, and with its weights rounded. Nobody sees the key of a window before this is
// complete, so it may be left out until then.
#include "cuda/decode_compress.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <stdexcept>

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/values.cuh"

namespace ktinject::cuda {
namespace {

// All threads call it.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[Compress::kMostValues / kWarp];
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float all = 0;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarp; ++warp) all += sums[warp];
  return all;
}

// One value of all slots that count in the present window: those of the window before, and its own.
template <class T, bool kOverlaps>
struct Column {
  const T *kv, *gate;         // of the present window, and of this value
  const float* bias;          // as well
  const T* overlap_kv;        // of the window before
  const float* overlap_gate;  // as well, with its bias
  int rate, width, d;

  __device__ __forceinline__ Column(const Compress& p, int row, int value)
      : rate(p.rate), width(kOverlaps ? 2 * p.d : p.d), d(p.d) {
    const size_t window = static_cast<size_t>(row) * rate;
    const int at = kOverlaps ? d + value : value;
    kv = static_cast<const T*>(p.held_kv) + window * width + at;
    gate = static_cast<const T*>(p.held_gate) + window * width + at;
    bias = p.bias + at;
    overlap_kv = static_cast<const T*>(p.overlap_kv) + (kOverlaps ? window * d + value : 0);
    overlap_gate = p.overlap_gate + (kOverlaps ? window * d + value : 0);
  }
  __device__ __forceinline__ float logit(int slot) const {
    return load(read_written(gate + static_cast<size_t>(slot) * width)) + bias[static_cast<size_t>(slot) * width];
  }
  __device__ __forceinline__ float logit_before(int slot) const {
    return __ldcg(overlap_gate + static_cast<size_t>(slot) * d);
  }
  // take(logit, kv) of each slot, the window before first.
  template <class Take>
  __device__ __forceinline__ void each(Take take) const {
    if constexpr (kOverlaps) {
#pragma unroll 4
      for (int s = 0; s < rate; ++s) take(logit_before(s), overlap_kv + static_cast<size_t>(s) * d);
    }
#pragma unroll 8
    for (int s = 0; s < rate; ++s) take(logit(s), kv + static_cast<size_t>(s) * width);
  }

  __device__ __forceinline__ float pooled() const {
    float largest = -INFINITY, sum = 0;
    each([&](float logit, const T*) {
      const float before = largest;
      largest = fmaxf(largest, logit);
      sum = fmaf(sum, expf(before - largest), expf(logit - largest));
    });
    float total = 0;
    each([&](float logit, const T* from) {
      const float weight = rounded<T>(expf(logit - largest) / sum);
      total += rounded<T>(load(read_written(from)) * weight);
    });
    return rounded<T>(total);
  }
};

// The token's own values, in the slot that is theirs. A thread reads no other ones than it writes.
template <class T>
__device__ __forceinline__ void take_token(const Compress& p, int row, int slot, int width, int value) {
  const size_t to = (static_cast<size_t>(row) * p.rate + slot) * width;
  for (int i = value; i < width; i += p.d) {
    static_cast<T*>(p.held_kv)[to + i] = read_written(static_cast<const T*>(p.kv) + row * p.kv_stride + i);
    static_cast<T*>(p.held_gate)[to + i] = read_written(static_cast<const T*>(p.gate) + row * p.gate_stride + i);
  }
}

// What the next window takes of this one.
template <class T>
__device__ __forceinline__ void leave_overlap(const Compress& p, int row, int width, int value) {
  for (int s = 0; s < p.rate; ++s) {
    const size_t slot = static_cast<size_t>(row) * p.rate + s;
    static_cast<T*>(p.overlap_kv)[slot * p.d + value] =
        read_written(static_cast<const T*>(p.held_kv) + slot * width + value);
    p.overlap_gate[slot * p.d + value] = load(read_written(static_cast<const T*>(p.held_gate) + slot * width + value)) +
                                         p.bias[static_cast<size_t>(s) * width + value];
  }
}

// All threads call it.
template <class T, bool kOverlaps>
__device__ __forceinline__ void make_key(const Compress& p, int row, int64_t window, int value) {
  const bool is_value = value < p.d;
  float found = is_value ? Column<T, kOverlaps>(p, row, value).pooled() : 0;
  const float norm = rsqrtf(block_sum(found * found) / static_cast<float>(p.d) + p.eps);
  if (is_value) found = rounded<T>(p.norm[value] * (found * norm));
  const float other = __shfl_xor_sync(kAll, found, 1);
  if (!is_value) return;
  const int turned = value - (p.d - p.turned);
  if (turned >= 0) {
    float sin = 0, cos = 0;
    sincosf(static_cast<float>(window * p.rate) * p.angles[turned / 2], &sin, &cos);
    sin = rounded<T>(sin * p.scale), cos = rounded<T>(cos * p.scale);
    found = fmaf(found, cos, turned % 2 == 0 ? -other * sin : other * sin);
  }
  static_cast<T*>(p.keys)[row * p.keys_stride + window * p.d + value] = store<T>(found);
}

template <class T, bool kOverlaps>
__global__ void __launch_bounds__(Compress::kMostValues) compress_kernel(const Compress p) {
  const int row = static_cast<int>(blockIdx.x), value = static_cast<int>(threadIdx.x);
  const int width = kOverlaps ? 2 * p.d : p.d;
  const bool is_value = value < p.d;
  release_next();
  await_previous();
  const int64_t position = __ldcg(p.cache_position), window = position / p.rate;
  const int slot = static_cast<int>(position % p.rate);
  if (is_value) take_token<T>(p, row, slot, width, value);
  if (p.always || slot == p.rate - 1) {  // alike for the whole block
    make_key<T, kOverlaps>(p, row, window, value);
    if (kOverlaps && is_value && slot == p.rate - 1) leave_overlap<T>(p, row, width, value);
  }
  const int64_t complete = (__ldcg(p.positions + row * p.positions_stride) + 1) / p.rate;
  for (int i = value; i < p.windows; i += static_cast<int>(blockDim.x))
    static_cast<T*>(p.added)[static_cast<size_t>(row) * p.windows + i] = store<T>(i < complete ? 0.0f : -INFINITY);
}

constexpr int kHeads = 4;  // of a thread block, a warp each

template <class T>
__global__ void __launch_bounds__(kHeads* kWarp) turn_heads_kernel(const TurnHeads p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, row = static_cast<int>(blockIdx.y);
  const int head = static_cast<int>(blockIdx.x) * kHeads + static_cast<int>(threadIdx.x) / kWarp;
  release_next();
  await_previous();
  if (head >= p.heads) return;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride + static_cast<size_t>(head) * p.size;
  T* out = static_cast<T*>(p.out) + (static_cast<size_t>(row) * p.heads + head) * p.size;
  float norm = 1;
  if (p.eps >= 0) {
    float sum = 0;
    for (int i = lane; i < p.size; i += kWarp) {
      const float value = load(read_written(x + i));
      sum = fmaf(value, value, sum);
    }
    norm = rounded<T>(rsqrtf(warp_sum(sum) / static_cast<float>(p.size) + p.eps));
  }
  const int first = p.size - 2 * p.angles;
  for (int i = 2 * lane; i < p.size; i += 2 * kWarp) {
    const float a = rounded<T>(load(read_written(x + i)) * norm), b = rounded<T>(load(read_written(x + i + 1)) * norm);
    if (i < first) {
      out[i] = store<T>(a), out[i + 1] = store<T>(b);
      continue;
    }
    const int64_t at = row * p.angle_stride + (i - first) / 2;
    const float cos = load(read_written(static_cast<const T*>(p.cos) + at));
    const float ahead = load(read_written(static_cast<const T*>(p.sin) + at)), sin = p.is_back ? -ahead : ahead;
    out[i] = store<T>(fmaf(a, cos, -b * sin)), out[i + 1] = store<T>(fmaf(b, cos, a * sin));
  }
}

constexpr int kSoftmaxThreads = 256;

// A thread block has a head of a row.
template <class T>
__global__ void __launch_bounds__(kSoftmaxThreads) sink_softmax_kernel(const SinkSoftmax p) {
  constexpr int kWarps = kSoftmaxThreads / kWarp;
  __shared__ float largest_of[kWarps];
  const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const int thread = static_cast<int>(threadIdx.x);
  release_next();
  await_previous();
  const size_t at = (static_cast<size_t>(row) * p.heads + head) * p.n;
  const T* scores = static_cast<const T*>(p.scores) + at;
  const T* first = static_cast<const T*>(p.first) + row * p.first_stride;
  const T* rest = static_cast<const T*>(p.rest) + static_cast<size_t>(row) * (p.n - p.of_first);
  auto score = [&](int i) {
    const float added = load(read_written(i < p.of_first ? first + i : rest + (i - p.of_first)));
    return rounded<T>(rounded<T>(load(read_written(scores + i)) * p.scale) + added);
  };
  float largest = p.sinks[head];
  for (int i = thread; i < p.n; i += kSoftmaxThreads) largest = fmaxf(largest, score(i));
  for (int step = kWarp / 2; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, step));
  if (thread % kWarp == 0) largest_of[thread / kWarp] = largest;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, largest_of[warp]);
  float sum = 0;
  for (int i = thread; i < p.n; i += kSoftmaxThreads) sum += expf(score(i) - largest);
  sum = block_sum(sum) + expf(p.sinks[head] - largest);
  T* out = static_cast<T*>(p.out) + at;
  for (int i = thread; i < p.n; i += kSoftmaxThreads) out[i] = store<T>(expf(score(i) - largest) / sum);
}

template <class Run>
void with_type(DType dtype, Run run) {
  if (dtype == DType::f32) run(float{});
  else if (dtype == DType::f16) run(__half{});
  else run(__nv_bfloat16{});
}

}  // namespace

void compress(const Compress& p, DType dtype, Stream to) {
  if (p.d < 2 || p.d > Compress::kMostValues || p.d % 2 != 0)
    throw std::invalid_argument("compress: keys must have an even number of values, at most 1024");
  if (p.rate < 1 || p.turned % 2 != 0 || p.turned < 0 || p.turned > p.d)
    throw std::invalid_argument("compress: a window of at least one token, of whose values pairs turn");
  if (p.rows < 1) return;
  const OnStream stream(to);
  const auto threads = static_cast<unsigned>((p.d + kWarp - 1) / kWarp * kWarp);
  with_type(dtype, [&]<class T>(T) {
    launch_early("launching compress", p.overlap_kv == nullptr ? compress_kernel<T, false> : compress_kernel<T, true>,
                 {dim3(static_cast<unsigned>(p.rows)), dim3(threads), stream}, p);
  });
}

void turn_heads(const TurnHeads& p, DType dtype, Stream to) {
  if (p.size % 2 != 0 || p.angles < 0 || 2 * p.angles > p.size)
    throw std::invalid_argument("turn_heads: heads must have an even number of values, of which pairs turn");
  if (p.rows > UINT16_MAX) throw std::invalid_argument("turn_heads: more rows than a CUDA grid has blocks");
  if (p.rows < 1 || p.heads < 1) return;
  const OnStream stream(to);
  with_type(dtype, [&]<class T>(T) {
    launch_early("launching turn_heads", turn_heads_kernel<T>,
                 {dim3(static_cast<unsigned>((p.heads + kHeads - 1) / kHeads), static_cast<unsigned>(p.rows)),
                  dim3(kHeads * kWarp), stream},
                 p);
  });
}

void sink_softmax(const SinkSoftmax& p, DType dtype, Stream to) {
  if (p.of_first < 0 || p.of_first > p.n) throw std::invalid_argument("sink_softmax: more is added than there is");
  if (p.rows > UINT16_MAX) throw std::invalid_argument("sink_softmax: more rows than a CUDA grid has blocks");
  if (p.rows < 1 || p.heads < 1 || p.n < 1) return;
  const OnStream stream(to);
  with_type(dtype, [&]<class T>(T) {
    launch_early("launching sink_softmax", sink_softmax_kernel<T>,
                 {dim3(static_cast<unsigned>(p.heads), static_cast<unsigned>(p.rows)), dim3(kSoftmaxThreads), stream},
                 p);
  });
}

}  // namespace ktinject::cuda
