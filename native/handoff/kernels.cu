#include "handoff/kernels.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/early.cuh"
#include "cuda/route.cuh"
#include "handoff/waits.hpp"

namespace ktinject::handoff {
namespace {

using namespace cuda;  // NOLINT

constexpr int kMostThreads = 1024;
constexpr uint32_t kMostRoutingWarps = 8;
// If each thread has at most one piece of the answer, the wait watches the pieces, and the submit writes NaN patterns.
constexpr size_t kWatchedBytes = size_t{kMostThreads} * 16;
// Up to so many bytes are copied by one block; more are worth three kernels. One block copies about 16 GB/s over the
// bus, and the two additional kernels cost some 3 us.
constexpr size_t kOneBlockBytes = 128 * 1024;
constexpr int kCopyBlocks = 32, kCopyThreads = 512;

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

__device__ void put_entry(const RingView& ring, uint32_t ticket, uint32_t address) {
  *reinterpret_cast<volatile uint64_t*>(ring.entries + ticket % kRingEntries) = ring_entry(ticket, address);
}

__device__ bool is_aligned(const void* a, const void* b) {
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) & 15) == 0;
}

// Copies with `threads` threads, 16 bytes at a time if both sides are aligned.
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

// Whether the rank of route `i` is one of those that the submit asks for.
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

// Sends route `i` of the request (an expert and its weight) to the CPU, or to `chosen` if the expert is on this GPU.
__device__ void send(const SlotView& slot, const Payload& from, uint32_t count, size_t i, int64_t id, float weight) {
  // An invalid id goes to the CPU, which refuses it, unless the submit says that it means no expert.
  const bool known = id >= 0 && id < from.experts;
  const bool ranked = (from.live == nullptr || __ldcg(from.live + i / from.top_k) != 0) && is_ranked(from, i);
  const int32_t place = from.places != nullptr && known && ranked ? __ldcg(from.places + id) : -1;
  if (from.chosen != nullptr) from.chosen[i] = place;
  if (from.traffic != nullptr && known && ranked) atomicAdd(from.traffic + id, 1u);
  const bool skipped = place >= 0 || !ranked || (from.skips_unknown && !known);
  const auto sent = skipped ? -1 : static_cast<int32_t>(max(int64_t{INT32_MIN}, min(int64_t{INT32_MAX}, id)));
  *static_cast<volatile Counted*>(slot.ids + i) = counted(count, static_cast<uint32_t>(sent));
  *static_cast<volatile Counted*>(slot.weights + i) = counted(count, __float_as_uint(weight));
}

// Chooses the experts of all tokens, as warp `warp` of `warps`. Calls take(route, expert, weight) for each.
template <class Take>
__device__ void choose(const Payload& from, uint32_t warp, uint32_t warps, Take&& take) {
  const int top_k = static_cast<int>(from.top_k);
  auto all = [&]<class T, class W>(T, W) {
    for (uint32_t token = warp; token < from.tokens; token += warps) {
      const auto* logits = static_cast<const T*>(from.routing.logits) + static_cast<size_t>(token) * from.experts;
      route_token<T, W, kFewRouted>(
          logits, from.experts, top_k, from.routing.normed, [&](int rank, int expert, float w) {
            const size_t at = static_cast<size_t>(token) * from.top_k + static_cast<size_t>(rank);
            take(at, expert, w);
            const_cast<int64_t*>(static_cast<const int64_t*>(from.ids))[at] = expert;
            const_cast<W*>(static_cast<const W*>(from.weights))[at] = store<W>(w);
          });
    }
  };
  const bool wide = from.weights_dtype == static_cast<uint32_t>(DType::f32);
  if (from.routing.dtype == DType::f32) all(float{}, float{});
  else if (from.routing.dtype == DType::f16) wide ? all(__half{}, float{}) : all(__half{}, __half{});
  else wide ? all(__nv_bfloat16{}, float{}) : all(__nv_bfloat16{}, __nv_bfloat16{});
}

struct Taken {
  bool mine;
  uint32_t count;  // submits of the slot, this one included
};

// Takes the slot when it is free. After the timeout it gives up, and the slot is not ours.
__device__ Taken take(const SlotView& slot, bool has_places, uint64_t timeout_ns) {
  Taken taken{true, 0};
  if (atomicCAS(&slot.counts->busy, 0u, 1u) != 0) {
    const uint64_t start = now_ns();
    while (atomicCAS(&slot.counts->busy, 0u, 1u) != 0) {
      __nanosleep(500);
      if (now_ns() - start > timeout_ns || load_acquire(slot.status) != kFine) {
        taken.mine = false;
        if (load_acquire(slot.status) == kFine) *slot.status = kSlotTaken;  // else the status already has a reason
        break;
      }
    }
  }
  slot.counts->lost = !taken.mine;
  if (taken.mine) taken.count = atomicAdd(&slot.counts->submitted, 1u) + 1;
  // Either idle_kernel sees the slot taken, or we see that the expert is off the table: whoever launches idle_kernel
  // has waited for the kernel that took it off.
  if (has_places) __threadfence();
  return taken;
}

// Sends all routes of a request whose experts are chosen already, with `threads` threads.
__device__ void send_all(const SlotView& slot, const Payload& from, uint32_t count, uint32_t thread, uint32_t threads) {
  const size_t routes = static_cast<size_t>(from.tokens) * from.top_k;
  for (size_t i = thread; i < routes; i += threads) {
    const int64_t id =
        from.ids_are_64_bit ? static_cast<const int64_t*>(from.ids)[i] : static_cast<const int32_t*>(from.ids)[i];
    send(slot, from, count, i, id, widen(from.weights, from.weights_dtype, i));
  }
}

// For a submit that did not get the slot: the kernels of the experts on this GPU read `chosen` in any case, and who
// counts experts may use ids as indices.
__device__ void choose_none(const Payload& from, uint32_t thread, uint32_t threads) {
  const size_t routes = static_cast<size_t>(from.tokens) * from.top_k;
  for (size_t i = thread; i < routes; i += threads) {
    if (from.chosen != nullptr) from.chosen[i] = -1;
    if (from.routing.logits != nullptr) const_cast<int64_t*>(static_cast<const int64_t*>(from.ids))[i] = 0;
  }
}

// Takes the announcement back, so that the dispatcher thread does not stay awake for this submit.
__device__ void withdraw(const RingView& ring) {
  if ((ring.address & kAnnounced) != 0) put_entry(ring, atomicAdd(ring.ticket, 1u), kAnnounced | kNobody);
}

__device__ void write_head(const SlotView& slot, const Payload& from, uint32_t count) {
  slot.head->layer = slot.layer;
  slot.head->tokens = from.tokens;
  slot.head->top_k = from.top_k;
  slot.head->dtype = from.dtype;
  slot.head->count = count;
}

__global__ void __launch_bounds__(kMostThreads)
    submit_kernel(SlotView slot, RingView ring, Payload from, uint32_t routing_warps, uint64_t timeout_ns) {
  __shared__ Taken shared;
  release_next();
  // Before our turn in the stream: only a wait that still holds the slot reads what this writes, and take() awaits it.
  if (threadIdx.x == 0) shared = take(slot, from.places != nullptr, timeout_ns);
  __syncthreads();
  const Taken taken = shared;
  const bool copies = threadIdx.x >= routing_warps * kWarp;
  const uint32_t thread = threadIdx.x - routing_warps * kWarp, threads = blockDim.x - routing_warps * kWarp;
  // Only threads that meet at the barrier before the entry.
  if (taken.mine && copies && from.bytes <= kWatchedBytes)
    for (size_t i = thread; i < (from.bytes + 15) / 16; i += threads)
      reinterpret_cast<uint4*>(slot.out)[i] = uint4{~0u, ~0u, ~0u, ~0u};  // no kernel produces this NaN
  await_previous();
  if (!taken.mine) {
    choose_none(from, threadIdx.x, blockDim.x);
    if (threadIdx.x == 0) withdraw(ring);
    return;
  }
  if (!copies) {
    choose(from, threadIdx.x / kWarp, routing_warps,
           [&](size_t i, int64_t id, float weight) { send(slot, from, taken.count, i, id, weight); });
    return;
  }
  // The ticket is taken only now: the dispatcher reads entries in order, so a submit that has a ticket must not wait
  // for another one.
  uint32_t ticket = 0;
  if (thread == 0 && ring.entries != nullptr) ticket = atomicAdd(ring.ticket, 1u);
  copy(from.x, slot.x, from.bytes, thread, threads);
  if (routing_warps == 0) send_all(slot, from, taken.count, thread, threads);
  if (thread == 0) write_head(slot, from, taken.count);
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
  if (thread != 0 || ring.entries == nullptr) return;
  __threadfence_system();  // also for the other threads' writes, which the barrier has put before this
  put_entry(ring, ticket, ring.address);
}

// A submit of many bytes: one kernel takes the slot, one with many blocks fills it, and one hands it over. A kernel
// sees all that earlier kernels of its stream have written, and the last one's fence orders all of it before the entry.
__global__ void take_kernel(SlotView slot, bool has_places, uint64_t timeout_ns) { take(slot, has_places, timeout_ns); }

__global__ void __launch_bounds__(kCopyThreads) fill_kernel(SlotView slot, Payload from) {
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  if (slot.counts->lost != 0) {
    choose_none(from, thread, threads);
    return;
  }
  const uint32_t count = slot.counts->submitted;
  if (from.routing.logits == nullptr) send_all(slot, from, count, thread, threads);
  else
    choose(from, thread / kWarp, threads / kWarp,
           [&](size_t i, int64_t id, float weight) { send(slot, from, count, i, id, weight); });
  copy(from.x, slot.x, from.bytes, thread, threads);
}

__global__ void hand_over_kernel(SlotView slot, RingView ring, Payload from) {
  if (slot.counts->lost != 0) {
    withdraw(ring);
    return;
  }
  write_head(slot, from, slot.counts->submitted);
  __threadfence_system();
  if (ring.entries != nullptr) put_entry(ring, atomicAdd(ring.ticket, 1u), ring.address);
}

// 16 bytes of the answer, and what the epilogue adds to them.
template <class T>
struct Piece {
  static constexpr int kValues = 16 / sizeof(T);
  float addend[kValues], residual[kValues];

  __device__ void read(const Epilogue& epilogue, size_t first, size_t values) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const bool there = first + j < values;
      addend[j] = there && epilogue.addend != nullptr ? __ldcg(epilogue.addend + first + j) : 0;
      residual[j] = there && epilogue.residual != nullptr
                        ? load(read_written(static_cast<const T*>(epilogue.residual) + first + j))
                        : 0;
    }
  }

  __device__ void write(uint4 raw, const Epilogue& epilogue, T* out, size_t first, size_t values) const {
    T found[kValues];
    memcpy(found, &raw, sizeof raw);
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (epilogue.addend != nullptr) found[j] = store<T>(load(found[j]) + addend[j]);
      if (epilogue.residual != nullptr) found[j] = store<T>(load(found[j]) + residual[j]);
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

// Whether every value of a piece has been written: none is the NaN of all ones that submit() put there.
template <class T>
__device__ bool is_complete(uint4 raw) {
  if constexpr (sizeof(T) == 4) return raw.x != ~0u && raw.y != ~0u && raw.z != ~0u && raw.w != ~0u;
  return (__vcmpeq2(raw.x, ~0u) | __vcmpeq2(raw.y, ~0u) | __vcmpeq2(raw.z, ~0u) | __vcmpeq2(raw.w, ~0u)) == 0;
}

// Waits for the answer, and applies the epilogue. If a thread has only one piece of the answer, it watches that piece
// itself: that costs one way over the bus instead of two, and needs nothing that the CPU does after its last value. A
// piece stays incomplete if the answer itself contains that NaN; it is taken when `answered` has reached the count.
// Before an answer can be expected, one thread watches `answered` alone: all pieces, again and again, would take a good
// part of the bus, and of the host's memory.
template <class T>
__global__ void __launch_bounds__(kMostThreads)
    wait_kernel(SlotView slot, T* out, Epilogue epilogue, size_t values, uint64_t timeout_ns) {
  constexpr size_t kEach = Piece<T>::kValues;
  enum State { kWaiting, kAnswered, kLost };
  __shared__ State states[2];  // in turns, so that one barrier a round is enough
  await_previous();
  // Not earlier: the next kernel might fill the device while our submit kernel still waits for another kernel to end.
  release_next();
  const auto* pieces = reinterpret_cast<const uint4*>(slot.out);
  const bool is_one_each = values <= kEach * blockDim.x, has_piece = threadIdx.x * kEach < values;
  Piece<T> mine;
  mine.read(epilogue, threadIdx.x * kEach, values);  // before there is anything to wait for
  uint32_t count = 0, quiet = 0;
  uint64_t start = 0;
  bool lost = false, is_early = false;
  const auto is_answered = [&] { return static_cast<int32_t>(load_acquire(&slot.head->answered) - count) >= 0; };
  if (threadIdx.x == 0) {
    count = __ldcg(&slot.counts->submitted);
    quiet = __ldcg(&slot.counts->quiet_ns);
    lost = __ldcg(&slot.counts->lost) != 0;
    start = now_ns();
    if (is_one_each && !lost)
      while (now_ns() - start < min(uint64_t{quiet}, timeout_ns) && !(is_early = is_answered())) {
      }
  }
  __syncthreads();
  uint4 raw{~0u, ~0u, ~0u, ~0u};
  State state = kWaiting;
  for (uint32_t round = 0; state == kWaiting; ++round) {
    if (is_one_each && has_piece) raw = load_now(pieces + threadIdx.x);
    if (threadIdx.x == 0) {
      State found = is_answered() ? kAnswered : kWaiting;
      if (found == kWaiting && round % 32 == 31) {
        const bool timed_out = now_ns() - start > timeout_ns;
        if (timed_out) *slot.status = kNoAnswer;
        if (timed_out || load_acquire(slot.status) != kFine) found = kLost;
      }
      states[round % 2] = lost ? kLost : found;
    }
    if (__syncthreads_and(!lost && is_one_each && (!has_piece || is_complete<T>(raw)))) break;
    state = states[round % 2];
  }
  if (threadIdx.x == 0 && is_one_each && state != kLost)
    slot.counts->quiet_ns = next_quiet_ns(quiet, now_ns() - start, is_early);
  // Without an answer the output has all bits set, a NaN in every dtype, so that nobody takes it for a result.
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
      if (i != threadIdx.x) mine.read(epilogue, i * kEach, values);
      mine.write(found[j], epilogue, out, i * kEach, values);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0 && state != kLost) {
    __threadfence();
    atomicExch(&slot.counts->busy, 0u);
  }
}

// A wait for many bytes: this waits, many blocks copy, and the slot is freed.
__global__ void await_kernel(SlotView slot, uint64_t timeout_ns) {
  if (slot.counts->lost != 0) return;
  const uint32_t count = slot.counts->submitted;
  const uint64_t start = now_ns();
  for (uint32_t round = 1; static_cast<int32_t>(load_acquire(&slot.head->answered) - count) < 0; ++round) {
    __nanosleep(200);
    if (round % 32 != 0) continue;
    const bool timed_out = now_ns() - start > timeout_ns;
    if (timed_out) *slot.status = kNoAnswer;
    if (timed_out || load_acquire(slot.status) != kFine) {
      slot.counts->lost = 1;
      return;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kCopyThreads)
    collect_kernel(SlotView slot, T* out, Epilogue epilogue, size_t values) {
  constexpr size_t kEach = Piece<T>::kValues;
  const auto* pieces = reinterpret_cast<const uint4*>(slot.out);
  const bool lost = slot.counts->lost != 0;
  const size_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = size_t{gridDim.x} * blockDim.x;
  constexpr int kTogether = 4;  // on their way at the same time
  for (size_t base = thread; base * kEach < values; base += kTogether * threads) {
    uint4 found[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const size_t i = base + j * threads;
      found[j] = !lost && i * kEach < values ? load_now(pieces + i) : uint4{~0u, ~0u, ~0u, ~0u};
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const size_t i = base + j * threads;
      if (i * kEach >= values) break;
      Piece<T> piece;
      piece.read(epilogue, i * kEach, values);
      piece.write(found[j], epilogue, out, i * kEach, values);
    }
  }
}

__global__ void free_kernel(Counts* counts) {
  if (counts->lost == 0) atomicExch(&counts->busy, 0u);
}

// The first block changes the tables, each other one sends the counts of a layer.
__global__ void boundary_kernel(Boundary::Lists lists) {
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i < lists.changes; i += static_cast<int>(blockDim.x))
      atomicExch(lists.at[i], lists.value[i]);
    return;
  }
  const int layer = static_cast<int>(blockIdx.x) - 1;
  for (int i = static_cast<int>(threadIdx.x); i < lists.experts[layer]; i += static_cast<int>(blockDim.x))
    lists.to[layer][i] = __ldcg(lists.traffic[layer] + i);
}

__global__ void __launch_bounds__(kMostExpertsPerToken)
    foresee_kernel(SlotView slot, Layer* next, const int64_t* ids, uint32_t top_k) {
  release_next();
  await_previous();
  if (slot.counts->lost != 0) return;
  const uint32_t count = slot.counts->submitted;
  if (threadIdx.x == 0) {
    slot.head->next = next;
    slot.head->next_top_k = top_k;
    __threadfence_system();
  }
  __syncthreads();
  if (threadIdx.x >= top_k) return;
  const int64_t id = read_written(ids + threadIdx.x);
  const auto sent = static_cast<int32_t>(max(int64_t{-1}, min(int64_t{INT32_MAX}, id)));
  *static_cast<volatile Counted*>(slot.foreseen + threadIdx.x) = counted(count, static_cast<uint32_t>(sent));
}

__global__ void idle_kernel(IdleList list, uint32_t* free, uint64_t most_ns) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= list.length) return;
  const uint64_t start = now_ns();
  int slot = 0;
  while (slot < list.slots[i]) {
    if (atomicAdd(&list.counts[i][slot].busy, 0u) == 0) ++slot;
    else if (now_ns() - start < most_ns) __nanosleep(1000);
    else break;
  }
  free[i] = slot == list.slots[i];
}

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

// One block: a thread for each piece of 16 bytes, and `more` warps.
Launch shape_for(size_t bytes, cudaStream_t stream, uint32_t more = 0) {
  const size_t pieces = std::max<size_t>(1, (bytes / 16 + kWarp - 1) / kWarp), most = kMostThreads / kWarp - more;
  return {dim3(1), dim3(static_cast<unsigned>((std::min(pieces, most) + more) * kWarp)), stream};
}

}  // namespace

void launch_submit(const SlotView& slot, const RingView& ring, const Payload& payload, uint64_t timeout_ns,
                   cudaStream_t stream) {
  if (payload.bytes > kOneBlockBytes) {
    take_kernel<<<1, 1, 0, stream>>>(slot, payload.places != nullptr, timeout_ns);
    check_cuda(cudaGetLastError(), "launching the take kernel");
    fill_kernel<<<kCopyBlocks, kCopyThreads, 0, stream>>>(slot, payload);
    check_cuda(cudaGetLastError(), "launching the fill kernel");
    hand_over_kernel<<<1, 1, 0, stream>>>(slot, ring, payload);
    check_cuda(cudaGetLastError(), "launching the kernel that hands a slot over");
    return;
  }
  const auto routing_warps = payload.routing.logits == nullptr ? 0u : std::min(payload.tokens, kMostRoutingWarps);
  launch_early("launching the submit kernel", submit_kernel, shape_for(payload.bytes, stream, routing_warps), slot,
               ring, payload, routing_warps, timeout_ns);
}

void launch_foresee(const SlotView& slot, Layer* next, const int64_t* ids, int top_k, cudaStream_t stream) {
  launch_early("launching the foresee kernel", foresee_kernel, {dim3(1), dim3(kMostExpertsPerToken), stream}, slot,
               next, ids, static_cast<uint32_t>(top_k));
}

void launch_wait(const SlotView& slot, void* out, const Epilogue& epilogue, size_t values, DType dtype,
                 uint64_t timeout_ns, cudaStream_t stream) {
  auto launch = [&]<class T>(T) {
    if (values * sizeof(T) <= kOneBlockBytes) {
      launch_early("launching the wait kernel", wait_kernel<T>, shape_for(values * sizeof(T), stream), slot,
                   static_cast<T*>(out), epilogue, values, timeout_ns);
      return;
    }
    await_kernel<<<1, 1, 0, stream>>>(slot, timeout_ns);
    check_cuda(cudaGetLastError(), "launching the kernel that awaits an answer");
    if (out != nullptr)
      collect_kernel<<<kCopyBlocks, kCopyThreads, 0, stream>>>(slot, static_cast<T*>(out), epilogue, values);
    check_cuda(cudaGetLastError(), "launching the kernel that collects an answer");
    free_kernel<<<1, 1, 0, stream>>>(slot.counts);
    check_cuda(cudaGetLastError(), "launching the kernel that frees a slot");
  };
  if (dtype == DType::f32) launch(float{});
  else if (dtype == DType::f16) launch(__half{});
  else launch(__nv_bfloat16{});
}

void Boundary::change(int32_t* at, int32_t value, cudaStream_t stream) {
  if (lists_.changes == kMost) launch(stream);
  lists_.at[lists_.changes] = at;
  lists_.value[lists_.changes++] = value;
}

void Boundary::count(const uint32_t* traffic, uint32_t* to, int experts, cudaStream_t stream) {
  if (lists_.layers == kMost) launch(stream);
  lists_.traffic[lists_.layers] = traffic;
  lists_.to[lists_.layers] = to;
  lists_.experts[lists_.layers++] = experts;
}

void Boundary::launch(cudaStream_t stream) {
  if (lists_.changes == 0 && lists_.layers == 0) return;
  boundary_kernel<<<static_cast<unsigned>(1 + lists_.layers), 128, 0, stream>>>(lists_);
  check_cuda(cudaGetLastError(), "launching the boundary kernel");
  lists_.changes = lists_.layers = 0;
}

void launch_idle(const IdleList& list, uint32_t* free, uint64_t most_ns, cudaStream_t stream) {
  idle_kernel<<<1, kMostIdle, 0, stream>>>(list, free, most_ns);
  check_cuda(cudaGetLastError(), "launching the kernel that awaits slots");
}

cudaError_t launch_echo(uint32_t* ask, const uint32_t* answer, uint32_t* heard, cudaStream_t stream) {
  echo_kernel<<<1, 1, 0, stream>>>(ask, answer, heard);
  return cudaGetLastError();
}

}  // namespace ktinject::handoff
