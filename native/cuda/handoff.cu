#include "cuda/handoff.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
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

#include "cuda/early.cuh"
#include "cuda/on_device.cuh"
#include "cuda/route.cuh"
#include "moe/leader.hpp"

namespace ktinject {
namespace {

constexpr int kMostSlotsPerToken = 64;  // experts a token may be sent to, as in the forward pass
constexpr int kMostThreads = 1024;
constexpr uint32_t kMostRoutingWarps = 8;

// Another thread may be capturing a graph, in streams of its own; what happens in this scope touches none of them.
class AsideOfCaptures {
 public:
  AsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AsideOfCaptures(const AsideOfCaptures&) = delete;
  AsideOfCaptures& operator=(const AsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

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
  uint32_t address = 0;  // the leader's of the slot, announced or not
};

struct Payload {
  const void* x;
  size_t bytes;
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
  bool wide_ids;
  uint32_t weights_dtype;
  Routing routing;
};

__device__ uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Fills the place in the ring that `ticket` was given.
__device__ void ring(const Bell& bell, uint32_t ticket, uint32_t address) {
  const uint64_t entry = static_cast<uint64_t>(ticket + 1) << 32 | address;
  *reinterpret_cast<volatile uint64_t*>(bell.ring + ticket % Leader::kRingEntries) = entry;
}

__device__ bool is_aligned(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & 15) == 0;
}

// Copies with `threads` threads; 16 bytes at a time where both are aligned.
__device__ void copy(const void* from, void* to, size_t bytes, uint32_t thread, uint32_t threads) {
  size_t done = 0;
  if (is_aligned(from, to)) {
    for (size_t i = thread; i < bytes / 16; i += threads)
      static_cast<uint4*>(to)[i] = __ldcg(static_cast<const uint4*>(from) + i);
    done = bytes / 16 * 16;
  }
  for (size_t i = done / 2 + thread; i < bytes / 2; i += threads)  // dtypes are multiples of two bytes
    static_cast<uint16_t*>(to)[i] = __ldcg(static_cast<const uint16_t*>(from) + i);
}

__device__ float widen(const void* values, uint32_t dtype, size_t i) {
  if (dtype == static_cast<uint32_t>(DType::f32)) return static_cast<const float*>(values)[i];
  if (dtype == static_cast<uint32_t>(DType::f16)) return __half2float(static_cast<const __half*>(values)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[i]);
}

// Whether entry `i` of the routing is one of the ranks asked for.
__device__ bool is_ranked(const Payload& from, size_t i) {
  if (from.rank_from == 0 && from.rank_to >= from.top_k) return true;
  const size_t first = i / from.top_k * from.top_k;
  const float own = fabsf(widen(from.weights, from.weights_dtype, i));
  uint32_t rank = 0;
  for (size_t other = first; other < first + from.top_k; ++other) {
    const float weight = fabsf(widen(from.weights, from.weights_dtype, other));
    rank += weight > own || (weight == own && other < i);
  }
  return from.rank_from <= rank && rank < from.rank_to;
}

// Sends entry `i` of the routing, a weight `weight` for an expert `id`; to the CPU, or to `chosen` where it lies here.
__device__ void send(const View& slot, const Payload& from, uint32_t count, size_t i, int64_t id, float weight) {
  // An id that is no expert is the CPU's to refuse.
  const bool known = id >= 0 && id < from.experts;
  const bool ranked = is_ranked(from, i);
  const int32_t place = from.places != nullptr && known && ranked ? __ldcg(from.places + id) : -1;
  if (from.chosen != nullptr) from.chosen[i] = place;
  if (from.traffic != nullptr && known && ranked) atomicAdd(from.traffic + id, 1u);
  const auto sent =
      place >= 0 || !ranked ? -1 : static_cast<int32_t>(max(int64_t{INT32_MIN}, min(int64_t{INT32_MAX}, id)));
  const Route above = Route{count} << 32;
  *static_cast<volatile Route*>(slot.ids + i) = above | static_cast<uint32_t>(sent);
  *static_cast<volatile Route*>(slot.weights + i) = above | __float_as_uint(weight);
}

// The choice of experts where the submit makes it: of all tokens, by the first `warps` warps.
template <class Take>
__device__ void choose(const Payload& from, uint32_t warps, Take&& take) {
  const int top_k = static_cast<int>(from.top_k);
  auto all = [&]<class T>(T) {
    for (uint32_t token = threadIdx.x / kWarp; token < from.tokens; token += warps) {
      const auto* logits = static_cast<const T*>(from.routing.logits) + static_cast<size_t>(token) * from.experts;
      route_token<T, kFewRouted>(logits, from.experts, top_k, from.routing.normed, [&](int rank, int expert, float w) {
        const size_t at = static_cast<size_t>(token) * from.top_k + static_cast<size_t>(rank);
        take(at, expert, w);
        const_cast<int64_t*>(static_cast<const int64_t*>(from.ids))[at] = expert;
        const_cast<T*>(static_cast<const T*>(from.weights))[at] = store<T>(w);
      });
    }
  };
  if (from.weights_dtype == static_cast<uint32_t>(DType::f32)) all(float{});
  else if (from.weights_dtype == static_cast<uint32_t>(DType::f16)) all(__half{});
  else all(__nv_bfloat16{});
}

struct Taken {
  bool mine;
  uint32_t count;  // submits of the slot, this one included
};

// Takes the slot, when it is free; it is not ours after the timeout.
__device__ Taken take(const View& slot, bool has_places, uint64_t timeout_ns) {
  Taken taken{true, 0};
  if (atomicCAS(&slot.counts->busy, 0u, 1u) != 0) {
    const uint64_t start = now_ns();
    while (atomicCAS(&slot.counts->busy, 0u, 1u) != 0) {
      __nanosleep(500);
      if (now_ns() - start > timeout_ns || load_acquire(slot.status) != kFine) {
        taken.mine = false;
        if (load_acquire(slot.status) == kFine) *slot.status = kSlotTaken;  // else it says why already
        break;
      }
    }
  }
  slot.counts->lost = !taken.mine;
  if (taken.mine) taken.count = atomicAdd(&slot.counts->posted, 1u) + 1;
  if (has_places) __threadfence();  // with evict_kernel's: either it sees the slot taken, or we see what it wrote
  return taken;
}

// The first `routing_warps` warps choose the experts, the others copy and then ring.
__global__ void __launch_bounds__(kMostThreads)
    submit_kernel(View slot, Bell bell, Payload from, uint32_t routing_warps, uint64_t timeout_ns) {
  __shared__ Taken shared;
  release_next();
  // Before our turn: nobody before us in the stream reads what this writes, but a wait that still has the slot.
  if (threadIdx.x == 0) shared = take(slot, from.places != nullptr, timeout_ns);
  __syncthreads();
  const Taken taken = shared;
  const bool copies = threadIdx.x >= routing_warps * kWarp;
  const uint32_t thread = threadIdx.x - routing_warps * kWarp, threads = blockDim.x - routing_warps * kWarp;
  if (taken.mine && copies)  // the threads that meet before the entry is written
    for (size_t i = thread; i < (from.bytes + 15) / 16; i += threads)
      reinterpret_cast<uint4*>(slot.out)[i] = uint4{~0u, ~0u, ~0u, ~0u};  // what no answer is, see wait_kernel
  await_previous();
  const size_t entries = static_cast<size_t>(from.tokens) * from.top_k;
  if (!taken.mine) {  // the experts here go by `chosen`, whatever happens to the others
    if (from.chosen != nullptr)
      for (size_t i = threadIdx.x; i < entries; i += blockDim.x) from.chosen[i] = -1;
    // What was announced is not to be waited for.
    if (threadIdx.x == 0 && (bell.address & Leader::kAnnounced) != 0)
      ring(bell, atomicAdd(bell.ticket, 1u), Leader::kAnnounced | Leader::kNobody);
    return;
  }
  if (!copies) {
    choose(from, routing_warps,
           [&](size_t i, int64_t id, float weight) { send(slot, from, taken.count, i, id, weight); });
    return;
  }
  // A place in the ring is taken only now: whoever has one waits for nobody.
  uint32_t ticket = 0;
  if (thread == 0 && bell.ring != nullptr) ticket = atomicAdd(bell.ticket, 1u);
  copy(from.x, slot.x, from.bytes, thread, threads);
  if (routing_warps == 0)
    for (size_t i = thread; i < entries; i += threads) {
      const int64_t id =
          from.wide_ids ? static_cast<const int64_t*>(from.ids)[i] : static_cast<const int32_t*>(from.ids)[i];
      send(slot, from, taken.count, i, id, widen(from.weights, from.weights_dtype, i));
    }
  if (thread == 0) {
    slot.head->tokens = from.tokens;
    slot.head->top_k = from.top_k;
    slot.head->dtype = from.dtype;
    slot.head->count = taken.count;
  }
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
  if (thread != 0 || bell.ring == nullptr) return;
  __threadfence_system();  // covers the other threads' writes, which the barrier put before it
  ring(bell, ticket, bell.address);
}

// What is added to the answer, before and after it is rounded; null or [tokens, hidden].
struct Added {
  const float* part;
  const void* residual;
};

// 16 bytes of the answer, and what is added to them.
template <class T>
struct Piece {
  static constexpr int kValues = 16 / sizeof(T);
  float part[kValues], residual[kValues];

  __device__ void read(const Added& added, size_t first, size_t values) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const bool there = first + j < values;
      part[j] = there && added.part != nullptr ? __ldcg(added.part + first + j) : 0;
      residual[j] =
          there && added.residual != nullptr ? load(__ldcg(static_cast<const T*>(added.residual) + first + j)) : 0;
    }
  }

  __device__ void finish(uint4 raw, const Added& added, T* out, size_t first, size_t values) const {
    T found[kValues];
    memcpy(found, &raw, sizeof raw);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (added.part != nullptr) found[j] = store<T>(load(found[j]) + part[j]);
      if (added.residual != nullptr) found[j] = store<T>(load(found[j]) + residual[j]);
    }
    if (first + kValues <= values && reinterpret_cast<uintptr_t>(out + first) % 16 == 0) {
      memcpy(&raw, found, sizeof raw);
      *reinterpret_cast<uint4*>(out + first) = raw;
    } else {
#pragma unroll
      for (int j = 0; j < kValues; ++j)
        if (first + j < values) out[first + j] = found[j];
    }
  }
};

__device__ uint4 load_now(const void* from) {
  uint4 raw;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(from)
               : "memory");
  return raw;
}

// Whether no value of a piece is the NaN of all ones that stood there before.
template <class T>
__device__ bool is_complete(uint4 raw) {
  if constexpr (sizeof(T) == 4) return raw.x != ~0u && raw.y != ~0u && raw.z != ~0u && raw.w != ~0u;
  return (__vcmpeq2(raw.x, ~0u) | __vcmpeq2(raw.y, ~0u) | __vcmpeq2(raw.z, ~0u) | __vcmpeq2(raw.w, ~0u)) == 0;
}

// Waits for the answer; the next kernels may have been waiting for us already. Where a thread has but one piece of it,
// it watches that piece itself: one way over the bus, not two, and nothing that the CPU does after its last value.
// Pieces that stay incomplete, since that NaN is the answer, are taken as soon as the count says so.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    wait_kernel(View slot, T* out, Added added, size_t values, uint64_t timeout_ns) {
  constexpr size_t kEach = Piece<T>::kValues;
  enum State { kWaiting, kAnswered, kLost };
  __shared__ State states[2];  // in turns, so that one barrier a round is enough
  await_previous();
  release_next();  // not earlier: the next kernel may take much of the device, and our submit may need another one's
                   // end
  const auto* pieces = reinterpret_cast<const uint4*>(slot.out);
  const bool is_one_each = values <= kEach * blockDim.x, has_piece = threadIdx.x * kEach < values;
  Piece<T> mine;
  mine.read(added, threadIdx.x * kEach, values);  // while nothing is there to wait for
  uint32_t posted = 0;
  uint64_t start = 0;
  bool lost = false;
  if (threadIdx.x == 0) {
    posted = __ldcg(&slot.counts->posted);
    lost = __ldcg(&slot.counts->lost) != 0;
    start = now_ns();
  }
  uint4 raw{~0u, ~0u, ~0u, ~0u};
  State state = kWaiting;
  for (uint32_t round = 0; state == kWaiting; ++round) {
    if (is_one_each && has_piece) raw = load_now(pieces + threadIdx.x);
    if (threadIdx.x == 0) {
      State found = static_cast<int32_t>(load_acquire(&slot.head->answer) - posted) >= 0 ? kAnswered : kWaiting;
      if (found == kWaiting && round % 32 == 31) {
        const bool late = now_ns() - start > timeout_ns;
        if (late) *slot.status = kNoAnswer;
        if (late || load_acquire(slot.status) != kFine) found = kLost;
      }
      states[round % 2] = lost ? kLost : found;
    }
    if (__syncthreads_and(!lost && is_one_each && (!has_piece || is_complete<T>(raw)))) break;
    state = states[round % 2];
  }
  // Without an answer NaN in all dtypes: nobody takes it for a result.
  if (state == kLost) raw = uint4{~0u, ~0u, ~0u, ~0u};
  constexpr int kTogether = 4;  // on their way at the same time
  for (size_t base = threadIdx.x; out != nullptr && base * kEach < values; base += kTogether * blockDim.x) {
    uint4 found[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const size_t i = base + j * blockDim.x;
      found[j] = state == kAnswered && i * kEach < values ? load_now(pieces + i) : raw;
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const size_t i = base + j * blockDim.x;
      if (i * kEach >= values) break;
      if (i != threadIdx.x) mine.read(added, i * kEach, values);
      mine.finish(found[j], added, out, i * kEach, values);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && state != kLost) {
    __threadfence();
    atomicExch(&slot.counts->busy, 0u);
  }
}

// Takes an expert off the table, and ends when every step that may have seen it there has.
__global__ void evict_kernel(int32_t* places, int expert, Counts* counts, int slots, uint64_t timeout_ns) {
  atomicExch(places + expert, -1);
  __threadfence();
  const uint64_t start = now_ns();
  for (int slot = 0; slot < slots; ++slot)
    while (atomicAdd(&counts[slot].busy, 0u) != 0 && now_ns() - start < timeout_ns) __nanosleep(1000);
}

__global__ void admit_kernel(int32_t* places, int expert, int place) {
  __threadfence();
  atomicExch(places + expert, place);
}

// Asks and spins on the answer: whether host and device see each other's writes while a kernel runs.
__global__ void echo_kernel(volatile uint32_t* ask, const uint32_t* answer, volatile uint32_t* heard) {
  *ask = 1;
  __threadfence_system();
  const uint64_t start = now_ns();
  while (now_ns() - start < 500'000'000)
    if (load_acquire(answer) == 1) {
      *heard = 1;
      break;
    }
  __threadfence_system();
}

// A thread for each piece of 16 bytes, and `more` warps.
Launch shape_for(size_t bytes, cudaStream_t stream, uint32_t more = 0) {
  const size_t pieces = std::max<size_t>(1, (bytes / 16 + kWarp - 1) / kWarp), most = kMostThreads / kWarp - more;
  return {dim3(1), dim3(static_cast<unsigned>((std::min(pieces, most) + more) * kWarp)), stream};
}

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
  echo_kernel<<<1, 1, 0, stream>>>(ask, answer, heard);
  const cudaError_t launched = cudaGetLastError();
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

// What a process keeps for a device: the ring, and mapped blocks that former channels left. Blocks are not freed, since
// freeing one would wait for the whole device.
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

PerDevice& per_device(int device) {  // with devices_mutex held
  auto found = devices().find(device);
  if (found != devices().end()) return found->second;
  PerDevice made;
  made.why_no_flags = try_flags(device);
  auto ring = mapped<uint64_t>(Leader::kRingEntries * sizeof(uint64_t));
  auto ticket = counters_of<uint32_t>(1);
  made.ring = ring.get(), made.ticket = ticket.get();
  PerDevice& kept = devices().emplace(device, std::move(made)).first->second;
  try {
    leader().watch(kept.ring);
  } catch (...) {
    devices().erase(device);
    throw;
  }
  ring.release(), ticket.release();  // watched, and so kept, for ever
  return kept;
}

}  // namespace

std::string why_no_flags(int device) {
  std::lock_guard lock(devices_mutex);
  OnDevice on(device);
  return per_device(device).why_no_flags;
}

void read_device(const void* from, void* to, size_t bytes, Stream from_stream) {
  const OnStream stream(from_stream);
  const AsideOfCaptures aside;
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream), "reading from the device");
  check_cuda(cudaStreamSynchronize(stream), "reading from the device");
}

struct Channel::Slot final : Work {
  Shared* shared = nullptr;
  View view{};
  uint32_t address = 0;               // the leader's
  uint32_t entries = 0;               // that the leader has seen: of the ring, or by host functions
  std::atomic<uint32_t> given_up{0};  // entries up to this one are not answered any more
  std::vector<int32_t> ids;           // of the request that runs
  std::vector<float> weights;
  std::atomic<uint32_t> called{0}, ended{0};  // of host functions: by the driver's thread, and done by the leader

  void run() noexcept override;
  void compute(uint32_t count);
};

struct Channel::Shared {
  ~Shared();

  std::atomic<const Experts*> experts{nullptr};
  int expert_count = 0;
  int device = 0;
  HandoffMode mode = HandoffMode::flags;
  size_t hidden = 0;
  size_t tokens = 0;
  size_t x_bytes = 0;
  size_t total = 0;
  std::byte* block = nullptr;
  Counts* counts = nullptr;
  uint32_t* status = nullptr;
  Bell bell{};
  std::vector<std::unique_ptr<Slot>> slots;  // each with an address of its own
  std::mutex mutex;
  std::exception_ptr failure;
  std::atomic<bool> failed{false};
};

// Answers submit `count`.
void Channel::Slot::compute(uint32_t count) {
  const Head& head = *view.head;
  const size_t routes = static_cast<size_t>(head.tokens) * head.top_k;
  const auto start = std::chrono::steady_clock::now();
  // Most often all are there: they were written when the entry was.
  auto receive = [&](const Route* from) {
    for (int spins = 1;; ++spins) {
      const Route route = __atomic_load_n(from, __ATOMIC_ACQUIRE);
      if (static_cast<uint32_t>(route >> 32) == count) return static_cast<uint32_t>(route);
      if (spins % 4096 == 0 &&
          std::chrono::steady_clock::now() - start > std::chrono::duration<double>(answer_timeout()))
        throw std::runtime_error("the experts to compute were not told within " + std::to_string(answer_timeout()) +
                                 " s");
    }
  };
  bool any = false;
  for (size_t i = 0; i < routes; ++i) {
    ids[i] = static_cast<int32_t>(receive(view.ids + i));
    weights[i] = std::bit_cast<float>(receive(view.weights + i));
    any = any || ids[i] != -1;
  }
  const Experts* const experts = shared->experts.load();
  if (experts == nullptr) throw std::runtime_error("the experts are gone");
  const auto dtype = static_cast<DType>(head.dtype);
  // Where all of them are elsewhere, there is nothing to wake the workers for.
  if (!any) std::memset(view.out, 0, head.tokens * shared->hidden * dtype_bytes(dtype));
  else
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
  // A host function runs even where its submit did not get the slot; then this is the one before.
  const uint32_t count = shared->mode == HandoffMode::flags ? entry : view.head->count;
  try {
    compute(count);
  } catch (...) {
    std::memset(view.out, 0xff, view.head->tokens * shared->hidden * dtype_bytes(static_cast<DType>(view.head->dtype)));
    std::lock_guard lock(shared->mutex);
    if (!shared->failed) shared->failure = std::current_exception();
    shared->failed = true;
  }
  __atomic_store_n(&view.head->answer, count, __ATOMIC_RELEASE);
  ended.fetch_add(1, std::memory_order_release);
}

Channel::Channel(const Experts& experts, int device, int slots, int tokens, int value_bytes, HandoffMode mode)
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
  const size_t most_routes = here.tokens * kMostSlotsPerToken;
  const size_t routes = padded(most_routes * sizeof(Route));
  const size_t each = padded(sizeof(Head)) + 2 * here.x_bytes + 2 * routes;
  const size_t count = static_cast<size_t>(slots);
  here.total = 256 + count * each;

  OnDevice on(device);
  std::lock_guard lock(devices_mutex);
  PerDevice& shared = per_device(device);
  if (mode == HandoffMode::flags && !shared.why_no_flags.empty())
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
  here.bell = {mode == HandoffMode::flags ? shared.ring : nullptr, shared.ticket, 0};
  std::byte* at = here.block + 256;
  here.slots.reserve(count);  // so that none is lost between open() and here
  for (size_t index = 0; index < count; ++index) {
    auto slot = std::make_unique<Slot>();
    slot->shared = &here;
    slot->view = {reinterpret_cast<Head*>(at),
                  at + padded(sizeof(Head)),
                  reinterpret_cast<Route*>(at + padded(sizeof(Head)) + here.x_bytes),
                  reinterpret_cast<Route*>(at + padded(sizeof(Head)) + here.x_bytes + routes),
                  at + padded(sizeof(Head)) + here.x_bytes + 2 * routes,
                  here.counts + index,
                  here.status};
    slot->ids.resize(most_routes);
    slot->weights.resize(most_routes);
    slot->address = leader().open(slot.get());
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
    // Work may still be on its way: the ports stay taken, and what comes is answered without the experts.
    here.experts.store(nullptr);
    for (auto& slot : here.slots) leader().settle(slot.get());
    shared_.release();
    return;
  }
}

// Nothing is on its way any more, or there was never anything.
Channel::Shared::~Shared() {
  for (auto& slot : slots) leader().close(slot->address);
  if (block == nullptr) return;
  std::lock_guard lock(devices_mutex);
  devices()[device].left.emplace(total, std::pair(block, counts));
}

HandoffMode Channel::mode() const { return shared_->mode; }
size_t Channel::bytes() const { return shared_->total; }

void Channel::submit(int index, const DeviceRequest& request, uintptr_t raw_stream) {
  Shared& here = *shared_;
  Slot& slot = *here.slots.at(static_cast<size_t>(index));
  const size_t bytes = static_cast<size_t>(request.tokens) * here.hidden * dtype_bytes(request.dtype);
  if (request.tokens < 1 || bytes > here.x_bytes || static_cast<size_t>(request.tokens) > here.tokens)
    throw std::invalid_argument("tokens: found " + std::to_string(request.tokens) + "; allowed: 1 to " +
                                std::to_string(here.tokens));
  if (request.routing.logits != nullptr) {
    check_route(here.expert_count, request.top_k, kFewRouted);
    if (!request.ids_are_64_bit || request.rank_from != 0 || request.rank_to < request.top_k)
      throw std::invalid_argument("a submit that routes writes ids of 64 bits, and takes every rank");
  }
  if (request.top_k < 1 || request.top_k > kMostSlotsPerToken)
    throw std::invalid_argument("experts a token: found " + std::to_string(request.top_k) + "; allowed: 1 to " +
                                std::to_string(kMostSlotsPerToken));
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(here.device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "asking whether a graph is captured");
  const bool captured = status != cudaStreamCaptureStatusNone;
  Bell bell = here.bell;
  bell.address = slot.address;
  if (captured) {
    leader().nap();
  } else if (here.mode == HandoffMode::flags) {
    bell.address |= Leader::kAnnounced;
    leader().announce();
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
    const auto routing_warps = request.routing.logits == nullptr ? 0u : std::min(payload.tokens, kMostRoutingWarps);
    launch_early("launching the submit kernel", submit_kernel, shape_for(bytes, stream, routing_warps), slot.view, bell,
                 payload, routing_warps, static_cast<uint64_t>(answer_timeout() * 1e9));
  } catch (...) {
    if (bell.address & Leader::kAnnounced) leader().withdraw();
    throw;
  }
  if (here.mode == HandoffMode::host_func)
    check_cuda(cudaLaunchHostFunc(
                   stream,
                   [](void* context) {
                     auto* work = static_cast<Slot*>(context);
                     work->called.fetch_add(1, std::memory_order_relaxed);
                     leader().ring(work->address);
                   },
                   &slot),
               "adding a host function");
}

void Channel::wait(int index, int tokens, DType dtype, void* out, const float* addend, const void* residual,
                   uintptr_t raw_stream) {
  Shared& here = *shared_;
  const size_t bytes = static_cast<size_t>(tokens) * here.hidden * dtype_bytes(dtype);
  if (bytes > here.x_bytes) throw std::invalid_argument("wait for more tokens than were submitted");
  Slot& slot = *here.slots.at(static_cast<size_t>(index));
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(here.device);
  if (here.mode == HandoffMode::host_func)
    check_cuda(cudaLaunchHostFunc(
                   stream,
                   [](void* context) {
                     auto* work = static_cast<Slot*>(context);
                     const uint32_t called = work->called.load(std::memory_order_relaxed);
                     const auto limit = std::chrono::duration<double>(answer_timeout());
                     const auto start = std::chrono::steady_clock::now();
                     while (static_cast<int32_t>(work->ended.load(std::memory_order_acquire) - called) < 0) {
                       if (std::chrono::steady_clock::now() - start < limit) continue;
                       __atomic_store_n(work->shared->status, kNoAnswer, __ATOMIC_RELEASE);
                       return;
                     }
                   },
                   &slot),
               "adding a host function");
  auto launch = [&]<class T>(T) {
    launch_early("launching the wait kernel", wait_kernel<T>, shape_for(bytes, stream), slot.view, static_cast<T*>(out),
                 Added{addend, residual}, bytes / sizeof(T), static_cast<uint64_t>(answer_timeout() * 1e9));
  };
  if (dtype == DType::f32) launch(float{});
  else if (dtype == DType::f16) launch(__half{});
  else launch(__nv_bfloat16{});
}

void Channel::exchange(const Resident& shapes, const Experts& from, int leaving, int coming, int place, int32_t* places,
                       void* memory, uintptr_t raw_stream) {
  Shared& here = *shared_;
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(here.device);
  const AsideOfCaptures aside;
  evict_kernel<<<1, 1, 0, stream>>>(places, leaving, here.counts, static_cast<int>(here.slots.size()),
                                    static_cast<uint64_t>(answer_timeout() * 1e9));
  check_cuda(cudaGetLastError(), "launching the evict kernel");
  shapes.copy(from, coming, static_cast<std::byte*>(memory) + static_cast<size_t>(place) * shapes.bytes(),
              {here.device, raw_stream});
  admit_kernel<<<1, 1, 0, stream>>>(places, coming, place);
  check_cuda(cudaGetLastError(), "launching the admit kernel");
  check_cuda(cudaStreamSynchronize(stream), "exchanging experts");
}

void Channel::check() {
  Shared& here = *shared_;
  if (const uint32_t status = __atomic_load_n(here.status, __ATOMIC_ACQUIRE); status != kFine) {
    // Whatever is still in the streams ends at once while the status stands; then the slots are free again.
    OnDevice on(here.device);
    check_cuda(cudaDeviceSynchronize(), "waiting for the device");
    // A late answer must not be taken for that of the next submit: what is under way ends first, the rest never begins.
    std::vector<Counts> counts(here.slots.size());
    check_cuda(cudaMemcpy(counts.data(), here.counts, counts.size() * sizeof(Counts), cudaMemcpyDeviceToHost),
               "reading counters");
    for (size_t index = 0; index < here.slots.size(); ++index) {
      Slot& slot = *here.slots[index];
      // Host functions have all been called by now.
      slot.given_up.store(here.mode == HandoffMode::flags ? counts[index].posted : slot.called.load());
      if (leader().settle(here.slots[index].get(), answer_timeout()))
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
  if (failure) std::rethrow_exception(failure);  // else another thread has taken it just now
}

}  // namespace ktinject
