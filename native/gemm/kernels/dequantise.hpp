// Packed floats of 8 and 4 bits to bf16 blocks, as tiles and bf16 dot products take them: code * scale, rounded to
// bf16; without the factor that some formats have for each output.
//
// A kernel decodes a slice of a panel once, into scratch that stays in the L1 cache, and lets all its rows pass by.
#pragma once

#include "gemm/layout.hpp"

namespace ktinject::gemm {

// to [blocks][2 tiles][16 rows][64 bytes], 64-byte aligned = blocks `first` ... of `panel`. What lies `ahead` bytes
// further on is prefetched: where panels are read from end to end, far enough to keep the memory busy.
using Decode = void (*)(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                        std::byte* to);
inline constexpr size_t kDecodeAhead = 4096;

void avx512_decode_fp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to);
void avx512_decode_mxfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                         std::byte* to);
void avx512_decode_nvfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                         std::byte* to);
void avx512_decode_mxfp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                         std::byte* to);
void avx2_decode_fp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead, std::byte* to);
void avx2_decode_mxfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to);
void avx2_decode_nvfp4(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to);
void avx2_decode_mxfp8(const Matrix& matrix, const std::byte* panel, int first, int blocks, size_t ahead,
                       std::byte* to);

// Blocks that are decoded at a time: 2 KiB each.
inline constexpr int kDecodedBlocks = 4;

// bf16 bits of the e2m1 values, less the exponent's bias: adding e8m0 << 7 gives value * 2^(e8m0 - 127), but for zeros.
inline constexpr uint16_t kE2m1Bits[16] = {0xc080, 0xff80, 0x0000, 0x0040, 0x0080, 0x00c0, 0x0100, 0x0140,
                                           0x4080, 0x7f80, 0x8000, 0x8040, 0x8080, 0x80c0, 0x8100, 0x8140};

// For each e2m1 code what is added to the bf16 bits of its scale, or of 1.5 times its scale less one bit: sign,
// exponent, and in the lowest bit which of the two it is.
inline constexpr uint16_t kE2m1Added[16] = {0x0000, 0xff80, 0x0000, 0x0001, 0x0080, 0x0081, 0x0100, 0x0101,
                                            0x8000, 0x7f80, 0x8000, 0x8001, 0x8080, 0x8081, 0x8100, 0x8101};

}  // namespace ktinject::gemm
