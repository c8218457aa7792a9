#include "cuda/decode_ops.hpp"

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/route.cuh"

namespace ktinject {
namespace {

template <class T>
__global__ void __launch_bounds__(kWarp)
    route_kernel(const T* logits, T* weights, int64_t* ids, int experts, int top_k, bool normed) {
  release_next();
  await_previous();
  const size_t row = blockIdx.x;
  route_token(logits + row * static_cast<size_t>(experts), experts, top_k, normed,
              [&](int rank, int expert, float weight) {
                ids[row * static_cast<size_t>(top_k) + static_cast<size_t>(rank)] = expert;
                weights[row * static_cast<size_t>(top_k) + static_cast<size_t>(rank)] = store<T>(weight);
              });
}

}  // namespace

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

}  // namespace ktinject
