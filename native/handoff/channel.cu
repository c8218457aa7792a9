#include "handoff/channel.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "cuda/devices.hpp"
#include "cuda/on_device.cuh"
#include "cuda/route.cuh"
#include "handoff/dispatcher.hpp"
#include "handoff/kernels.cuh"
#include "handoff/waits.hpp"

namespace ktinject::handoff {
namespace {

using cuda::AsideOfCaptures;
using cuda::check_cuda;
using cuda::OnDevice;

bool ends_long_kernels(int device) { return cuda::device_at(device).limits.ends_long_kernels; }

// Of a kernel that waits.
uint64_t timeout_ns(int device) {
  return static_cast<uint64_t>(kernel_wait_seconds(answer_timeout(), ends_long_kernels(device)) * 1e9);
}

// The graph that a stream is captured into, or null.
cudaGraph_t captured_graph(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
  check_cuda(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph), "asking whether a graph is captured");
#else
  check_cuda(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph), "asking whether a graph is captured");
#endif
  return status == cudaStreamCaptureStatusNone ? nullptr : graph;
}

// What a graph with a submit keeps.
struct Kept {
  std::shared_ptr<Slots> slots;
  Dispatcher::Replayable replayable;
};

// Makes a graph, and all that is instantiated from it, keep the slots alive and the dispatcher awake. CUDA releases
// both on a thread of its own, which must not call CUDA.
void keep_in(cudaGraph_t graph, const std::shared_ptr<Slots>& slots) {
  auto kept = std::unique_ptr<Kept>(new Kept{slots, Dispatcher::Replayable(dispatcher())});
  const cudaHostFn_t drop = [](void* held) { delete static_cast<Kept*>(held); };
  cudaUserObject_t object = nullptr;
  check_cuda(cudaUserObjectCreate(&object, kept.get(), drop, 1, cudaUserObjectNoDestructorSync), "keeping slots");
  kept.release();  // the object's
  const cudaError_t error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error != cudaSuccess) cudaUserObjectRelease(object, 1);
  check_cuda(error, "keeping slots in a graph");
}

}  // namespace

Channel::Channel(const moe::Experts& experts, int device)
    : device_(device), expert_count_(experts.config().experts), layer_(Layer::make(experts, device)) {}

Channel::~Channel() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  const bool idle = [] {
    const AsideOfCaptures aside;
    return cudaDeviceSynchronize() == cudaSuccess;
  }();
  if (idle && __atomic_load_n(layer_->status, __ATOMIC_ACQUIRE) != kFine) {
    try {
      release_lost();
    } catch (const std::exception&) {  // the slots stay taken
    }
  }
  cudaGetLastError();
  cudaSetDevice(before);
  // Clear the experts first, then look at what the dispatcher thread runs: either it finds no experts, or we wait for
  // it.
  layer_->experts.store(nullptr);
  for (const auto* all : {&used_, &foreseen_in_})
    for (const auto& slots : *all)
      for (const auto& slot : slots->all) dispatcher().settle(slot.get());
  // Entries of this layer may still come. The dispatcher thread answers them without the experts.
  if (idle) return;
  lose_announcements();
  new std::vector<std::shared_ptr<Slots>>(std::move(used_));
  new std::vector<std::shared_ptr<Slots>>(std::move(foreseen_in_));
}

std::vector<std::shared_ptr<Slots>> Channel::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

std::vector<SlotCounts> Channel::slot_counts() const {
  std::vector<SlotCounts> counts;
  for (const auto& slots : used()) counts.push_back({slots->counts, static_cast<int>(slots->all.size())});
  return counts;
}

// The device has failed, so no kernel of this process runs there any more.
void Channel::lose_announcements() const {
  for (const auto& slots : used())
    if (slots->ring.entries != nullptr) dispatcher().lose(slots->ring.entries);
}

void Channel::check_request(const Slots& slots, const DeviceRequest& request) const {
  if (request.top_k < 1 || request.top_k > kMostExpertsPerToken)
    throw std::invalid_argument("experts a token: found " + std::to_string(request.top_k) + "; allowed: 1 to " +
                                std::to_string(kMostExpertsPerToken));
  const size_t tokens = static_cast<size_t>(std::max(0, request.tokens));
  const size_t fit = std::min(slots.most_bytes / (layer_->hidden * dtype_bytes(request.dtype)),
                              slots.most_routes / static_cast<size_t>(request.top_k));
  if (tokens < 1 || tokens > fit)
    throw std::invalid_argument("tokens: found " + std::to_string(request.tokens) + "; allowed: 1 to " +
                                std::to_string(fit));
  if (request.routing.logits == nullptr) return;
  cuda::check_route(expert_count_, request.top_k, cuda::kFewRouted);
  if (!request.ids_are_64_bit || request.rank_from != 0 || request.rank_to < request.top_k)
    throw std::invalid_argument("a submit that chooses the experts needs ids of 64 bits, and every rank");
  if (request.weights_dtype != request.routing.dtype && request.weights_dtype != DType::f32)
    throw std::invalid_argument("a submit that chooses the experts writes weights of the logits' dtype, or float32");
}

void Channel::submit(const std::shared_ptr<Slots>& slots, int index, const DeviceRequest& request,
                     uintptr_t raw_stream) {
  check_request(*slots, request);
  Slot& slot = *slots->all.at(static_cast<size_t>(index));
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(device_);
  RingView ring = slots->ring;
  ring.address = slot.address;
  if (cudaGraph_t graph = captured_graph(stream)) {
    keep_in(graph, slots);
  } else {
    slot.follow_in(raw_stream);
    if (slots->mode == Mode::flags) {
      ring.address |= kAnnounced;
      dispatcher().announce(ring.entries);
    }
  }
  const Payload payload{request.x,
                        static_cast<size_t>(request.tokens) * layer_->hidden * dtype_bytes(request.dtype),
                        request.ids,
                        request.weights,
                        request.places,
                        request.chosen,
                        request.traffic,
                        expert_count_,
                        static_cast<uint32_t>(request.tokens),
                        static_cast<uint32_t>(request.top_k),
                        static_cast<uint32_t>(request.rank_from),
                        static_cast<uint32_t>(request.rank_to),
                        static_cast<uint32_t>(request.dtype),
                        request.ids_are_64_bit,
                        static_cast<uint32_t>(request.weights_dtype),
                        request.live,
                        request.skips_unknown,
                        request.routing};
  SlotView view = slot.view;
  view.status = layer_->status, view.layer = layer_;
  try {
    {
      std::lock_guard lock(mutex_);
      if (std::find(used_.begin(), used_.end(), slots) == used_.end()) used_.push_back(slots);
    }
    launch_submit(view, ring, payload, timeout_ns(device_), stream);
  } catch (...) {
    if (ring.address & kAnnounced) dispatcher().withdraw(ring.entries);
    throw;
  }
  if (slots->mode == Mode::host_func)
    check_cuda(cudaLaunchHostFunc(stream, Slot::announce, &slot), "adding a host function");
}

void Channel::wait(const std::shared_ptr<Slots>& slots, int index, int tokens, DType dtype, void* out,
                   const float* addend, const void* residual, uintptr_t raw_stream, uintptr_t submitted_in) {
  const size_t values = static_cast<size_t>(tokens) * layer_->hidden;
  if (values * dtype_bytes(dtype) > slots->most_bytes)
    throw std::invalid_argument("wait for more tokens than were submitted");
  Slot& slot = *slots->all.at(static_cast<size_t>(index));
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  OnDevice on(device_);
  if (raw_stream != submitted_in)
    cuda::follow(stream, reinterpret_cast<cudaStream_t>(submitted_in), "waiting for the stream that submitted");
  const bool is_captured = captured_graph(stream) != nullptr;
  // A graph would lose more by a host function in each layer, and its waits are short.
  if (slots->mode == Mode::host_func || (!is_captured && ends_long_kernels(device_)))
    check_cuda(cudaLaunchHostFunc(stream, Slot::await_answer, &slot), "adding a host function");
  SlotView view = slot.view;
  view.status = layer_->status, view.layer = layer_;
  launch_wait(view, out, {addend, residual}, values, dtype, timeout_ns(device_), stream);
  if (!is_captured) slot.free_after(device_, raw_stream);
}

void Channel::foresee(const std::shared_ptr<Slots>& slots, int index, const int64_t* ids, int top_k,
                      uintptr_t raw_stream) {
  if (top_k < 1 || top_k > kMostExpertsPerToken)
    throw std::invalid_argument("experts that are foreseen: found " + std::to_string(top_k) + "; allowed: 1 to " +
                                std::to_string(kMostExpertsPerToken));
  if (slots->device != device_ || slots->mode != Mode::flags)
    throw std::invalid_argument("experts are foreseen for a layer on the same device, whose submits use flags");
  const Slot& slot = *slots->all.at(static_cast<size_t>(index));
  OnDevice on(device_);
  {
    std::lock_guard lock(mutex_);
    if (std::find(foreseen_in_.begin(), foreseen_in_.end(), slots) == foreseen_in_.end()) foreseen_in_.push_back(slots);
  }
  launch_foresee(slot.view, layer_, ids, top_k, reinterpret_cast<cudaStream_t>(raw_stream));
}

// Frees slots whose answer did not come. While the status is not kFine, all waiting kernels end at once, so no kernel
// of this layer stays on the device. The next submit must not get the answer of an earlier one, so work that runs is
// waited for, and work that has not begun never begins.
void Channel::release_lost() {
  const AsideOfCaptures aside;
  for (const auto& slots : used()) {
    std::vector<Counts> counts(slots->all.size());
    check_cuda(cudaMemcpy(counts.data(), slots->counts, counts.size() * sizeof(Counts), cudaMemcpyDeviceToHost),
               "reading counters");
    for (size_t index = 0; index < counts.size(); ++index) {
      Slot& slot = *slots->all[index];
      // A shared slot may be another layer's by now.
      if (slots->shared && (counts[index].busy == 0 || slot.view.head->layer != layer_)) continue;
      // All host functions have been called by now.
      slot.given_up.store(slots->mode == Mode::flags ? counts[index].submitted : slot.called.load());
      if (dispatcher().settle(&slot, answer_timeout()))
        check_cuda(cudaMemset(&slots->counts[index].busy, 0, sizeof(uint32_t)), "freeing a slot");
    }
  }
}

void Channel::check() {
  if (const uint32_t status = __atomic_load_n(layer_->status, __ATOMIC_ACQUIRE); status != kFine) {
    OnDevice on(device_);
    {
      const AsideOfCaptures aside;
      const cudaError_t error = cudaDeviceSynchronize();
      if (error != cudaSuccess) lose_announcements();
      check_cuda(error, "waiting for the device");
    }
    release_lost();
    __atomic_store_n(layer_->status, kFine, __ATOMIC_RELEASE);
    std::string waited = std::to_string(answer_timeout()) + " s";
    if (ends_long_kernels(device_) && answer_timeout() > kLongestKernelSeconds)
      waited += ", or " + std::to_string(kLongestKernelSeconds) +
                " s in a captured step: the driver of this device ends kernels that run for seconds, mostly since a "
                "display is attached";
    throw std::runtime_error(status == kNoAnswer ? "no answer from the CPU's experts within " + waited
                                                 : "another stream held this layer's buffers for " + waited);
  }
  if (const std::exception_ptr failure = layer_->take_failure()) std::rethrow_exception(failure);
}

}  // namespace ktinject::handoff
