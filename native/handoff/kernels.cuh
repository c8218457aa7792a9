// The kernels of the handoff, and how they are launched.
#pragma once

#include <cuda_runtime.h>

#include "handoff/channel.hpp"
#include "handoff/protocol.hpp"

namespace ktinject::handoff {

struct Payload {
  const void* x;
  size_t bytes;
  const void* ids;
  const void* weights;
  const int32_t* places;
  int32_t* chosen;
  uint32_t* traffic;
  int experts;
  uint32_t tokens;
  uint32_t top_k;
  uint32_t rank_from;
  uint32_t rank_to;
  uint32_t dtype;
  bool wide_ids;
  uint32_t weights_dtype;
  Routing routing;
};

// What is added to the answer, before and after it is rounded; null or [tokens, hidden].
struct Added {
  const float* part;
  const void* residual;
};

void launch_submit(const View& slot, const Bell& bell, const Payload& payload, uint64_t timeout_ns,
                   cudaStream_t stream);
// `values` of `dtype`.
void launch_wait(const View& slot, void* out, const Added& added, size_t values, DType dtype, uint64_t timeout_ns,
                 cudaStream_t stream);
// Takes an expert off the table, and ends when every step that may have seen it there has.
void launch_evict(int32_t* places, int expert, Counts* counts, int slots, uint64_t timeout_ns, cudaStream_t stream);
void launch_admit(int32_t* places, int expert, int place, cudaStream_t stream);
// Asks and spins on the answer: whether host and device see each other's writes while a kernel runs.
cudaError_t launch_echo(uint32_t* ask, const uint32_t* answer, uint32_t* heard, cudaStream_t stream);

}  // namespace ktinject::handoff
