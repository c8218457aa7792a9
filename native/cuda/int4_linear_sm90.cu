// int4 weights times bf16 or fp16 activations on Hopper: which kernel multiplies, and in how many blocks.
//
//   up to 16 tokens  int4_few_sm90.cu: mma.m16n8k16 as on sm_80, sums scaled in fp32
//   more             int4_many_sm90.cu: wgmma, weights from registers, activations from shared memory
//                    int4_narrow_sm90.cu: the same in smaller blocks
//                    int4_whole_sm90.cu: in blocks of whole sums, for small layers
//
// A layer with much work is one line of stages, as in int4_linear.cu. In a small one each strip is shared by a cluster
// of blocks, which add up their sums through each other's shared memory: no scratch, no counters, and less waiting.
// int4_blocks.cpp chooses.
#include "cuda/int4_sm90.cuh"

namespace ktinject::cuda::int4 {
namespace {

// cuTensorMapEncodeTiled, from the driver and not from a library to link with.
CUtensorMap map_of(const Int4Arguments& p, int rows, bool fp16) {
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
  const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(rows)}, steps[2] = {1, 1};
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

void run_sm90(Int4Arguments p, const Partition& part, bool fp16, int device, cudaStream_t stream) {
  const CUtensorMap map = map_of(p, part.tokens, fp16);
  const Call call{p, part, map, device, stream};
  if (part.tokens <= 16) run_few_sm90(call, fp16);
  else if (part.whole) run_whole_sm90(call, fp16);
  else is_narrow(part) ? run_narrow_sm90(call, fp16) : run_many_sm90(call, fp16);
}

}  // namespace ktinject::cuda::int4
