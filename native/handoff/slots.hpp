// The buffers of submits under way, and what the dispatcher thread does with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "handoff/arrivals.hpp"
#include "handoff/dispatcher.hpp"
#include "handoff/protocol.hpp"
#include "moe/experts.hpp"

namespace ktinject::handoff {

enum class Mode { flags, host_func };

// Why mapped flags do not work on a device; empty if they do. Tried once a process, by one round trip.
std::string why_no_flags(int device);

// Pinned bytes of all Slots, also of deleted ones: their blocks are kept for reuse.
size_t pinned_bytes();

// What the dispatcher thread knows of a layer. Never freed, since a late entry may name it; it is some 200 bytes.
struct Layer {
  // Throws std::runtime_error or std::bad_alloc.
  static Layer* make(const moe::Experts& experts, int device);
  // Keeps the first failure since the last one was taken.
  void fail(std::exception_ptr why);
  // The failure since the last call, or null.
  std::exception_ptr take_failure();

  std::atomic<const moe::Experts*> experts{nullptr};  // null: gone
  size_t hidden = 0;
  uint32_t* status = nullptr;

 private:
  std::mutex mutex_;
  std::exception_ptr failure_;
  std::atomic<bool> failed_{false};
};

// The buffers of one submit at a time.
struct Slot final : Work {
  SlotView view{};
  Mode mode = Mode::flags;
  uint32_t address = 0;               // of its port
  uint32_t entries = 0;               // entries that the dispatcher has seen, from the ring or from host functions
  std::atomic<uint32_t> given_up{0};  // entries up to this one get no answer any more
  std::vector<int32_t> ids;           // of the request that runs
  std::vector<float> weights;
  std::atomic<uint32_t> called{0};  // host functions that the driver has called
  Arrivals ended;                   // entries that are done
  void* freed = nullptr;            // an event behind the last wait outside of graphs
  uintptr_t freed_in = 0;           // and that wait's stream

  void run() noexcept override;
  // Outside of graphs, a submit follows the wait that used the slot before. If it came first on the device and spun for
  // the slot, it could spin for a wait that is not queued yet, by a thread that the driver holds up until the device is
  // idle, as it does to load a kernel. Both throw std::runtime_error.
  void free_after(int device, uintptr_t stream);
  void follow_in(uintptr_t stream) const;
  // Host functions of a stream, which run on a thread of the driver. They replace the flags in Mode::host_func. With
  // flags, too, a wait that may take long is one of the host's where the driver ends kernels that run for long.
  static void announce(void* slot);
  static void await_answer(void* slot);

 private:
  void receive(uint32_t count);
  void compute(uint32_t count);
  void look_ahead(uint32_t count) noexcept;
};

// Slots in one block of mapped memory. A Channel that has launched kernels on the Slots keeps them alive until the
// kernels have ended. A graph that has captured such kernels keeps them alive as long as it can be replayed.
class Slots {
 public:
  // Each of `count` slots has room for x and an answer of `bytes` bytes each, and for `routes` ids and weights.
  // `shared`: used by several layers, whose submits follow each other; with flags only. May be called during a capture.
  // Throws std::runtime_error or std::bad_alloc.
  Slots(int device, int count, size_t bytes, size_t routes, Mode mode, bool shared);
  ~Slots() { leave(); }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Pinned bytes that it holds.
  size_t bytes() const { return total_; }

  const int device;
  const Mode mode;
  const bool shared;
  const size_t most_bytes, most_routes;  // of a slot
  RingView ring{};                       // of the device
  Counts* counts = nullptr;              // of the slots, in device memory
  std::vector<std::unique_ptr<Slot>> all;

 private:
  void leave();

  size_t count_ = 0, total_ = 0;
  std::byte* block_ = nullptr;
};

}  // namespace ktinject::handoff
