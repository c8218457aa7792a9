// A warp takes 128 inputs of one token, four a lane. Shuffles find the greatest magnitude, which gives one scale; each
// lane writes four bytes.
#include "cuda/fp8_quantise.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/on_device.cuh"

namespace ktinject::cuda {
namespace {

constexpr int kWarps = 8;
constexpr float kGreatest = 448;  // of e4m3
constexpr float kLeast = 1e-12f;  // scale, so that zeros divide to zero

__device__ float2 floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ float2 floats(__half2 pair) { return __half22float2(pair); }

template <class Pair>
__global__ void __launch_bounds__(32 * kWarps)
    fp8_quantise_sm80(const Pair* x, int m, int padded, int groups, uint32_t* values, float* scales) {
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;  // group of a token
  const int lane = threadIdx.x % 32;
  if (at >= int64_t{padded} * groups) return;
  const auto row = static_cast<int>(at / groups), group = static_cast<int>(at % groups);
  float2 low{}, high{};
  if (row < m) {
    low = floats(x[at * 64 + lane * 2]);
    high = floats(x[at * 64 + lane * 2 + 1]);
  }
  float greatest = fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y)));
#pragma unroll
  for (int i = 16; i > 0; i /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, i));
  const float scale = fmaxf(greatest * (1 / kGreatest), kLeast);
  const auto first = __nv_cvt_float2_to_fp8x2({low.x / scale, low.y / scale}, __NV_SATFINITE, __NV_E4M3);
  const auto second = __nv_cvt_float2_to_fp8x2({high.x / scale, high.y / scale}, __NV_SATFINITE, __NV_E4M3);
  values[at * 32 + lane] = static_cast<uint32_t>(first) | static_cast<uint32_t>(second) << 16;
  if (lane == 0) scales[static_cast<int64_t>(group) * padded + row] = scale;
}

}  // namespace

void fp8_quantise(const void* x, bool fp16, int m, int padded, int k, void* values, float* scales, int device,
                  void* stream) {
  if (m < 0 || padded < m || k < 128 || k % 128 != 0)
    throw std::invalid_argument("fp8_quantise: found " + std::to_string(m) + " tokens, " + std::to_string(padded) +
                                " padded, " + std::to_string(k) + " inputs; inputs must be a multiple of 128");
  if (padded == 0) return;
  const OnDevice here(device);
  const int groups = k / 128;
  const auto blocks = static_cast<unsigned>((int64_t{padded} * groups + kWarps - 1) / kWarps);
  const auto on = static_cast<cudaStream_t>(stream);
  auto* bytes = static_cast<uint32_t*>(values);
  if (fp16)
    fp8_quantise_sm80<<<blocks, 32 * kWarps, 0, on>>>(static_cast<const __half2*>(x), m, padded, groups, bytes, scales);
  else
    fp8_quantise_sm80<<<blocks, 32 * kWarps, 0, on>>>(static_cast<const __nv_bfloat162*>(x), m, padded, groups, bytes,
                                                      scales);
  check_cuda(cudaGetLastError(), "fp8_quantise");
}

}  // namespace ktinject::cuda
