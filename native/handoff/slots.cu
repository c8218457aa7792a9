#include "handoff/slots.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "cuda/handles.cuh"
#include "cuda/on_device.cuh"
#include "handoff/kernels.cuh"
#include "runtime/thread_pool.hpp"

namespace ktinject::handoff {
namespace {

using cuda::AsideOfCaptures;
using cuda::check_cuda;
using cuda::Mapped;
using cuda::OnDevice;
using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};
template <class T>
using Counters = std::unique_ptr<T, FreeDevice>;

// A stream of its own for work that must run now, while other streams may be captured.
class Aside {
 public:
  operator cudaStream_t() const { return stream_.get(); }

 private:
  const AsideOfCaptures mode_;
  const cuda::OwnStream stream_ = cuda::make_stream();
};

template <class T>
Mapped<T> mapped(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw std::bad_alloc();
  }
  check_cuda(error, "allocating mapped memory");
  std::memset(memory, 0, bytes);
  return Mapped<T>(static_cast<T*>(memory));
}

template <class T>
void clear(T* counters, size_t count, const Aside& stream) {
  check_cuda(cudaMemsetAsync(counters, 0, count * sizeof(T), stream), "clearing counters");
  check_cuda(cudaStreamSynchronize(stream), "clearing counters");
}

template <class T>
Counters<T> counters_of(size_t count, const Aside& stream) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, count * sizeof(T)), "allocating counters");
  Counters<T> counters(static_cast<T*>(memory));
  clear(counters.get(), count, stream);
  return counters;
}

// Tries one round trip of flags in mapped memory with a running kernel. Returns why that does not work, or "".
std::string try_flags(int device, const Aside& stream) {
  int maps = 0, unified = 0;
  check_cuda(cudaDeviceGetAttribute(&maps, cudaDevAttrCanMapHostMemory, device), "asking for mapped memory");
  check_cuda(cudaDeviceGetAttribute(&unified, cudaDevAttrUnifiedAddressing, device), "asking for mapped memory");
  if (maps == 0 || unified == 0) return "the device cannot map host memory";
  const auto words = mapped<uint32_t>(4096);
  auto *ask = words.get(), *answer = ask + 64, *heard = ask + 128;
  const cudaError_t launched = launch_echo(ask, answer, heard, stream);
  const auto start = Clock::now();
  while (launched == cudaSuccess && __atomic_load_n(ask, __ATOMIC_ACQUIRE) == 0 &&
         Clock::now() - start < std::chrono::seconds(2)) {
  }
  __atomic_store_n(answer, 1, __ATOMIC_RELEASE);
  const cudaError_t error = cudaStreamSynchronize(stream);
  check_cuda(launched, "launching the echo kernel");
  check_cuda(error, "trying mapped flags");
  return *heard == 1 ? "" : "a running kernel and the host do not see each other's writes";
}

// What a process keeps for a device.
struct PerDevice {
  std::string why_no_flags;
  uint64_t* ring = nullptr;
  uint32_t* ticket = nullptr;
  // The status words of layers: where the next one lies in the last page, and how many more it holds.
  uint32_t* words = nullptr;
  size_t words_left = 0;
};
constexpr size_t kPage = 4096, kLine = 64;

std::mutex devices_mutex;

std::map<int, PerDevice>& devices() {
  static auto* all = new std::map<int, PerDevice>;
  return *all;
}

// The caller holds devices_mutex.
PerDevice& per_device(int device, const Aside& stream) {
  auto found = devices().find(device);
  if (found != devices().end()) return found->second;
  PerDevice made;
  made.why_no_flags = try_flags(device, stream);
  auto ring = mapped<uint64_t>(kRingEntries * sizeof(uint64_t));
  auto ticket = counters_of<uint32_t>(1, stream);
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

// Blocks of deleted Slots, by device, number of slots and bytes. They are not freed, since freeing one would wait for
// the whole device. The mutex is never held during a call of CUDA: a graph that is destroyed takes it on CUDA's thread.
using Kind = std::tuple<int, size_t, size_t>;
std::mutex left_mutex;

std::multimap<Kind, std::pair<std::byte*, Counts*>>& left() {
  static auto* all = new std::multimap<Kind, std::pair<std::byte*, Counts*>>;
  return *all;
}

// Events of deleted slots, kept for the same reason; one is of the device on which it was made. Under left_mutex, too.
std::vector<void*>& left_events(int device) {
  static auto* all = new std::map<int, std::vector<void*>>;
  return (*all)[device];
}

std::atomic<size_t> pinned{0};

}  // namespace

size_t pinned_bytes() { return pinned; }

std::string why_no_flags(int device) {
  std::lock_guard lock(devices_mutex);
  OnDevice on(device);
  return per_device(device, Aside()).why_no_flags;
}

Layer* Layer::make(const moe::Experts& experts, int device) {
  auto made = std::make_unique<Layer>();
  made->experts = &experts;
  made->hidden = static_cast<size_t>(experts.config().hidden_size);
  std::lock_guard lock(devices_mutex);
  OnDevice on(device);
  const Aside stream;
  PerDevice& here = per_device(device, stream);
  if (here.words_left == 0) {
    here.words = mapped<uint32_t>(kPage).release();
    here.words_left = kPage / kLine;
  }
  made->status = here.words;
  here.words += kLine / sizeof(uint32_t), --here.words_left;
  return made.release();
}

void Layer::fail(std::exception_ptr why) {
  std::lock_guard lock(mutex_);
  if (!failed_) failure_ = std::move(why);
  failed_ = true;
}

std::exception_ptr Layer::take_failure() {
  if (!failed_.load(std::memory_order_acquire)) return nullptr;
  std::lock_guard lock(mutex_);
  failed_ = false;
  return std::exchange(failure_, nullptr);  // null if another thread has just taken it
}

// Takes the ids and weights of submit `count`. Usually all of them are there when the entry is.
void Slot::receive(uint32_t count) {
  const size_t routes = static_cast<size_t>(view.head->tokens) * view.head->top_k;
  const auto start = Clock::now();
  auto take = [&](const Counted* from) {
    for (int spins = 1;; ++spins) {
      const Counted word = __atomic_load_n(from, __ATOMIC_ACQUIRE);
      if (count_of(word) == count) return value_of(word);
      if (spins % 4096 == 0 && Clock::now() - start > Seconds(answer_timeout()))
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
void Slot::compute(uint32_t count) {
  receive(count);
  const Head& head = *view.head;
  const moe::Experts* const experts = head.layer->experts.load();
  if (experts == nullptr) throw std::runtime_error("the experts are gone");
  const auto dtype = static_cast<DType>(head.dtype);
  const auto end = ids.begin() + static_cast<ptrdiff_t>(head.tokens) * head.top_k;
  if (std::all_of(ids.begin(), end, [](int32_t id) { return id == -1; })) {  // no reason to wake the workers
    std::memset(view.out, 0, head.tokens * head.layer->hidden * dtype_bytes(dtype));
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

void Slot::run() noexcept {
  const uint32_t entry = ++entries;
  if (static_cast<int32_t>(given_up.load() - entry) >= 0) {
    ended.arrive();
    return;
  }
  const Head& head = *view.head;
  // A host function is called even if its submit did not get the slot. The head is then that of an earlier submit.
  const uint32_t count = mode == Mode::flags ? entry : head.count;
  // Who waits for the stream spins, as CUDA does where it is not told otherwise.
  runtime::leave_room(runtime::Room::always);
  try {
    compute(count);
  } catch (...) {
    std::memset(view.out, 0xff, head.tokens * head.layer->hidden * dtype_bytes(static_cast<DType>(head.dtype)));
    head.layer->fail(std::current_exception());
  }
  __atomic_store_n(&view.head->answered, count, __ATOMIC_RELEASE);
  ended.arrive();
  look_ahead(count);
}

// Tells the workers what the next layer will ask for, if the GPU has said so behind submit `count`. Nobody waits for
// that: it is worth something only as long as the workers are idle.
void Slot::look_ahead(uint32_t count) noexcept {
  int32_t experts[kMostExpertsPerToken];
  uint32_t top_k = 1;
  for (uint32_t i = 0; i < top_k; ++i) {
    const Counted word = __atomic_load_n(view.foreseen + i, __ATOMIC_ACQUIRE);
    if (count_of(word) != count) return;
    experts[i] = static_cast<int32_t>(value_of(word));
    // The kernel's fence stands between the head and every id.
    if (i == 0) top_k = std::min(view.head->next_top_k, static_cast<uint32_t>(kMostExpertsPerToken));
  }
  const moe::Experts* const next = view.head->next->experts.load();
  if (next == nullptr) return;
  try {
    next->fetch_ahead(experts, static_cast<int>(top_k));
  } catch (const std::exception&) {  // it was only a hint
  }
}

void Slot::free_after(int device, uintptr_t stream) {
  if (freed == nullptr) {
    std::lock_guard lock(left_mutex);
    if (auto& events = left_events(device); !events.empty()) freed = events.back(), events.pop_back();
  }
  if (freed == nullptr) {
    cudaEvent_t made = nullptr;
    check_cuda(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "creating an event");
    freed = made;
  }
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(freed), reinterpret_cast<cudaStream_t>(stream)),
             "marking that a slot is free");
  freed_in = stream;
}

void Slot::follow_in(uintptr_t stream) const {
  if (freed == nullptr || freed_in == stream) return;
  check_cuda(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(freed), 0),
             "waiting for the stream that had a slot");
}

void Slot::announce(void* slot) {
  auto* self = static_cast<Slot*>(slot);
  self->called.fetch_add(1, std::memory_order_relaxed);
  dispatcher().ring(self->address);
}

void Slot::await_answer(void* slot) {
  auto* self = static_cast<Slot*>(slot);
  const Head& head = *self->view.head;
  // The submit's kernels have run, so with flags the head is its own; or an earlier one's, answered already, if it did
  // not get the slot.
  const uint32_t called = self->called.load(std::memory_order_relaxed), count = head.count;
  auto has_answer = [&] {
    if (self->mode == Mode::host_func) return static_cast<int32_t>(self->ended.count() - called) >= 0;
    if (static_cast<int32_t>(__atomic_load_n(&head.answered, __ATOMIC_ACQUIRE) - count) >= 0) return true;
    return head.layer == nullptr || __atomic_load_n(head.layer->status, __ATOMIC_ACQUIRE) != kFine;
  };
  if (!self->ended.await(has_answer, answer_timeout()))
    __atomic_store_n(head.layer->status, kNoAnswer, __ATOMIC_RELEASE);
}

Slots::Slots(int device, int count, size_t bytes, size_t routes, Mode mode, bool shared)
    : device(device), mode(mode), shared(shared), most_bytes(bytes), most_routes(routes) {
  if (shared && mode != Mode::flags) throw std::invalid_argument("shared slots need flags");
  auto padded = [](size_t size) { return (size + 255) / 256 * 256; };
  const size_t head = padded(sizeof(Head)), values = padded(bytes), words = padded(routes * sizeof(Counted));
  const size_t foreseen = padded(kMostExpertsPerToken * sizeof(Counted));
  const size_t each = head + 2 * values + 2 * words + foreseen, number = static_cast<size_t>(count);
  count_ = number, total_ = number * each;

  OnDevice on(device);
  std::lock_guard lock(devices_mutex);
  const Aside stream;
  const PerDevice& here = per_device(device, stream);
  if (mode == Mode::flags && !here.why_no_flags.empty())
    throw std::runtime_error("mapped flags do not work here: " + here.why_no_flags);
  {
    std::lock_guard also(left_mutex);
    if (auto found = left().find({device, number, total_}); found != left().end()) {
      std::tie(block_, counts) = found->second;
      left().erase(found);
    }
  }
  if (block_ != nullptr) {
    for (size_t index = 0; index < number; ++index) std::memset(block_ + index * each, 0, each - 2 * values);
    clear(counts, number, stream);
  } else {
    auto counters = counters_of<Counts>(number, stream);
    block_ = mapped<std::byte>(total_).release(), counts = counters.release();
    pinned += total_;
  }
  ring = {mode == Mode::flags ? here.ring : nullptr, here.ticket, 0};
  try {
    all.reserve(number);  // push_back() cannot fail after open()
    for (size_t index = 0; index < number; ++index) {
      std::byte* at = block_ + index * each;
      auto slot = std::make_unique<Slot>();
      slot->mode = mode;
      std::byte* const x = at + head + 2 * words + foreseen;
      slot->view = {reinterpret_cast<Head*>(at),
                    x,
                    reinterpret_cast<Counted*>(at + head),
                    reinterpret_cast<Counted*>(at + head + words),
                    x + values,
                    reinterpret_cast<Counted*>(at + head + 2 * words),
                    counts + index,
                    nullptr,
                    nullptr};
      slot->ids.resize(routes);
      slot->weights.resize(routes);
      slot->address = dispatcher().open(slot.get());
      all.push_back(std::move(slot));
    }
  } catch (...) {
    leave();
    throw;
  }
}

void Slots::leave() {
  for (auto& slot : all) dispatcher().close(slot->address);
  std::lock_guard lock(left_mutex);
  for (auto& slot : all)
    if (slot->freed != nullptr) left_events(device).push_back(slot->freed);
  left().emplace(Kind{device, count_, total_}, std::pair(block_, counts));
}

}  // namespace ktinject::handoff
