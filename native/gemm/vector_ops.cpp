#include "gemm/vector_ops.hpp"

#include "runtime/cpu_features.hpp"

namespace ktinject {

const Stages& choose_stages(uint32_t isa) {
  for (const Stages* stages : {&kAvx512Stages, &kAvx2Stages})
    if ((stages->isa & ~(cpu_features() & isa)) == 0) return *stages;
  return kBaselineStages;
}

}  // namespace ktinject
