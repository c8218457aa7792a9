// From a CUDA stream to the dispatcher and back, in order, eagerly or captured, without a call of the CUDA API by any
// other thread.
//
//   stream                        mapped host memory                dispatcher
//   submit kernel   ── x, then an entry; ids, weights ──►   finds the entry, then ids and weights, computes
//   (other work)                                            writes the output, raises `answer`
//   wait kernel     ◄── watches both, takes the output ──   (next entry)
//
// Counts live in device memory and are advanced by the kernels themselves, so every replay of a captured graph is a new
// submit. A slot that is still in use by another stream is waited for on the device.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/resident.hpp"
#include "moe/experts.hpp"

namespace ktinject::handoff {

enum class Mode { flags, host_func };

// Where the submit itself chooses the experts: by softmax over logits [tokens, experts], of the dtype of the weights,
// which it writes with the ids; divided by their sum if `normed`.
struct Routing {
  const void* logits = nullptr;
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
  // Where an expert lies on the device, or -1, [experts + 1]: what lies there is not the CPU's to compute. May change
  // at any time, so what this submit found is written to `chosen` [tokens, top_k]; null where there is none.
  const int32_t* places = nullptr;
  int32_t* chosen = nullptr;
  uint32_t* traffic = nullptr;  // [experts]: one is added for each time an expert is asked for; or null
  // Only the experts of a token whose rank by |weight| is within, the greatest first and equal ones by their place.
  int rank_from = 0;
  int rank_to = 64;
  Routing routing{};  // ids and weights are then written, not read
};

// Whether mapped flags work on a device, found out by one round trip; the reason if not, else empty.
std::string why_no_flags(int device);

// One owner's slots on one device. Calls for one slot alternate: submit, wait, submit, …
class Channel {
 public:
  // Slots hold `tokens` tokens of dtypes of up to `value_bytes` bytes. Throws std::runtime_error or std::bad_alloc.
  Channel(const moe::Experts& experts, int device, int slots, int tokens, int value_bytes, Mode mode);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Mode mode() const;
  size_t bytes() const;
  // Throws std::invalid_argument for a request that does not fit.
  void submit(int slot, const DeviceRequest& request, uintptr_t stream);
  // out [tokens, hidden] = the answer + addend, rounded, + residual, rounded again; tokens and dtype are the request's,
  // addend [tokens, hidden] is fp32 or null, residual of that dtype or null. With a null `out` the answer is waited for
  // and dropped.
  void wait(int slot, int tokens, DType dtype, void* out, const float* addend, const void* residual, uintptr_t stream);
  // Puts expert `coming` of `from` to where `leaving` lies in `memory`, once no step that uses `leaving` is under way.
  // Enqueues in `stream`, which is not the one that submits; they go on meanwhile.
  void exchange(const cuda::Resident& shapes, const moe::Experts& from, int leaving, int coming, int place,
                int32_t* places, void* memory, uintptr_t stream);
  // Throws what went wrong since the last call: what the CPU threw, or that nobody answered in time.
  void check();

 private:
  struct Slot;
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace ktinject::handoff
