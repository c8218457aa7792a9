// The loops of gemm/step_ops.inl for the avx512 level.
#include "gemm/step_ops.hpp"

#include "gemm/kernels/tiles.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
namespace ktinject::gemm {
namespace avx512 {
constexpr int kVector = 16;
#include "gemm/step_ops.inl"
// Needs what the one before has.
#include "gemm/attend_tiles.inl"

template <class Tiles>
constexpr StepOps on_tiles() {
  StepOps ops = kStepOps;
  ops.attend = attend_tiles<Tiles>;
  ops.attend_scratch = attend_tiles_scratch;
  ops.attend_heads = kManyHeads;
  return ops;
}
}  // namespace avx512

const StepOps kAvx512StepOps = avx512::kStepOps;
const StepOps kAmxStepOps = avx512::on_tiles<HardwareTiles>();
const StepOps kModelledAmxStepOps = avx512::on_tiles<ModelTiles>();

}  // namespace ktinject::gemm
#pragma GCC pop_options
