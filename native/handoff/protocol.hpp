// What a GPU and the CPU agree on: rings, slots, counts and addresses. Both sides include this file.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ktinject::handoff {

constexpr uint32_t kRingEntries = 4096;
constexpr uint32_t kAnnounced = 1u << 31;  // set in entries whose submit called announce()
constexpr uint32_t kPortBits = 12;         // of an address; above them is the port's generation
constexpr uint32_t kMostPorts = (1u << kPortBits) - 1;
constexpr uint32_t kNobody = kAnnounced - 1;  // an address that open() never gives: its entries only count

constexpr int kMostSlotsPerToken = 64;  // experts a token may be sent to, as in the forward pass

enum Status : uint32_t { kFine = 0, kNoAnswer = 1, kSlotTaken = 2 };

// The head of a slot in mapped memory. What the CPU writes and what the GPU writes lie on lines of their own.
struct Head {
  alignas(128) uint32_t tokens;
  uint32_t top_k;
  uint32_t dtype;
  uint32_t count;                // submits so far
  alignas(128) uint32_t answer;  // of them, answered so far
};

// A slot's part of device memory.
struct Counts {
  uint32_t busy;    // a submit whose answer has not been fetched
  uint32_t posted;  // submits so far
  uint32_t lost;    // the last submit gave up
};

// An expert's id, or the bits of its weight, above the count of the submit that it belongs to: the CPU sees by itself
// which have arrived, so the GPU need not wait between them and the entry of the ring.
using Route = uint64_t;

struct View {
  Head* head;
  std::byte* x;
  Route* ids;
  Route* weights;
  std::byte* out;
  Counts* counts;
  uint32_t* status;  // of the channel, mapped
};

struct Bell {
  uint64_t* ring;        // mapped; null: nobody watches it, a host function calls instead
  uint32_t* ticket;      // device memory
  uint32_t address = 0;  // the dispatcher's of the slot, announced or not
};

}  // namespace ktinject::handoff
