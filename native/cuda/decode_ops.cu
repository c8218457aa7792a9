// A decode step has one token a row, so every tensor here is small and a kernel's time is mostly its launch: what
// transformers does in some fifty kernels a layer is four. Sums are fp32; results are rounded to the model's dtype
// where transformers rounds them.
//
//   attention_input  a warp a head: norm, rotation, into the cache
//   attention        a block a head and split: its warps take every eighth place of the cache, each with a softmax of
//                    its own, joined at the end. Only places up to the current one are read.
//   route            a warp a token: the greatest of what its lanes hold, top_k times
#include "cuda/decode_ops.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace ktinject {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kMostSize = 256;      // of a head
constexpr int kMostExperts = 1024;  // that a warp chooses from
constexpr unsigned kAll = 0xffffffffu;

__device__ float load(float x) { return x; }
__device__ float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float load(__half x) { return __half2float(x); }

template <class T>
__device__ T store(float x);
template <>
__device__ float store<float>(float x) {
  return x;
}
template <>
__device__ __nv_bfloat16 store<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __half store<__half>(float x) {
  return __float2half_rn(x);
}

template <class T>
__device__ float rounded(float x) {
  return load(store<T>(x));
}

__device__ float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

template <class T>
__global__ void __launch_bounds__(kWarp) attention_input_kernel(AttentionInput p) {
  __shared__ float normed[kMostSize];
  const int heads = p.q_heads + 2 * p.kv_heads, batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const int lane = threadIdx.x, size = p.size, half = size / 2;
  const bool is_q = head < p.q_heads, is_v = head >= p.q_heads + p.kv_heads;
  const int mine = is_q ? head : is_v ? head - p.q_heads - p.kv_heads : head - p.q_heads;
  const void* from = is_q ? p.q : is_v ? p.v : p.k;
  const T* x =
      static_cast<const T*>(from) + (static_cast<size_t>(batch) * (is_q ? p.q_heads : p.kv_heads) + mine) * size;
  const int64_t place = p.place[0];
  T* cached = static_cast<T*>(is_v ? p.values : p.keys) + batch * p.batch_stride + mine * p.head_stride + place * size;
  if (is_v) {
    for (int i = lane; i < size; i += kWarp) cached[i] = x[i];
    return;
  }
  const T* weight = static_cast<const T*>(is_q ? p.q_weight : p.k_weight);
  float sum = 0;
  for (int i = lane; i < size; i += kWarp) sum += load(x[i]) * load(x[i]);
  const float scale = rsqrtf(warp_sum(sum) / size + p.eps);
  for (int i = lane; i < size; i += kWarp)
    normed[i] = weight ? rounded<T>(load(weight[i]) * rounded<T>(load(x[i]) * scale)) : load(x[i]);
  __syncwarp();
  const T* cos = static_cast<const T*>(p.cos) + static_cast<size_t>(batch) * size;
  const T* sin = static_cast<const T*>(p.sin) + static_cast<size_t>(batch) * size;
  T* out = is_q ? static_cast<T*>(p.q_out) + (static_cast<size_t>(batch) * p.q_heads + mine) * size : cached;
  for (int i = lane; i < size; i += kWarp) {
    const float turned = i < half ? -normed[i + half] : normed[i - half];
    out[i] = store<T>(rounded<T>(normed[i] * load(cos[i])) + rounded<T>(turned * load(sin[i])));
  }
}

// One softmax over some places: the greatest score, the sum of the weights, the weighted values.
template <int kEach>
struct Partial {
  float most = -INFINITY, sum = 0, values[kEach] = {};

  __device__ void join(float other_most, float other_sum, const float* other, int stride) {
    const float top = fmaxf(most, other_most);
    if (top == -INFINITY) return;
    const float a = __expf(most - top), b = __expf(other_most - top);
    for (int j = 0; j < kEach; ++j) values[j] = values[j] * a + other[j * stride] * b;
    sum = sum * a + other_sum * b;
    most = top;
  }
};

template <class T, int kEach>  // kEach = size / 32
__global__ void __launch_bounds__(kWarp* kWarps) attention_kernel(Attention p) {
  const int size = kEach * kWarp, lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int batch = blockIdx.x / p.q_heads, head = blockIdx.x % p.q_heads, kv = head / (p.q_heads / p.kv_heads);
  const T* q = static_cast<const T*>(p.q) + (static_cast<size_t>(batch) * p.q_heads + head) * size;
  const size_t offset = batch * p.batch_stride + kv * p.head_stride;
  const T* keys = static_cast<const T*>(p.keys) + offset;
  const T* values = static_cast<const T*>(p.values) + offset;
  const bool* mask = p.mask + batch * p.mask_stride;
  float query[kEach];
  for (int j = 0; j < kEach; ++j) query[j] = load(q[lane * kEach + j]) * p.scale;

  const int places = static_cast<int>(p.place[0]) + 1;
  const int share = (places + p.splits - 1) / p.splits, first = static_cast<int>(blockIdx.y) * share;
  const int end = min(places, first + share);
  Partial<kEach> found;
  for (int at = first + warp; at < end; at += kWarps) {
    const T* key = keys + static_cast<size_t>(at) * size + lane * kEach;
    const T* value = values + static_cast<size_t>(at) * size + lane * kEach;
    float score = 0, here[kEach];
    for (int j = 0; j < kEach; ++j) {
      score += query[j] * load(key[j]);
      here[j] = load(value[j]);
    }
    score = warp_sum(score);
    if (mask[at]) found.join(score, 1.0f, here, 1);
  }

  __shared__ float most[kWarps], sums[kWarps], joined[kWarps][kEach * kWarp];
  if (lane == 0) {
    most[warp] = found.most;
    sums[warp] = found.sum;
  }
  for (int j = 0; j < kEach; ++j) joined[warp][j * kWarp + lane] = found.values[j];
  __syncthreads();
  if (warp > 0) return;
  for (int other = 1; other < kWarps; ++other) found.join(most[other], sums[other], joined[other] + lane, kWarp);
  const size_t row = static_cast<size_t>(blockIdx.x);
  if (p.splits == 1) {
    T* out = static_cast<T*>(p.out) + row * size;
    for (int j = 0; j < kEach; ++j) out[lane * kEach + j] = store<T>(found.values[j] / found.sum);
    return;
  }
  float* part = p.scratch + (row * p.splits + blockIdx.y) * (size + 2);
  for (int j = 0; j < kEach; ++j) part[j * kWarp + lane] = found.values[j];
  if (lane == 0) {
    part[size] = found.most;
    part[size + 1] = found.sum;
  }
}

template <class T, int kEach>
__global__ void __launch_bounds__(kWarp) join_kernel(Attention p) {
  const int size = kEach * kWarp, lane = threadIdx.x;
  const float* part = p.scratch + static_cast<size_t>(blockIdx.x) * p.splits * (size + 2);
  Partial<kEach> found;
  for (int split = 0; split < p.splits; ++split, part += size + 2)
    found.join(part[size], part[size + 1], part + lane, kWarp);
  T* out = static_cast<T*>(p.out) + static_cast<size_t>(blockIdx.x) * size;
  for (int j = 0; j < kEach; ++j) out[lane * kEach + j] = store<T>(found.values[j] / found.sum);
}

template <class T>
__global__ void __launch_bounds__(kWarp)
    route_kernel(const T* logits, T* weights, int64_t* ids, int experts, int top_k, bool normed) {
  constexpr int kEach = kMostExperts / kWarp;
  const int lane = threadIdx.x, each = (experts + kWarp - 1) / kWarp;
  const T* row = logits + static_cast<size_t>(blockIdx.x) * experts;
  float held[kEach], most = -INFINITY, sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (j >= each) break;
    const int expert = j * kWarp + lane;
    held[j] = expert < experts ? load(row[expert]) : -INFINITY;
    most = fmaxf(most, held[j]);
  }
  for (int step = kWarp / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (j >= each) break;
    sum += expf(held[j] - most);
  }
  sum = warp_sum(sum);
  float chosen_sum = 0, mine = 0;
  for (int rank = 0; rank < top_k; ++rank) {
    float best = -INFINITY;
    int at = kMostExperts;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j >= each) break;
      if (held[j] > best) {
        best = held[j];
        at = j * kWarp + lane;
      }
    }
    for (int step = kWarp / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(kAll, best, step);
      const int place = __shfl_xor_sync(kAll, at, step);
      if (other > best || (other == best && place < at)) {
        best = other;
        at = place;
      }
    }
    const bool is_mine = at % kWarp == lane;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (j >= each) break;
      if (is_mine && j == at / kWarp) held[j] = -INFINITY;
    }
    const float weight = expf(best - most) / sum;
    chosen_sum += weight;
    if (lane == rank) mine = weight;
    // Logits that are NaN choose no expert; the first ones stand in, as any would.
    if (lane == 0) ids[static_cast<size_t>(blockIdx.x) * top_k + rank] = at < experts ? at : rank;
  }
  if (lane < top_k)
    weights[static_cast<size_t>(blockIdx.x) * top_k + lane] = store<T>(normed ? mine / chosen_sum : mine);
}

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Calls f with a value of the dtype's type.
template <class F>
void with_type(DType dtype, F f) {
  if (dtype == DType::bf16) f(__nv_bfloat16{});
  else if (dtype == DType::f16) f(__half{});
  else f(float{});
}

}  // namespace

void attention_input(const AttentionInput& p, DType dtype, uintptr_t stream) {
  if (p.size > kMostSize || p.size % 2 != 0)
    throw std::invalid_argument("attention_input: the size of a head must be even, at most 256");
  with_type(dtype, [&]<class T>(T) {
    attention_input_kernel<T>
        <<<p.batch*(p.q_heads + 2 * p.kv_heads), kWarp, 0, reinterpret_cast<cudaStream_t>(stream)>>>(p);
  });
  check_launch("attention_input");
}

void attention(const Attention& p, DType dtype, uintptr_t stream) {
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const dim3 grid(p.batch * p.q_heads, p.splits);
  with_type(dtype, [&]<class T>(T) {
    auto launch = [&]<int kEach>() {
      attention_kernel<T, kEach><<<grid, kWarp * kWarps, 0, on>>>(p);
      if (p.splits > 1) join_kernel<T, kEach><<<grid.x, kWarp, 0, on>>>(p);
    };
    if (p.size == 32) launch.template operator()<1>();
    else if (p.size == 64) launch.template operator()<2>();
    else if (p.size == 128) launch.template operator()<4>();
    else if (p.size == 256) launch.template operator()<8>();
    else throw std::invalid_argument("attention: the size of a head must be 32, 64, 128 or 256");
  });
  check_launch("attention");
}

void route(const void* logits, void* weights, int64_t* ids, int rows, int experts, int top_k, bool normed, DType dtype,
           uintptr_t stream) {
  if (experts > kMostExperts || top_k > kWarp || top_k > experts)
    throw std::invalid_argument("route: at most 1024 experts, of which 32 are chosen");
  if (rows == 0) return;
  with_type(dtype, [&]<class T>(T) {
    route_kernel<T><<<rows, kWarp, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(logits), static_cast<T*>(weights), ids, experts, top_k, normed);
  });
  check_launch("route");
}

}  // namespace ktinject
