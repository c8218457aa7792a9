// y = x · Wᵀ + b with W in int4, packed for the tensor cores. operators/linears/int4_layout.py packs and draws the
// layout.
#pragma once

#include <cstddef>

#include "cuda/int4_blocks.hpp"

namespace ktinject::cuda {

// A packed weight [n, k] on one device.
struct Int4Matrix {
  const void* words;   // uint32, eight codes each
  const void* scales;  // of 16 bits, or of 32: zero point << 16 | scale
  int n = 0;
  int k = 0;                 // a multiple of 64
  int group_size = 0;        // 32, or a multiple of 64 that divides k
  bool has_zeros = false;    // else every zero point is 8
  bool fp16_scales = false;  // else bf16
  bool sm80_only = false;    // leave sm_90's own kernels out, to test the others there
  bool every_lane = false;   // for racecheck: every lane signals that it has read, see int4_sm90.cuh
  // On sm_90, with more than 16 tokens, to test and measure each: blocks for which `why_not` is null. None: the
  // fastest.
  int4::Blocks blocks{};
};

// Sizes of the scratch memory of one call: `partials_bytes` need not be initialised; `counters` ints must be zero
// before the first call and are zero again after each.
struct Int4Scratch {
  size_t partials_bytes = 0;
  size_t counters = 0;
};
Int4Scratch int4_scratch(const Int4Matrix& weight, int m, int device);

// y [m, n] = x [m, k] · Wᵀ + bias. x and y bf16, or fp16; rows contiguous, x aligned to 16 bytes and y to 4; bias [n]
// fp32 or null. Runs on `stream`, allocates nothing, may be captured. Throws std::runtime_error if the launch fails,
// std::invalid_argument for what is not served.
void int4_linear(const Int4Matrix& weight, const float* bias, const void* x, bool fp16, int m, void* y, void* partials,
                 int* counters, int device, void* stream);

// out [rows, k] bf16, or fp16, = W[first_row : first_row + rows], each value rounded once; first_row a multiple of 64.
void int4_dequantise(const Int4Matrix& weight, int first_row, int rows, bool fp16, void* out, int device, void* stream);

}  // namespace ktinject::cuda
