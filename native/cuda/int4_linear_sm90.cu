// int4 weights times bf16 or fp16 activations on Hopper: which kernel multiplies, and in how many blocks.
//
//   up to 16 tokens  int4_few_sm90.cu: mma.m16n8k16 as on sm_80, sums scaled in fp32
//   more             int4_many_sm90.cu: wgmma, weights from registers, activations from shared memory
//
// A layer with much work is one line of stages, as in int4_linear.cu. In a small one each strip is shared by a cluster
// of blocks, which add up their sums through each other's shared memory: no scratch, no counters, and less waiting.
#include <algorithm>

#include "cuda/int4_sm90.cuh"

namespace ktinject::cuda::int4 {
namespace {

// cuTensorMapEncodeTiled, from the driver and not from a library to link with.
CUtensorMap map_of(const Int4Arguments& p, int tokens, bool fp16) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
          "looking for cuTensorMapEncodeTiled");
    if (found == nullptr) throw std::runtime_error("int4_linear: the driver has no cuTensorMapEncodeTiled; update it.");
    return reinterpret_cast<Encode>(found);
  }();
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(p.k), static_cast<cuuint64_t>(p.m)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(p.k) * 2};
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(tokens)}, steps[2] = {1, 1};
  const CUresult result =
      encode(&map, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             const_cast<uint8_t*>(p.x), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("int4_linear: describing the activations failed with driver error " +
                             std::to_string(result));
  return map;
}

}  // namespace

namespace {

// Tokens of a block: with 256, half as many conversions a product, if that adds few rows that nobody wants.
int tokens_of(int m) {
  if (m <= 128) return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
  const int blocks = (m + 127) / 128;
  return blocks % 2 == 0 || blocks > 20 ? 256 : 128;
}
int outputs_of(int tokens) { return tokens == 256 ? 128 : 256; }

// Strips that are each shared by a cluster of up to eight blocks, `wanted` in all. `room`: blocks that the GPU runs at
// a time; a cluster's stand close together, so that with four or eight a part of that stays empty.
Partition clusters(int n, int k, int m, int tokens, int wanted, int room) {
  Partition p = cut(n, k, m, tokens, 256, wanted);
  p.sharers = 1;
  for (int sharers = 2; sharers <= 8; sharers *= 2) {
    const int blocks = sharers * p.units;
    if (blocks <= wanted && 11 * blocks <= (sharers >= 4 ? 10 : 11) * room && sharers <= k / 64) p.sharers = sharers;
  }
  p.blocks = p.units * p.sharers;
  return p;
}

}  // namespace

Partition partition_sm90(int n, int k, int m, int multiprocessors) {
  constexpr int kMuch = 16;  // stages a block: worth it that all blocks have as many
  const int tokens = tokens_of(m);
  // With few tokens, two blocks on a multiprocessor hide each other's waits.
  const int room = tokens <= 16 ? 2 * multiprocessors : multiprocessors;
  Partition line = cut(n, k, m, tokens, outputs_of(tokens), room);
  const bool much = line.share >= kMuch;
  const Partition cluster = clusters(n, k, m, std::min(tokens, 64), much ? room : multiprocessors, room);
  if (cluster.sharers > 1 && (!much || (tokens <= 16 && 5 * room <= 6 * cluster.blocks))) return cluster;
  // Whole strips, where that keeps nearly all multiprocessors busy: nothing to add up.
  const int turns = (line.units + room - 1) / room;
  if (20 * turns * room <= 21 * line.units) {
    line.share = turns * (k / 64);
    line.blocks = (line.units + turns - 1) / turns;
  }
  return line;
}

void run_sm90(Int4Arguments p, const Partition& part, bool fp16, int device, cudaStream_t stream) {
  const CUtensorMap map = map_of(p, part.tokens, fp16);
  const Call call{p, part, map, device, stream};
  part.tokens <= 16 ? run_few_sm90(call, fp16) : run_many_sm90(call, fp16);
}

}  // namespace ktinject::cuda::int4
