#include "handoff/channel.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>

#include "cuda/on_device.cuh"
#include "cuda/route.cuh"
#include "handoff/dispatcher.hpp"
#include "handoff/kernels.cuh"

namespace ktinject::handoff {
namespace {

using cuda::AsideOfCaptures;
using cuda::check_cuda;
using cuda::OnDevice;

uint64_t timeout_ns() { return static_cast<uint64_t>(answer_timeout() * 1e9); }

struct FreeMapped {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
template <class T>
using Mapped = std::unique_ptr<T, FreeMapped>;
template <class T>
using Counters = std::unique_ptr<T, FreeDevice>;

template <class T>
Mapped<T> mapped(size_t bytes) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "allocating mapped memory");
  std::memset(memory, 0, bytes);
  return Mapped<T>(static_cast<T*>(memory));
}

template <class T>
Counters<T> counters_of(size_t count) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, count * sizeof(T)), "allocating counters");
  Counters<T> counters(static_cast<T*>(memory));
  check_cuda(cudaMemset(memory, 0, count * sizeof(T)), "clearing counters");
  return counters;
}

// One round trip of flags in mapped memory, by a kernel that runs meanwhile. Returns why that does not work, or "".
std::string try_flags(int device) {
  OnDevice on(device);
  int maps = 0, unified = 0;
  check_cuda(cudaDeviceGetAttribute(&maps, cudaDevAttrCanMapHostMemory, device), "asking for mapped memory");
  check_cuda(cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, device), "asking for mapped memory");
  if (maps == 0 || unified == 0) return "the device cannot map host memory";
  const auto words = mapped<uint32_t>(4096);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  auto *ask = words.get(), *answer = ask + 64, *heard = ask + 128;
  const cudaError_t launched = launch_echo(ask, answer, heard, stream);
  const auto start = std::chrono::steady_clock::now();
  while (launched == cudaSuccess && __atomic_load_n(ask, __ATOMIC_ACQUIRE) == 0 &&
         std::chrono::steady_clock::now() - start < std::chrono::seconds(2)) {
  }
  __atomic_store_n(answer, 1, __ATOMIC_RELEASE);
  const cudaError_t error = cudaStreamSynchronize(stream);
  const bool heard_it = *heard == 1;
  cudaStreamDestroy(stream);
  check_cuda(launched, "launching the echo kernel");
  check_cuda(error, "trying mapped flags");
  return heard_it ? "" : "a running kernel and the host do not see each other's writes";
}

// What a process keeps for a device: the ring, and mapped blocks that former channels left, by their size. Blocks are
// not freed, since freeing one would wait for the whole device.
struct PerDevice {
  std::string why_no_flags;
  uint64_t* ring = nullptr;
  uint32_t* ticket = nullptr;
  std::multimap<size_t, std::pair<std::byte*, Counts*>> left;
};

std::mutex devices_mutex;

std::map<int, PerDevice>& devices() {
  static auto* all = new std::map<int, PerDevice>;
  return *all;
}

// The caller holds devices_mutex.
PerDevice& per_device(int device) {
  auto found = devices().find(device);
  if (found != devices().end()) return found->second;
  PerDevice made;
  made.why_no_flags = try_flags(device);
  auto ring = mapped<uint64_t>(kRingEntries * sizeof(uint64_t));
  auto ticket = counters_of<uint32_t>(1);
  made.ring = ring.get(), made.ticket = ticket.get();
  PerDevice& kept = devices().emplace(device, std::move(made)).first->second;
  try {
    dispatcher().watch(kept.ring);
  } catch (...) {
    devices().erase(device);
    throw;
  }
  ring.release(), ticket.release();  // the dispatcher watches them as long as the process lives
  return kept;
}

}  // namespace

std::string why_no_flags(int device) {
  std::lock_guard lock(devices_mutex);
  OnDevice on(device);
  return per_device(device).why_no_flags;
}

struct Channel::Slot final : Work {
  Shared* shared = nullptr;
  SlotView view{};
  uint32_t address = 0;               // of its port
  uint32_t entries = 0;               // that the dispatcher has seen: in the ring, or from host functions
  std::atomic<uint32_t> given_up{0};  // entries up to this one get no answer any more
  std::vector<int32_t> ids;           // of the request that runs
  std::vector<float> weights;
  std::atomic<uint32_t> called{0}, ended{0};  // host functions that the driver has called, and entries that are done

  void run() noexcept override;
  void receive(uint32_t count);
  // Host functions of a stream, on a thread of the driver: what flags do otherwise.
  static void announce(void* slot);
  static void await_answer(void* slot);
  void compute(uint32_t count);
};

struct Channel::Shared {
  ~Shared();

  std::atomic<const moe::Experts*> experts{nullptr};
  int expert_count = 0;
  int device = 0;
  Mode mode = Mode::flags;
  size_t hidden = 0;
  size_t tokens = 0;
  size_t x_bytes = 0;
  size_t total = 0;
  std::byte* block = nullptr;
  Counts* counts = nullptr;
  uint32_t* status = nullptr;
  RingView ring{};
  std::vector<std::unique_ptr<Slot>> slots;  // each with a port of its own
  std::mutex mutex;
  std::exception_ptr failure;  // the first one since the last check()
  std::atomic<bool> failed{false};
};

// Takes the ids and weights of submit `count`. As a rule all of them have come when the entry has.
void Channel::Slot::receive(uint32_t count) {
  const size_t routes = static_cast<size_t>(view.head->tokens) * view.head->top_k;
  const auto start = std::chrono::steady_clock::now();
  auto take = [&](const Counted* from) {
    for (int spins = 1;; ++spins) {
      const Counted word = __atomic_load_n(from, __ATOMIC_ACQUIRE);
      if (count_of(word) == count) return value_of(word);
      if (spins % 4096 == 0 &&
          std::chrono::steady_clock::now() - start > std::chrono::duration<double>(answer_timeout()))
        throw std::runtime_error("the GPU did not send the experts' ids and weights within " +
                                 std::to_string(answer_timeout()) + " s");
    }
  };
  for (size_t i = 0; i < routes; ++i) {
    ids[i] = static_cast<int32_t>(take(view.ids + i));
    weights[i] = std::bit_cast<float>(take(view.weights + i));
  }
}

// Computes the answer of submit `count`.
void Channel::Slot::compute(uint32_t count) {
  receive(count);
  const Head& head = *view.head;
  const moe::Experts* const experts = shared->experts.load();
  if (experts == nullptr) throw std::runtime_error("the experts are gone");
  const auto dtype = static_cast<DType>(head.dtype);
  const auto end = ids.begin() + static_cast<ptrdiff_t>(head.tokens) * head.top_k;
  if (std::all_of(ids.begin(), end, [](int32_t id) { return id == -1; })) {  // no reason to wake the workers
    std::memset(view.out, 0, head.tokens * shared->hidden * dtype_bytes(dtype));
    return;
  }
  Request{view.x,
          ids.data(),
          false,
          weights.data(),
          view.out,
          dtype,
          static_cast<int>(head.tokens),
          static_cast<int>(head.top_k)}
      .compute(*experts);
}

void Channel::Slot::run() noexcept {
  const uint32_t entry = ++entries;
  if (static_cast<int32_t>(given_up.load() - entry) >= 0) {
    ended.fetch_add(1, std::memory_order_release);
    return;
  }
  // A host function is called even if its submit did not get the slot. The head is then of the submit before.
  const uint32_t count = shared->mode == Mode::flags ? entry : view.head->count;
  try {
    compute(count);
  } catch (...) {
    std::memset(view.out, 0xff, view.head->tokens * shared->hidden * dtype_bytes(static_cast<DType>(view.head->dtype)));
    std::lock_guard lock(shared->mutex);
    if (!shared->failed) shared->failure = std::current_exception();
    shared->failed = true;
  }
  __atomic_store_n(&view.head->answered, count, __ATOMIC_RELEASE);
  ended.fetch_add(1, std::memory_order_release);
}

void Channel::Slot::announce(void* slot) {
  auto* self = static_cast<Slot*>(slot);
  self->called.fetch_add(1, std::memory_order_relaxed);
  dispatcher().ring(self->address);
}

void Channel::Slot::await_answer(void* slot) {
  auto* self = static_cast<Slot*>(slot);
  const uint32_t called = self->called.load(std::memory_order_relaxed);
  const auto limit = std::chrono::duration<double>(answer_timeout());
  const auto start = std::chrono::steady_clock::now();
  while (static_cast<int32_t>(self->ended.load(std::memory_order_acquire) - called) < 0) {
    if (std::chrono::steady_clock::now() - start < limit) continue;
    __atomic_store_n(self->shared->status, kNoAnswer, __ATOMIC_RELEASE);
    return;
  }
}

Channel::Channel(const moe::Experts& experts, int device, int slots, int tokens, int value_bytes, Mode mode)
    : shared_(std::make_unique<Shared>()) {
  Shared& here = *shared_;
  here.experts = &experts;
  here.expert_count = experts.config().experts;
  here.device = device;
  here.mode = mode;
  here.hidden = static_cast<size_t>(experts.config().hidden_size);
  here.tokens = static_cast<size_t>(tokens);
  auto padded = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  here.x_bytes = padded(here.tokens * here.hidden * static_cast<size_t>(value_bytes));
  const size_t most_routes = here.tokens * kMostExpertsPerToken;
  const size_t routes = padded(most_routes * sizeof(Counted));
  const size_t each = padded(sizeof(Head)) + 2 * here.x_bytes + 2 * routes;
  const size_t count = static_cast<size_t>(slots);
  here.total = 256 + count * each;

  OnDevice on(device);
  std::lock_guard lock(devices_mutex);
  PerDevice& shared = per_device(device);
  if (mode == Mode::flags && !shared.why_no_flags.empty())
    throw std::runtime_error("mapped flags do not work here: " + shared.why_no_flags);
  if (auto found = shared.left.find(here.total); found != shared.left.end()) {
    std::tie(here.block, here.counts) = found->second;
    shared.left.erase(found);
    std::memset(here.block, 0, here.total);
    check_cuda(cudaMemset(here.counts, 0, count * sizeof(Counts)), "clearing counters");
  } else {
    auto counts = counters_of<Counts>(count);
    void* block = nullptr;
    if (cudaHostAlloc(&block, here.total, cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
      cudaGetLastError();
      throw std::bad_alloc();
    }
    std::memset(block, 0, here.total);
    here.block = static_cast<std::byte*>(block), here.counts = counts.release();
  }
  check_cuda(cudaDeviceSynchronize(), "clearing counters");
  here.status = reinterpret_cast<uint32_t*>(here.block);
  *here.status = kFine;
  here.ring = {mode == Mode::flags ? shared.ring : nullptr, shared.ticket, 0};
  std::byte* at = here.block + 256;
  here.slots.reserve(count);  // push_back() cannot fail after open()
  for (size_t index = 0; index < count; ++index) {
    auto slot = std::make_unique<Slot>();
    slot->shared = &here;
    slot->view = {reinterpret_cast<Head*>(at),
                  at + padded(sizeof(Head)),
                  reinterpret_cast<Counted*>(at + padded(sizeof(Head)) + here.x_bytes),
                  reinterpret_cast<Counted*>(at + padded(sizeof(Head)) + here.x_bytes + routes),
                  at + padded(sizeof(Head)) + here.x_bytes + 2 * routes,
                  here.counts + index,
                  here.status};
    slot->ids.resize(most_routes);
    slot->weights.resize(most_routes);
    slot->address = dispatcher().open(slot.get());
    here.slots.push_back(std::move(slot));
    at += each;
  }
}

Channel::~Channel() {
  Shared& here = *shared_;
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(here.device);
  const bool idle = [] {
    const AsideOfCaptures aside;
    return cudaDeviceSynchronize() == cudaSuccess;
  }();
  cudaGetLastError();
  cudaSetDevice(before);
  if (!idle) {
    // Work may still be on its way. The ports stay taken, and what comes is answered without the experts.
    here.experts.store(nullptr);
    for (auto& slot : here.slots) dispatcher().settle(slot.get());
    shared_.release();
    return;
  }
}

// Nothing is on its way any more.
Channel::Shared::~Shared() {
  for (auto& slot : slots) dispatcher().close(slot->address);
  if (block == nullptr) return;
  std::lock_guard lock(devices_mutex);
  devices()[device].left.emplace(total, std::pair(block, counts));
}

Mode Channel::mode() const { return shared_->mode; }
size_t Channel::bytes() const { return shared_->total; }

void Channel::submit(int index, const DeviceRequest& request, uintptr_t raw_stream) {
  Shared& here = *shared_;
  Slot& slot = *here.slots.at(static_cast<size_t>(index));
  const size_t bytes = static_cast<size_t>(request.tokens) * here.hidden * dtype_bytes(request.dtype);
  if (request.tokens < 1 || bytes > here.x_bytes || static_cast<size_t>(request.tokens) > here.tokens)
    throw std::invalid_argument("tokens: found " + std::to_string(request.tokens) + "; allowed: 1 to " +
                                std::to_string(here.tokens));
  if (request.routing.logits != nullptr) {
    cuda::check_route(here.expert_count, request.top_k, cuda::kFewRouted);
    if (!request.ids_are_64_bit || request.rank_from != 0 || request.rank_to < request.top_k)
      throw std::invalid_argument("a submit that chooses the experts needs ids of 64 bits, and every rank");
  }
  if (request.top_k < 1 || request.top_k > kMostExpertsPerToken)
    throw std::invalid_argument("experts a token: found " + std::to_string(request.top_k) + "; allowed: 1 to " +
                                std::to_string(kMostExpertsPerToken));
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(here.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "asking whether a graph is captured");
  const bool captured = status != cudaStreamCaptureStatusNone;
  RingView ring = here.ring;
  ring.address = slot.address;
  if (captured) {
    dispatcher().nap();
  } else if (here.mode == Mode::flags) {
    ring.address |= kAnnounced;
    dispatcher().announce();
  }
  const Payload payload{request.x,
                        bytes,
                        request.ids,
                        request.weights,
                        request.places,
                        request.chosen,
                        request.traffic,
                        here.expert_count,
                        static_cast<uint32_t>(request.tokens),
                        static_cast<uint32_t>(request.top_k),
                        static_cast<uint32_t>(request.rank_from),
                        static_cast<uint32_t>(request.rank_to),
                        static_cast<uint32_t>(request.dtype),
                        request.ids_are_64_bit,
                        static_cast<uint32_t>(request.weights_dtype),
                        request.routing};
  try {
    launch_submit(slot.view, ring, payload, timeout_ns(), stream);
  } catch (...) {
    if (ring.address & kAnnounced) dispatcher().withdraw();
    throw;
  }
  if (here.mode == Mode::host_func)
    check_cuda(cudaLaunchHostFunc(stream, Slot::announce, &slot), "adding a host function");
}

void Channel::wait(int index, int tokens, DType dtype, void* out, const float* addend, const void* residual,
                   uintptr_t raw_stream) {
  Shared& here = *shared_;
  const size_t bytes = static_cast<size_t>(tokens) * here.hidden * dtype_bytes(dtype);
  if (bytes > here.x_bytes) throw std::invalid_argument("wait for more tokens than were submitted");
  Slot& slot = *here.slots.at(static_cast<size_t>(index));
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(here.device);
  if (here.mode == Mode::host_func)
    check_cuda(cudaLaunchHostFunc(stream, Slot::await_answer, &slot), "adding a host function");
  launch_wait(slot.view, out, {addend, residual}, static_cast<size_t>(tokens) * here.hidden, dtype, timeout_ns(),
              stream);
}

void Channel::exchange(const cuda::Resident& shapes, const moe::Experts& from, int leaving, int coming, int place,
                       int32_t* places, void* memory, uintptr_t raw_stream) {
  Shared& here = *shared_;
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(here.device);
  const AsideOfCaptures aside;
  launch_evict(places, leaving, here.counts, static_cast<int>(here.slots.size()), timeout_ns(), stream);
  shapes.copy(from, coming, static_cast<std::byte*>(memory) + static_cast<size_t>(place) * shapes.bytes(),
              {here.device, raw_stream});
  launch_admit(places, coming, place, stream);
  check_cuda(cudaStreamSynchronize(stream), "exchanging experts");
}

void Channel::check() {
  Shared& here = *shared_;
  if (const uint32_t status = __atomic_load_n(here.status, __ATOMIC_ACQUIRE); status != kFine) {
    // While the status stands, all kernels that wait end at once; then the slots are free again.
    OnDevice on(here.device);
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    // The next submit must not get the answer of an earlier one: what runs ends first, and the rest never begins.
    std::vector<Counts> counts(here.slots.size());
    check_cuda(cudaMemcpy(counts.data(), here.counts, counts.size() * sizeof(Counts), cudaMemcpyDeviceToHost),
               "reading counters");
    for (size_t index = 0; index < here.slots.size(); ++index) {
      Slot& slot = *here.slots[index];
      // All host functions have been called by now.
      slot.given_up.store(here.mode == Mode::flags ? counts[index].submitted : slot.called.load());
      if (dispatcher().settle(here.slots[index].get(), answer_timeout()))
        check_cuda(cudaMemset(&here.counts[index].busy, 0, sizeof(uint32_t)), "freeing a slot");
    }
    __atomic_store_n(here.status, kFine, __ATOMIC_RELEASE);
    throw std::runtime_error(status == kNoAnswer
                                 ? "no answer from the CPU's experts within " + std::to_string(answer_timeout()) + " s"
                                 : "another stream held this layer's buffers for " + std::to_string(answer_timeout()) +
                                       " s");
  }
  if (!here.failed.load(std::memory_order_acquire)) return;
  std::unique_lock lock(here.mutex);
  here.failed = false;
  const std::exception_ptr failure = std::exchange(here.failure, nullptr);
  lock.unlock();
  if (failure) std::rethrow_exception(failure);  // null if another thread has just taken it
}

}  // namespace ktinject::handoff
