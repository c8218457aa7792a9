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
// Between a submit of one token and its wait: ids [top_k] of experts that `next` will perhaps be asked for.
void launch_foresee(const SlotView& slot, Layer* next, const int64_t* ids, int top_k, cudaStream_t stream);
// What happens between two steps: changes of tables of places, and counts of uses on their way to the host. Both lists
// are launched whenever they are full.
class Boundary {
 public:
  static constexpr int kMost = 64;
  struct Lists {
    int32_t* at[kMost];
    int32_t value[kMost];
    const uint32_t* traffic[kMost];
    uint32_t* to[kMost];
    int experts[kMost];
    int changes = 0, layers = 0;
  };
  void change(int32_t* at, int32_t value, cudaStream_t stream);
  void count(const uint32_t* traffic, uint32_t* to, int experts, cudaStream_t stream);
  void launch(cudaStream_t stream);

 private:
  Lists lists_{};
};
// Looks which of these slots are free, for so long or until each has been free once. Writes to `free`, mapped and one
// for each entry, whether all slots of the entry have been.
constexpr int kMostIdle = 128;
struct IdleList {
  Counts* counts[kMostIdle];
  int slots[kMostIdle];
  int length = 0;
};
void launch_idle(const IdleList& list, uint32_t* free, uint64_t most_ns, cudaStream_t stream);
// Writes `ask`, then `heard` once it sees the host's answer: whether each side sees what the other writes while a
// kernel runs. Returns the error of the launch.
cudaError_t launch_echo(uint32_t* ask, const uint32_t* answer, uint32_t* heard, cudaStream_t stream);

}  // namespace ktinject::handoff
