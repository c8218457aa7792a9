// One warp chooses the experts of one token: a softmax over the logits, then top_k times the greatest of what its lanes
// hold.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/values.cuh"

namespace ktinject::cuda {

constexpr int kMostRouted = 1024;  // experts that a warp chooses from; of them it chooses up to 32
constexpr int kFewRouted = 256;    // the same for kernels with few registers to spare

inline void check_route(int experts, int top_k, int most = kMostRouted) {
  if (experts > most || top_k > kWarp || top_k > experts)
    throw std::invalid_argument("route: at most " + std::to_string(most) + " experts, of which 32 are chosen");
}

// Floats as integers in the same order. -0 is 0; NaN becomes integer 0, below all others.
__device__ inline uint32_t ordered(float x) {
  const uint32_t bits = x == 0 ? 0u : __float_as_uint(x);
  if (isnan(x)) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float unordered(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// kEach: logits that a lane holds. Logits of 16 bits leave the low bits of a key free. These hold the expert, the first
// as the greatest: so the greatest key names its expert, and of equal logits the first one wins. Weights are values of
// W.
template <class T, class W, int kEach, class Take>
__device__ void route_among(const T* logits, int experts, int top_k, bool normed, Take&& take) {
  constexpr bool kNamed = sizeof(T) == 2;
  constexpr uint32_t kName = kMostRouted - 1;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float held[kEach], most = -INFINITY, sum = 0;
  uint32_t keys[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int expert = j * kWarp + lane;
    held[j] = expert < experts ? load(read_written(logits + expert)) : -INFINITY;
    keys[j] = expert < experts ? ordered(held[j]) : 0;
    if (kNamed && keys[j] != 0) keys[j] = (keys[j] & ~kName) | (kName - static_cast<uint32_t>(expert));
    most = fmaxf(most, held[j]);
  }
  for (int step = kWarp / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum += expf(held[j] - most);
  sum = warp_sum(sum);
  float chosen_sum = 0, mine = 0;
  int my_expert = 0;
  for (int rank = 0; rank < top_k; ++rank) {
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) best = max(best, keys[j]);
    best = __reduce_max_sync(kAll, best);
    int at = kMostRouted;
    if constexpr (kNamed) {
      at = static_cast<int>(kName - (best & kName));
      best = best & 0x80000000u ? best & ~kName : best == 0 ? 0 : best | kName;
    } else {  // of equal ones, the first
#pragma unroll
      for (int j = kEach - 1; j >= 0; --j)
        if (keys[j] == best) at = j * kWarp + lane;
      at = __reduce_min_sync(kAll, at);
    }
    if (best == 0) at = rank;  // all that is left is NaN: any expert will do, and the weight is NaN
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (at == j * kWarp + lane) keys[j] = 0;
    const float weight = expf(unordered(best) - most) / sum;
    chosen_sum += weight;
    if (lane == rank) {
      mine = weight;
      my_expert = at;
    }
  }
  if (lane < top_k) take(lane, my_expert, rounded<W>(normed ? mine / chosen_sum : mine));
}

// Calls take(rank, expert, weight) in lane `rank`, for each rank below top_k; weights are divided by their sum if
// `normed`, and are values of W.
template <class T, class W, int kMost = kMostRouted, class Take>
__device__ void route_token(const T* logits, int experts, int top_k, bool normed, Take&& take) {
  if (experts <= 4 * kWarp) route_among<T, W, 4>(logits, experts, top_k, normed, take);
  else if (kMost <= 8 * kWarp || experts <= 8 * kWarp) route_among<T, W, 8>(logits, experts, top_k, normed, take);
  else if constexpr (kMost > 8 * kWarp) route_among<T, W, kMost / kWarp>(logits, experts, top_k, normed, take);
}

}  // namespace ktinject::cuda
