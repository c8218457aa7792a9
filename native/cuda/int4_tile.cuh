// What the kernels for sm_80 and sm_90 share: codes to floats, scales, and how a line of stages is cut.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/check.cuh"
#include "cuda/int4_blocks.hpp"
#include "cuda/int4_linear.hpp"

namespace ktinject::cuda::int4 {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) check_cuda(error, std::string("int4_linear: ") + what);
}

// What all kernels get.
struct Int4Arguments {
  const uint8_t* words;
  const uint8_t* scales;
  const float* bias;
  const uint8_t* x;
  void* y;
  float4* partials;
  int* counters;
  int m, n, k;
  int tiles64;           // n64 / 64
  int depth;             // stages of a strip: k / 64
  int strips;            // ceil(n / outputs of a block)
  int stages_per_group;  // group_size / 64; 0 for groups of 32
  int groups;            // k / group_size
  int scale_bytes;       // of one scale, with its zero point: 2 or 4
  bool fp16_scales;
  int line;          // stages in all
  int share;         // stages a block
  int sharers;       // blocks of a cluster that share a strip; 0: the line is cut into shares
  int token_blocks;  // blocks of tokens of a strip
  int silent;        // bits of the lanes that do not release slots: 31, or 0 if every lane does
};

// Tiles of 64 outputs stand in strips of four, the last of what is left; where one begins among words and scales.
__device__ __forceinline__ int strip_width(const Int4Arguments& p, int tile64) {
  return min(4, p.tiles64 - tile64 / 4 * 4);
}
__device__ __forceinline__ size_t words_at(const Int4Arguments& p, int tile64, int depth) {
  return (static_cast<size_t>(tile64 / 4 * 4) * p.depth + static_cast<size_t>(depth) * strip_width(p, tile64) +
          tile64 % 4) *
         2048;
}
__device__ __forceinline__ size_t scales_at(const Int4Arguments& p, int tile64, int group) {
  return (static_cast<size_t>(tile64 / 4 * 4) * p.groups + static_cast<size_t>(group) * strip_width(p, tile64) +
          tile64 % 4) *
         64 * p.scale_bytes;
}

// Four 8 × 8 matrices; each lane gives the address of one row.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  load_matrices(r, static_cast<uint32_t>(__cvta_generic_to_shared(row)));
}

// What the tensor core multiplies, and how: `multiply` is d [16, 8] += a [16, 16] · b [16, 8].
template <class T>
struct Float16;

#define KT_MMA(type)                                                                                                 \
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                              \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                              \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                    \
  }

template <>
struct Float16<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr uint32_t kMagic = 0x43004300;  // 128: the last four bits of the mantissa count ones
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x3f803f80), "r"(b));  // sm_80 has no bf16 add
    return d;
  }
  static __device__ __forceinline__ uint32_t scaled(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000));  // -0: keeps the sign of zeros
    return d;
  }
  static __device__ __forceinline__ Pair pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
  static __device__ __forceinline__ __nv_bfloat16 one(float a) { return __float2bfloat16_rn(a); }
  KT_MMA("bf16")
};

template <>
struct Float16<__half> {
  using Pair = __half2;
  static constexpr uint32_t kMagic = 0x64006400;  // 1024
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ uint32_t scaled(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  }
  static __device__ __forceinline__ Pair pair(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ __forceinline__ __half one(float a) { return __float2half_rn(a); }
  KT_MMA("f16")
};

#undef KT_MMA

// Two codes of a word, `shift` and `shift + 16` bits up, as floats above kMagic's base.
template <class T>
__device__ __forceinline__ uint32_t codes(uint32_t word, int shift) {
  uint32_t d;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(d) : "r"(word >> shift), "r"(Float16<T>::kMagic));  // a & b | c
  return d;
}

// A word's eight codes as the A operand: codes minus zero points, exact. `zeros`: of the even and the odd output, as
// pairs, negative and above kMagic's base.
template <class T>
__device__ __forceinline__ void to_operand(uint32_t (&a)[4], uint32_t word, const uint32_t (&zeros)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = Float16<T>::add(codes<T>(word, 4 * i), zeros[i & 1]);
}

__device__ __forceinline__ float scale_of(uint32_t bits, bool fp16) {
  return fp16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits << 16);
}

// The scales of a lane's two outputs of a tile, and their zero points as `to_operand` wants them.
template <class T>
__device__ __forceinline__ void read_scales(float (&scale)[2], uint32_t (&zeros)[2], const uint8_t* tile, int pair,
                                            int scale_bytes, bool fp16) {
  constexpr uint32_t kNegative = Float16<T>::kMagic | 0x80008000;
  if (scale_bytes == 4) {
    const uint2 both = reinterpret_cast<const uint2*>(tile)[pair];
    scale[0] = scale_of(both.x & 0xffff, fp16);
    scale[1] = scale_of(both.y & 0xffff, fp16);
    zeros[0] = kNegative + __byte_perm(both.x, 0, 0x3232);
    zeros[1] = kNegative + __byte_perm(both.y, 0, 0x3232);
  } else {
    const uint32_t both = reinterpret_cast<const uint32_t*>(tile)[pair];
    scale[0] = scale_of(both & 0xffff, fp16);
    scale[1] = scale_of(both >> 16, fp16);
    zeros[0] = zeros[1] = kNegative + 0x00080008;
  }
}

// sm_90, in a file of its own since its instructions need another target.
void run_sm90(Int4Arguments p, const Partition& part, bool fp16, int device, cudaStream_t stream);

}  // namespace ktinject::cuda::int4
