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

#include "handoff/dispatcher.hpp"
#include "handoff/protocol.hpp"
#include "moe/experts.hpp"

namespace ktinject::handoff {

enum class Mode { flags, host_func };

// Why mapped flags do not work on a device; empty if they do. Tried once a process, by one round trip.
std::string why_no_flags(int device);

// Pinned bytes of all Slots that there are or were: what those leave is used again.
size_t pinned_bytes();

// What the dispatcher thread knows of a layer. Never freed, since an entry that comes late may name it: some 200 bytes.
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

// One submit at a time has a slot.
struct Slot final : Work {
  SlotView view{};
  Mode mode = Mode::flags;
  uint32_t address = 0;               // of its port
  uint32_t entries = 0;               // that the dispatcher has seen: in the ring, or from host functions
  std::atomic<uint32_t> given_up{0};  // entries up to this one get no answer any more
  std::vector<int32_t> ids;           // of the request that runs
  std::vector<float> weights;
  std::atomic<uint32_t> called{0}, ended{0};  // host functions that the driver has called, and entries that are done

  void run() noexcept override;
  // Host functions of a stream, on a thread of the driver: what flags do otherwise.
  static void announce(void* slot);
  static void await_answer(void* slot);

 private:
  void receive(uint32_t count);
  void compute(uint32_t count);
};

// Slots in one block of mapped memory. What puts kernels into streams, or captures them, keeps the Slots until these
// kernels have ended for good: a Channel, and the graphs themselves.
class Slots {
 public:
  // Each of `count` slots has room for x and an answer of `bytes` bytes each, and for `routes` ids and weights.
  // `shared`: used by several layers, whose submits follow each other; with flags only. Also while a graph is captured.
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
