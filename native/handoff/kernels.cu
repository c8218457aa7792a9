#include "handoff/kernels.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/early.cuh"
#include "cuda/route.cuh"

namespace ktinject::handoff {
namespace {

using namespace cuda;  // NOLINT

constexpr int kMostThreads = 1024;
constexpr uint32_t kMostRoutingWarps = 8;

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
  *reinterpret_cast<volatile uint64_t*>(bell.ring + ticket % kRingEntries) = entry;
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
    if (threadIdx.x == 0 && (bell.address & kAnnounced) != 0)
      ring(bell, atomicAdd(bell.ticket, 1u), kAnnounced | kNobody);
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

}  // namespace

void launch_submit(const View& slot, const Bell& bell, const Payload& payload, uint64_t timeout_ns,
                   cudaStream_t stream) {
  const auto routing_warps = payload.routing.logits == nullptr ? 0u : std::min(payload.tokens, kMostRoutingWarps);
  launch_early("launching the submit kernel", submit_kernel, shape_for(payload.bytes, stream, routing_warps), slot,
               bell, payload, routing_warps, timeout_ns);
}

void launch_wait(const View& slot, void* out, const Added& added, size_t values, DType dtype, uint64_t timeout_ns,
                 cudaStream_t stream) {
  auto launch = [&]<class T>(T) {
    launch_early("launching the wait kernel", wait_kernel<T>, shape_for(values * sizeof(T), stream), slot,
                 static_cast<T*>(out), added, values, timeout_ns);
  };
  if (dtype == DType::f32) launch(float{});
  else if (dtype == DType::f16) launch(__half{});
  else launch(__nv_bfloat16{});
}

void launch_evict(int32_t* places, int expert, Counts* counts, int slots, uint64_t timeout_ns, cudaStream_t stream) {
  evict_kernel<<<1, 1, 0, stream>>>(places, expert, counts, slots, timeout_ns);
  check_cuda(cudaGetLastError(), "launching the evict kernel");
}

void launch_admit(int32_t* places, int expert, int place, cudaStream_t stream) {
  admit_kernel<<<1, 1, 0, stream>>>(places, expert, place);
  check_cuda(cudaGetLastError(), "launching the admit kernel");
}

cudaError_t launch_echo(uint32_t* ask, const uint32_t* answer, uint32_t* heard, cudaStream_t stream) {
  echo_kernel<<<1, 1, 0, stream>>>(ask, answer, heard);
  return cudaGetLastError();
}

}  // namespace ktinject::handoff
