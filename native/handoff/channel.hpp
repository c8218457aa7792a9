// The GPU's side of the handoff: buffers, launches, and what went wrong. protocol.hpp draws what happens between GPU
// and CPU.
//
// Work goes from a CUDA stream to the dispatcher thread and back in the stream's order, eagerly or captured. No other
// thread calls CUDA for it. Counts live in device memory and are advanced by the kernels themselves, so every replay of
// a captured graph is a new submit. A slot that another stream still uses is waited for on the device. A graph keeps
// the slots of its submits as long as it can be replayed; without their layer, it gets NaN.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/resident.hpp"
#include "handoff/slots.hpp"
#include "moe/experts.hpp"

namespace ktinject::handoff {

// For a submit that chooses the experts itself: the greatest by softmax over logits [tokens, experts]. The submit then
// writes ids, and weights of the logits' dtype or float32; `normed` divides the weights by their sum.
struct Routing {
  const void* logits = nullptr;
  DType dtype = DType::bf16;
  bool normed = false;
};

// What a submit takes; device pointers, contiguous.
struct DeviceRequest {
  const void* x = nullptr;  // [tokens, hidden] of dtype
  DType dtype = DType::bf16;
  const void* ids = nullptr;  // [tokens, top_k]
  bool ids_are_64_bit = false;
  const void* weights = nullptr;  // [tokens, top_k]
  DType weights_dtype = DType::f32;
  int tokens = 0;
  int top_k = 0;
  // [experts]: the place of an expert on this GPU, or -1. The CPU skips the experts that are here. The table may change
  // at any time, so the submit writes the places that it has read to `chosen` [tokens, top_k], or nowhere. Null: no
  // expert is here.
  const int32_t* places = nullptr;
  int32_t* chosen = nullptr;
  uint32_t* traffic = nullptr;  // [experts]: counts how often each expert is asked for; or null
  // Of a token's experts, only those with a rank from rank_from to rank_to - 1. Rank 0 has the greatest |weight|; of
  // equal weights, the first comes first.
  int rank_from = 0;
  int rank_to = 64;
  // [tokens]: 0 for rows whose result is not needed; all their ids count as -1. Null: all rows are needed.
  const uint8_t* live = nullptr;
  bool skips_unknown = false;  // ids that are no expert count as -1; else the CPU refuses them
  Routing routing{};           // with logits, ids and weights are written, not read
};

// The counters of some slots, in device memory.
struct SlotCounts {
  Counts* counts = nullptr;
  int slots = 0;
};

// Submits of one layer from one device. Calls for a slot alternate: submit, wait, submit, …
class Channel {
 public:
  // Throws std::runtime_error or std::bad_alloc.
  Channel(const moe::Experts& experts, int device);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Throws std::invalid_argument for a request that does not fit.
  void submit(const std::shared_ptr<Slots>& slots, int slot, const DeviceRequest& request, uintptr_t stream);
  // out [tokens, hidden] = answer + addend, rounded, + residual, rounded again. tokens and dtype are those of the
  // request. addend [tokens, hidden] is fp32 or null; residual is of dtype or null. A null `out` drops the answer.
  // `submitted_in`: the stream of the submit, which this one then waits for.
  void wait(const std::shared_ptr<Slots>& slots, int slot, int tokens, DType dtype, void* out, const float* addend,
            const void* residual, uintptr_t stream, uintptr_t submitted_in);
  // Between submit and wait of another layer, of one token: ids [top_k] on the device, int64, of experts of this layer
  // that will perhaps be asked for next. `slots` are of that submit. Throws std::invalid_argument for another device.
  void foresee(const std::shared_ptr<Slots>& slots, int slot, const int64_t* ids, int top_k, uintptr_t stream);
  // Of all slots that submits of this layer have used so far, by which kernels of theirs may be under way.
  std::vector<SlotCounts> slot_counts() const;
  // Throws what went wrong since the last call: what the CPU threw, or that no answer came in time.
  void check();

 private:
  std::vector<std::shared_ptr<Slots>> used() const;
  void check_request(const Slots& slots, const DeviceRequest& request) const;
  void release_lost();
  void lose_announcements() const;

  const int device_;
  const int expert_count_;
  Layer* const layer_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Slots>> foreseen_in_;  // of other layers, whose work may come to this one's experts
  std::vector<std::shared_ptr<Slots>> used_;         // kept while a submit of this layer may be under way
};

}  // namespace ktinject::handoff
