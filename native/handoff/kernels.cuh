// The kernels of the handoff, and how they are launched.
#pragma once

#include <cuda_runtime.h>

#include "handoff/channel.hpp"
#include "handoff/protocol.hpp"

namespace ktinject::handoff {

// A DeviceRequest as the submit kernel takes it.
struct Payload {
  const void* x;
  size_t bytes;  // of x
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
  bool ids_are_64_bit;
  uint32_t weights_dtype;
  const uint8_t* live;
  bool skips_unknown;
  Routing routing;
};

// What a wait adds to the answer, before and after it is rounded; null or [tokens, hidden].
struct Epilogue {
  const float* addend;
  const void* residual;
};

// The first warps choose the experts where the submit routes; the others copy and then put the entry into the ring.
void launch_submit(const SlotView& slot, const RingView& ring, const Payload& payload, uint64_t timeout_ns,
                   cudaStream_t stream);
// `values`: of the answer, of `dtype`. A null `out`: the answer is dropped.
void launch_wait(const SlotView& slot, void* out, const Epilogue& epilogue, size_t values, DType dtype,
                 uint64_t timeout_ns, cudaStream_t stream);
// Takes an expert off the table of places. Ends when every step that may have seen it there has ended.
void launch_evict(int32_t* places, int expert, Counts* counts, int slots, uint64_t timeout_ns, cudaStream_t stream);
// Puts an expert on the table.
void launch_admit(int32_t* places, int expert, int place, cudaStream_t stream);
// Writes `ask`, then `heard` once it sees the host's answer: whether each side sees what the other writes while a
// kernel runs. Returns the error of the launch.
cudaError_t launch_echo(uint32_t* ask, const uint32_t* answer, uint32_t* heard, cudaStream_t stream);

}  // namespace ktinject::handoff
