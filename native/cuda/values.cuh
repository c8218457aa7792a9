// What the kernels of a decode step share: values as fp32 and back, sums over a warp, a product of the tensor core.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace ktinject::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

__device__ inline float load(float x) { return x; }
__device__ inline float load(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float load(__half x) { return __half2float(x); }

template <class T>
__device__ T store(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return x;
}

template <class T>
__device__ float rounded(float x) {
  return load(store<T>(x));
}

// A value that a kernel before this one writes. CUDA's headers let the compiler move __ldcg of a 16-bit float, which
// may be to before await_previous(); it cannot move this.
template <class T>
__device__ __forceinline__ T read_written(const T* from) {
  if constexpr (sizeof(T) == sizeof(unsigned short)) {
    const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(from));
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
  } else {
    return __ldcg(from);
  }
}

// Two values in a register.
template <class T>
__device__ uint32_t pair(float low, float high) {
  const T both[2] = {store<T>(low), store<T>(high)};
  uint32_t word;
  memcpy(&word, both, sizeof word);
  return word;
}

template <class T>
__device__ void unpack(uint4 words, float (&values)[8]) {
  T found[8];
  memcpy(found, &words, sizeof found);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = load(found[i]);
}

template <class T>
__device__ uint4 pack(const float (&values)[8]) {
  return {pair<T>(values[0], values[1]), pair<T>(values[2], values[3]), pair<T>(values[4], values[5]),
          pair<T>(values[6], values[7])};
}

__device__ inline float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// c += a b with m16n8k16: c[0], c[1] are row g, columns 2t, 2t + 1, and c[2], c[3] those of row 8 + g.
template <class T>
__device__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The transpose of a matrix of 8 x 8 values of 16 bits, of which a lane has row g, columns 2t and 2t + 1.
__device__ inline uint32_t transposed(uint32_t both) {
  uint32_t found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(both));
  return found;
}

// c += a b with m16n8k16, of which only the rows 0 to 7 of a are there: c[0], c[1] are row g, columns 2t, 2t + 1.
template <class T>
__device__ void multiply(float (&c)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  float none[2];
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%5},{%7,%8},{%0,%1,%9,%9};"
        : "+f"(c[0]), "+f"(c[1]), "=f"(none[0]), "=f"(none[1])
        : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.0f));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%5},{%7,%8},{%0,%1,%9,%9};"
        : "+f"(c[0]), "+f"(c[1]), "=f"(none[0]), "=f"(none[1])
        : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.0f));
}

}  // namespace ktinject::cuda
