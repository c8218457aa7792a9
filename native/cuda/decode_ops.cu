#include "cuda/decode_ops.hpp"

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/route.cuh"

namespace ktinject::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kWarp)
    route_kernel(const T* logits, T* weights, int64_t* ids, int experts, int top_k, bool normed) {
  release_next();
  await_previous();
  const size_t row = blockIdx.x;
  route_token<T, T>(logits + row * static_cast<size_t>(experts), experts, top_k, normed,
                    [&](int rank, int expert, float weight) {
                      ids[row * static_cast<size_t>(top_k) + static_cast<size_t>(rank)] = expert;
                      weights[row * static_cast<size_t>(top_k) + static_cast<size_t>(rank)] = store<T>(weight);
                    });
}

// One warp a row; a lane holds `each` experts beside each other, up to kEach, so a group is some whole lanes.
constexpr int kMostEach = 16;

// Whether this lane's group is one of those kept. most, second: the greatest choices of the lane.
__device__ __forceinline__ bool is_kept(const GroupedRoute& p, float most, float second, int lane) {
  const int lanes = kWarp / p.groups;
  for (int step = lanes / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAll, most, step), other_second = __shfl_xor_sync(kAll, second, step);
    second = fmaxf(fminf(most, other), fmaxf(second, other_second));
    most = fmaxf(most, other);
  }
  const float sum = most + second;
  int better = 0;
  for (int group = 0; group < p.groups; ++group) {
    const float other = __shfl_sync(kAll, sum, group * lanes);
    better += other > sum || (other == sum && group < lane / lanes);
  }
  return better < p.kept;
}

// The top_k experts with the greatest keys: a bit for each of this lane's. `last`: the key of the last one.
template <int kEach>
__device__ __forceinline__ uint32_t choose(const GroupedRoute& p, const uint32_t (&keys)[kEach], int each, int first,
                                           uint32_t& last) {
  uint32_t left[kEach], chosen = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) left[j] = keys[j];
  for (int rank = 0; rank < p.top_k; ++rank) {
    uint32_t best = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) best = max(best, left[j]);
    best = __reduce_max_sync(kAll, best);
    int at = p.experts;
#pragma unroll
    for (int j = kEach - 1; j >= 0; --j)
      if (left[j] == best && j < each) at = first + j;
    at = __reduce_min_sync(kAll, at);
    if (best == 0) at = rank;  // NaN is no reason to choose an expert; its weight will tell
    last = best;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (at == first + j && j < each) {
        chosen |= 1u << j;
        left[j] = 0;
      }
  }
  return chosen;
}

template <class Bias, int kEach>
__global__ void __launch_bounds__(kWarp) route_grouped_kernel(const GroupedRoute p) {
  const int lane = static_cast<int>(threadIdx.x), each = p.experts / kWarp, first = lane * each;
  const float* logits = p.logits + static_cast<size_t>(blockIdx.x) * p.experts;
  float scores[kEach], biases[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) biases[j] = j < each ? load(static_cast<const Bias*>(p.bias)[first + j]) : -INFINITY;
  release_next();
  await_previous();
  uint32_t keys[kEach];
  float most = -INFINITY, second = -INFINITY;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    scores[j] = j < each ? 1 / (1 + expf(-__ldcg(logits + first + j))) : 0;
    const float choice = j < each ? scores[j] + biases[j] : -INFINITY;
    keys[j] = j < each ? ordered(choice) : 0;
    second = fmaxf(second, fminf(most, choice));
    most = fmaxf(most, choice);
  }
  if (p.kept < p.groups && !is_kept(p, most, second, lane))
#pragma unroll
    for (int j = 0; j < kEach; ++j) keys[j] = min(keys[j], ordered(-INFINITY));
  uint32_t last = 0;
  const uint32_t chosen = choose(p, keys, each, first, last);
  uint32_t ties = 0;  // of the chosen, those as great as the last one
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (chosen & 1u << j) {
      sum += scores[j];
      if (keys[j] == last) ties |= 1u << j;
    }
  sum = warp_sum(sum);
  int before = __popc(chosen & ~ties), ties_before = __popc(ties);
  const int own = before, own_ties = ties_before;
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step), other_ties = __shfl_up_sync(kAll, ties_before, step);
    if (lane >= step) {
      before += other;
      ties_before += other_ties;
    }
  }
  const int greater = __shfl_sync(kAll, before, kWarp - 1);
  int place = before - own, tie_place = greater + ties_before - own_ties;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    if (!(chosen & 1u << j)) continue;
    const size_t at = static_cast<size_t>(blockIdx.x) * p.top_k + (ties & 1u << j ? tie_place++ : place++);
    p.ids[at] = first + j;
    p.weights[at] = (p.normed ? scores[j] / (sum + 1e-20f) : scores[j]) * p.scale;
  }
}

}  // namespace

void route_grouped(const GroupedRoute& p, DType bias, Stream stream) {
  if (p.experts % kWarp != 0 || p.experts > kMostEach * kWarp || p.top_k < 1 || p.top_k > p.experts)
    throw std::invalid_argument("route_grouped: the number of experts must be a multiple of 32, up to " +
                                std::to_string(kMostEach * kWarp));
  if (p.groups < 1 || kWarp % p.groups != 0 || p.kept < 1 || p.kept > p.groups || p.experts / p.groups < 2 ||
      p.top_k > p.experts / p.groups * p.kept)
    throw std::invalid_argument("route_grouped: the number of groups must divide 32");
  if (p.rows == 0) return;
  const OnStream on(stream);
  auto with = [&]<class Bias, int kEach>() {
    launch_early("launching route_grouped", route_grouped_kernel<Bias, kEach>,
                 {dim3(static_cast<unsigned>(p.rows)), dim3(kWarp), on}, p);
  };
  auto of = [&]<class Bias>(Bias) {
    if (p.experts <= 8 * kWarp) with.template operator()<Bias, 8>();
    else with.template operator()<Bias, kMostEach>();
  };
  if (bias == DType::bf16) of(__nv_bfloat16{});
  else if (bias == DType::f16) of(__half{});
  else of(float{});
}

void route(const void* logits, void* weights, int64_t* ids, int rows, int experts, int top_k, bool normed, DType dtype,
           Stream stream) {
  check_route(experts, top_k);
  if (rows == 0) return;
  const OnStream on(stream);
  auto with = [&]<class T>(T) {
    launch_early("launching route", route_kernel<T>, {dim3(static_cast<unsigned>(rows)), dim3(kWarp), on},
                 static_cast<const T*>(logits), static_cast<T*>(weights), ids, experts, top_k, normed);
  };
  if (dtype == DType::bf16) with(__nv_bfloat16{});
  else if (dtype == DType::f16) with(__half{});
  else with(float{});
}

}  // namespace ktinject::cuda
