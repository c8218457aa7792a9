// Rounds activations to fp8 with a scale for each 128 inputs of a token, as cuBLAS's block-scaled product takes them.
#pragma once

namespace ktinject::cuda {

// values [padded, k] e4m3, scales [k / 128, padded] fp32: x = values · scale; rows from m to `padded` are zeros.
// x [m, k] bf16, or fp16, contiguous and aligned to 8 bytes, k a multiple of 128. Runs on `stream`.
void fp8_quantise(const void* x, bool fp16, int m, int padded, int k, void* values, float* scales, int device,
                  void* stream);

}  // namespace ktinject::cuda
