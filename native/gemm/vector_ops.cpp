#include "gemm/vector_ops.hpp"

#include "runtime/cpu_features.hpp"

namespace ktinject::gemm {

using namespace runtime;  // the bits of instruction sets

const VectorOps& choose_vector_ops(uint32_t isa) {
  for (const VectorOps* ops : {&kAvx512VectorOps, &kAvx2VectorOps})
    if ((ops->isa & ~(cpu_features() & isa)) == 0) return *ops;
  return kBaselineVectorOps;
}

}  // namespace ktinject::gemm
