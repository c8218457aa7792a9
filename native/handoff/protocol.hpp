// What a GPU and the CPU agree on. Kernels and the dispatcher thread both include this file.
//
// Slots lie in mapped host memory. A submit kernel fills a slot and puts an entry into the ring of its device. The
// dispatcher thread finds the entry, computes, and writes the answer into the slot. A wait kernel takes the answer.
// `count` is the number of submits that a slot has had: it tells the present submit from earlier ones. The head says
// whose experts are asked, so that layers whose submits follow each other can use one slot.
//
//   submit kernel                          mapped memory        dispatcher thread
//   takes the slot (busy 0 → 1)            in device memory
//   plain stores: NaN patterns          →  out
//   plain stores                        →  x, head
//   one 8-byte store for each value     →  ids, weights      →  3. acquire loads, until each carries `count`
//   barrier, __threadfence_system()
//   one 8-byte store                    →  ring entry        →  1. acquire load: x, head and the patterns are seen
//                                                               2. reads x, head
//   wait kernel                                                 4. computes
//   1. volatile loads of 16 bytes      ◄─  out              ◄─  5. plain stores of the answer
//   2. acquire load, system scope      ◄─  head.answered    ◄─  6. release store of `count`
//      (alone, as long as no answer can be expected)
//   3. fence, frees the slot (busy 1 → 0)  in device memory
//
// Between the two, and only as a hint, the GPU may say which experts the next layer will be asked for:
//
//   foresee kernel
//   plain stores, __threadfence_system() →  head             →  after 6: reads them, if all ids carry `count` by then
//   one 8-byte store for each value      →  foreseen         →  acquire loads, once
//
// Two things need no order, so nobody waits for one:
//   - ids and weights. The warps that choose experts write them while other warps write the entry. Each value stands
//     beside its count in one 8-byte word, so the CPU sees for each one whether it is there.
//   - values of the answer. submit() pre-fills the answer with a NaN bit pattern that no kernel produces by itself, so
//     the wait kernel sees for each value whether it is there. It takes an answer that contains this very pattern as
//     soon as `answered` has reached the count. Where a thread has more than one piece of the answer, the wait kernel
//     relies on `answered` alone, and submit() writes no pattern.
//
// What is long goes the same way by three kernels instead of one, so that many blocks copy: one takes the slot, one
// fills it, and one writes head and entry; one waits, one copies, and one frees the slot.
//
// `status` is written by kernels (plain stores) and by host functions, and read by both (acquire). While it is not
// kFine, all waits of the layer end. Channel::check() sets it back (release) when nothing is on its way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/host_device.hpp"

namespace ktinject::handoff {

// An entry of a ring: ticket + 1 above the address of a port. Tickets count the entries, so a ring that is full of old
// entries needs no clearing. An address is a port's index below the generation of its owner: when a port gets a new
// owner, entries for the one before are skipped.
constexpr uint32_t kRingEntries = 4096;
constexpr uint32_t kPortBits = 12;
constexpr uint32_t kMostPorts = (1u << kPortBits) - 1;
constexpr uint32_t kAnnounced = 1u << 31;     // set in the entry of a submit that called announce()
constexpr uint32_t kNobody = kAnnounced - 1;  // no port's address: its entry only takes an announcement back

KTINJECT_HOST_DEVICE constexpr uint64_t ring_entry(uint32_t ticket, uint32_t address) {
  return static_cast<uint64_t>(ticket + 1) << 32 | address;
}
constexpr bool has_ticket(uint64_t entry, uint32_t ticket) { return static_cast<uint32_t>(entry >> 32) == ticket + 1; }

// Experts that a token may be sent to; the forward pass has the same limit.
constexpr int kMostExpertsPerToken = 64;

enum Status : uint32_t { kFine = 0, kNoAnswer = 1, kSlotTaken = 2 };

// An expert's id, or the bits of its weight, below the count of its submit.
using Counted = uint64_t;
KTINJECT_HOST_DEVICE constexpr Counted counted(uint32_t count, uint32_t value) { return Counted{count} << 32 | value; }
constexpr uint32_t count_of(Counted word) { return static_cast<uint32_t>(word >> 32); }
constexpr uint32_t value_of(Counted word) { return static_cast<uint32_t>(word); }

// The head of a slot. What the GPU writes and what the CPU writes lie on cache lines of their own.
struct Layer;
struct Head {
  alignas(128) Layer* layer;  // whose experts are asked
  uint32_t tokens;
  uint32_t top_k;
  uint32_t dtype;
  uint32_t count;  // of this submit
  Layer* next;     // whose experts are foreseen, and how many
  uint32_t next_top_k;
  alignas(128) uint32_t answered;  // the count of the last submit that has an answer
};

// What the kernels of one slot keep in device memory.
struct Counts {
  uint32_t busy;       // 1 from a submit until its wait has taken the answer
  uint32_t submitted;  // submits so far
  uint32_t lost;       // the last submit did not get the slot
  uint32_t quiet_ns;   // of the next wait: how long it only looks at `answered`, see waits.hpp
};

// A slot, as kernels and the dispatcher thread get it.
struct SlotView {
  Head* head;
  std::byte* x;       // [tokens, hidden]
  Counted* ids;       // [tokens, top_k]; -1: not the CPU's to compute
  Counted* weights;   // [tokens, top_k], fp32
  std::byte* out;     // [tokens, hidden]
  Counted* foreseen;  // [kMostExpertsPerToken], of the next layer; -1: not the CPU's to compute
  Counts* counts;
  uint32_t* status;  // the layer's, in mapped memory
  Layer* layer;
};

// Where a submit kernel puts its entry.
struct RingView {
  uint64_t* entries;     // mapped; null: nobody reads them, and a host function calls instead
  uint32_t* ticket;      // of the next entry, in device memory
  uint32_t address = 0;  // the slot's, with kAnnounced or without
};

}  // namespace ktinject::handoff
