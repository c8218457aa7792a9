#include "handoff/expert_cache.hpp"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "cuda/handles.cuh"
#include "cuda/on_device.cuh"
#include "handoff/dispatcher.hpp"
#include "handoff/kernels.cuh"

namespace ktinject::handoff {
namespace {

using cuda::AsideOfCaptures;
using cuda::check_cuda;
using cuda::make_event;
using cuda::make_stream;
using cuda::OnDevice;

constexpr uint64_t kIdleRoundNs = 2'000'000;
constexpr int kWatches = 64, kRests = 448;  // boundaries; see ExpertCache::decide
// Of the estimated time of a step, so much may be spent on copies. A layer is estimated to take kLayerUs beside its
// experts, and an expert on the CPU a third of a copy; of the uses, half are on the CPU.
constexpr double kShare = 0.5, kLayerUs = 40, kUseByCopy = 0.5 / 3;

cudaStream_t stream_of(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t event_of(void* handle) { return static_cast<cudaEvent_t>(handle); }

struct MappedWords {
  cuda::Mapped<uint32_t> host;
  uint32_t* device;
};
// what: for the error.
MappedWords mapped_words(size_t count, const std::string& what) {
  void *host = nullptr, *device = nullptr;
  check_cuda(cudaHostAlloc(&host, count * sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable),
             "taking memory for " + what);
  MappedWords words{cuda::Mapped<uint32_t>(static_cast<uint32_t*>(host)), nullptr};
  check_cuda(cudaHostGetDevicePointer(&device, host, 0), "mapping " + what);
  words.device = static_cast<uint32_t*>(device);
  return words;
}

}  // namespace

ExpertCache::ExpertCache(int device) : device_(device) {
  OnDevice on(device);
  const AsideOfCaptures aside;
  // Ours until there is somebody who destroys them: the destructor, which runs only if all of this succeeds.
  auto side = make_stream();
  auto stepped = make_event(cudaEventDisableTiming | cudaEventBlockingSync);
  auto copied = make_event(cudaEventDisableTiming);
  auto looked = make_event(cudaEventDisableTiming | cudaEventBlockingSync);
  auto idle = mapped_words(kMostIdle, "slots that are free");
  side_ = side.get(), stepped_ = stepped.get(), copied_ = copied.get(), looked_ = looked.get();
  idle_ = idle.host.get(), idle_on_device_ = idle.device;
  thread_ = std::thread([this] { work(); });
  side.release(), stepped.release(), copied.release(), looked.release(), idle.host.release();
}

ExpertCache::~ExpertCache() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
    holds_ = 0;
  }
  changed_.notify_all();
  thread_.join();
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  {
    const AsideOfCaptures aside;
    cudaStreamSynchronize(stream_of(side_));
    cudaEventSynchronize(event_of(stepped_));
    cudaEventDestroy(event_of(stepped_));
    cudaEventDestroy(event_of(copied_));
    cudaEventDestroy(event_of(looked_));
    cudaFreeHost(idle_);
    cudaStreamDestroy(stream_of(side_));
    cudaFreeHost(counted_);
  }
  cudaGetLastError();
  cudaSetDevice(before);
}

// Until the thread has nothing to do.
void ExpertCache::await_thread(std::unique_lock<std::mutex>& lock) {
  const auto limit = std::chrono::duration<double>(2 * answer_timeout());
  if (!changed_.wait_for(lock, limit, [this] { return !busy_; }))
    throw std::runtime_error("the experts on the GPU were not exchanged within " + std::to_string(limit.count()) +
                             " s");
}

int ExpertCache::join(const CachedLayer& layer, const std::vector<int>& resident, int spares) {
  std::unique_lock lock(mutex_);
  await_thread(lock);
  const int experts = layer.experts->config().experts;
  Held held{layer, ReusePolicy(experts, resident), {}, {}, {}, 0, {}};
  held.place_of.assign(static_cast<size_t>(experts), -1);
  held.seen.assign(static_cast<size_t>(experts), 0);
  const auto places = static_cast<int>(resident.size());
  for (int place = 0; place < places; ++place)
    held.place_of[static_cast<size_t>(resident[static_cast<size_t>(place)])] = place;
  for (int place = places + spares; place > places; --place) held.spares.push_back(place - 1);
  layers_.emplace(next_, std::move(held));
  try {
    make_room();
  } catch (...) {
    layers_.erase(next_);
    throw;
  }
  return next_++;
}

// For the counts of all layers, in memory that the device writes to.
void ExpertCache::make_room() {
  size_t counts = 0;
  for (auto& [number, held] : layers_) {
    held.at = counts;
    counts += held.seen.size();
  }
  if (counts <= most_counts_) return;
  OnDevice on(device_);
  const AsideOfCaptures aside;
  check_cuda(cudaEventSynchronize(event_of(stepped_)), "waiting for a step");  // a kernel may write to the old one
  MappedWords words = mapped_words(2 * counts, "counts of experts");
  cudaFreeHost(counted_);
  counted_ = words.host.release(), counted_on_device_ = words.device;
  most_counts_ = 2 * counts;
}

void ExpertCache::leave(int layer) {
  std::unique_lock lock(mutex_);
  await_thread(lock);
  std::erase_if(moves_, [layer](const Move& move) { return move.layer == layer; });
  layers_.erase(layer);
  OnDevice on(device_);
  const AsideOfCaptures aside;
  check_cuda(cudaStreamSynchronize(stream_of(side_)), "waiting for copies of experts");
  check_cuda(cudaEventSynchronize(event_of(stepped_)), "waiting for a step");
}

void ExpertCache::step(uintptr_t raw_stream) {
  auto* stream = reinterpret_cast<cudaStream_t>(raw_stream);
  std::unique_lock lock(mutex_);
  await_thread(lock);
  if (!failure_.empty()) throw std::runtime_error(std::exchange(failure_, {}));
  if (stopped_ || layers_.empty()) return;
  OnDevice on(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "asking whether a graph is captured");
  if (status != cudaStreamCaptureStatusNone) return;
  if (!moves_.empty()) check_cuda(cudaStreamWaitEvent(stream, event_of(copied_), 0), "waiting for copies of experts");
  if (rests_ > 0) {
    --rests_;
    return;
  }
  Boundary boundary;
  for (const Move& move : moves_) {
    Held& held = layers_.at(move.layer);
    const auto [leaving, coming, gain] = move.exchange;
    boundary.change(held.layer.places + leaving, -1, stream);
    boundary.change(held.layer.places + coming, move.place, stream);
    held.spares.push_back(std::exchange(held.place_of[static_cast<size_t>(leaving)], -1));
    held.place_of[static_cast<size_t>(coming)] = move.place;
  }
  moves_.clear();
  for (const auto& [number, held] : layers_)
    boundary.count(held.layer.traffic, counted_on_device_ + held.at, static_cast<int>(held.seen.size()), stream);
  boundary.launch(stream);
  check_cuda(cudaEventRecord(event_of(stepped_), stream), "marking a step");
  busy_ = true;
  lock.unlock();
  changed_.notify_all();
}

std::vector<int> ExpertCache::places(int layer) const {
  std::lock_guard lock(mutex_);
  return layers_.at(layer).place_of;
}

std::vector<int> ExpertCache::hold(int layer, uintptr_t raw_stream) {
  std::lock_guard lock(mutex_);
  std::vector<int> places = layers_.at(layer).place_of;
  // The last exchange may have been ordered behind its copies in another stream alone.
  OnDevice on(device_);
  check_cuda(cudaStreamWaitEvent(reinterpret_cast<cudaStream_t>(raw_stream), event_of(copied_), 0),
             "waiting for copies of experts");
  ++holds_;
  return places;
}

void ExpertCache::release(uintptr_t raw_stream) {
  {
    std::lock_guard lock(mutex_);
    --holds_;
    OnDevice on(device_);
    try {
      cuda::follow(stream_of(side_), reinterpret_cast<cudaStream_t>(raw_stream),
                   "waiting for a stream that reads experts");
    } catch (...) {  // nobody knows when the reader ends, so nothing is written any more
      stopped_ = true;
      changed_.notify_all();
      throw;
    }
  }
  changed_.notify_all();
}

CacheCounts ExpertCache::counts(int layer) const {
  std::lock_guard lock(mutex_);
  return layers_.at(layer).counts;
}

void ExpertCache::work() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || ending_; });
    if (ending_) return;
    lock.unlock();
    std::string failure;
    try {
      check_cuda(cudaEventSynchronize(event_of(stepped_)), "waiting for a step");
      decide();
      copy();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    if (!failure.empty()) {
      moves_.clear();  // of which nobody knows whether they were copied
      failure_ = failure;
      stopped_ = true;
    }
    for (auto& [number, held] : layers_) {
      CacheCounts& counts = held.counts;
      counts.uses = held.policy.uses();
      counts.hits = held.policy.hits();
      counts.fetches = held.policy.exchanges();
      counts.bytes = counts.fetches * held.layer.shapes->bytes();
      counts.gain = held.policy.gain();
      counts.moves = !stopped_ && held.policy.pays();
    }
    busy_ = false;
    changed_.notify_all();
  }
}

int ExpertCache::most_moves(uint64_t uses) const {
  const double step_us =
      kLayerUs * static_cast<double>(layers_.size()) + kUseByCopy * static_cast<double>(uses) * copy_us_;
  return std::max(1, static_cast<int>(kShare * step_us / copy_us_));
}

// Chooses what to move, of all layers together. Only this thread touches the policies while it is busy.
void ExpertCache::decide() {
  if (copy_us_ == 0) measure();
  struct Wish {
    int layer;
    Exchange exchange;
  };
  std::vector<Wish> wishes;
  uint64_t uses = 0;
  for (const auto& [number, held] : layers_)
    for (size_t expert = 0; expert < held.seen.size(); ++expert)
      uses +=
          static_cast<uint32_t>(counted_[held.at + expert] - held.seen[expert]);  // modulo 2^32, as they are counted
  if (uses == 0) return;                                                          // no step has run
  std::vector<uint32_t> used;
  bool pays = false;
  for (auto& [number, held] : layers_) {
    used.resize(held.seen.size());
    for (size_t expert = 0; expert < used.size(); ++expert) {
      const uint32_t now = counted_[held.at + expert];
      used[expert] = now - std::exchange(held.seen[expert], now);
    }
    if (rested_) {
      held.policy.skip(used.data());
      continue;
    }
    held.policy.count(used.data());
    if (!held.policy.pays()) continue;
    pays = true;
    for (const Exchange& exchange : held.policy.candidates(static_cast<int>(held.spares.size())))
      wishes.push_back({number, exchange});
  }
  // After some boundaries without any layer that gains from exchanges, the next ones are left out.
  watched_ = rested_ || pays ? 0 : watched_ + 1;
  rested_ = watched_ == kWatches;
  rests_ = rested_ ? kRests : 0;
  std::stable_sort(wishes.begin(), wishes.end(),
                   [](const Wish& one, const Wish& other) { return one.exchange.gain > other.exchange.gain; });
  const auto most = static_cast<size_t>(most_moves(uses));
  if (wishes.size() > most) wishes.resize(most);
  for (const Wish& wish : wishes) {
    Held& held = layers_.at(wish.layer);
    held.policy.choose(wish.exchange);
    moves_.push_back({wish.layer, wish.exchange, held.spares.back()});
    held.spares.pop_back();
  }
}

// Puts the copies into the side stream, behind whatever may still read the places that they go to: submits that took
// their slot before the table changed, and who held them.
void ExpertCache::copy() {
  if (moves_.empty()) return;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return holds_ == 0 || ending_; });
    if (stopped_) throw std::runtime_error("who reads the experts on the GPU cannot be waited for");
  }
  cudaStream_t side = stream_of(side_);
  // The boundary has run, so a submit that comes later does not find what has left.
  std::vector<SlotCounts> used;
  std::stable_sort(moves_.begin(), moves_.end(), [](const Move& a, const Move& b) { return a.layer < b.layer; });
  for (size_t i = 0; i < moves_.size(); ++i) {
    if (i > 0 && moves_[i].layer == moves_[i - 1].layer) continue;
    const auto of_layer = layers_.at(moves_[i].layer).layer.channel->slot_counts();
    used.insert(used.end(), of_layer.begin(), of_layer.end());
  }
  await_idle(std::move(used));
  for (const Move& move : moves_) {
    const CachedLayer& layer = layers_.at(move.layer).layer;
    layer.shapes->copy(*layer.experts, move.exchange.coming,
                       layer.memory + static_cast<size_t>(move.place) * layer.shapes->bytes(),
                       {device_, reinterpret_cast<uintptr_t>(side_)});
  }
  check_cuda(cudaEventRecord(event_of(copied_), side), "marking copies of experts");
}

// Until each of these slots has been free once. In short kernels: who holds a slot may have to load a kernel to go on,
// for which the driver waits until nothing runs.
void ExpertCache::await_idle(std::vector<SlotCounts> slots) {
  cudaStream_t side = stream_of(side_);
  const auto start = std::chrono::steady_clock::now();
  const std::chrono::duration<double> limit(answer_timeout());
  while (!slots.empty()) {
    if (std::chrono::steady_clock::now() - start > limit)
      throw std::runtime_error("experts on the GPU stay where they are: who reads them did not end within " +
                               std::to_string(limit.count()) + " s");
    IdleList list;
    while (list.length < kMostIdle && static_cast<size_t>(list.length) < slots.size()) {
      const SlotCounts& next = slots[static_cast<size_t>(list.length)];
      list.counts[list.length] = next.counts;
      list.slots[list.length++] = next.slots;
    }
    launch_idle(list, idle_on_device_, kIdleRoundNs, side);
    check_cuda(cudaEventRecord(event_of(looked_), side), "looking for free slots");
    check_cuda(cudaEventSynchronize(event_of(looked_)), "looking for free slots");
    std::vector<SlotCounts> rest(slots.begin() + list.length, slots.end());
    for (int i = 0; i < list.length; ++i)
      if (idle_[i] == 0) rest.push_back(slots[static_cast<size_t>(i)]);
    slots = std::move(rest);
  }
}

// How long a copy takes, into a place that nobody reads yet. Rounded to half octaves, so that most differences between
// two runs change nothing.
void ExpertCache::measure() {
  const Held* largest = nullptr;
  for (const auto& [number, held] : layers_)
    if (!held.spares.empty() && (largest == nullptr || held.layer.shapes->bytes() > largest->layer.shapes->bytes()))
      largest = &held;
  if (largest == nullptr) throw std::runtime_error("no place to copy an expert to");
  cudaStream_t side = stream_of(side_);
  const auto start = make_event(cudaEventDefault), end = make_event(cudaEventDefault);
  const CachedLayer& layer = largest->layer;
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    check_cuda(cudaEventRecord(start.get(), side), "measuring a copy");
    layer.shapes->copy(*layer.experts, 0,
                       layer.memory + static_cast<size_t>(largest->spares.back()) * layer.shapes->bytes(),
                       {device_, reinterpret_cast<uintptr_t>(side_)});
    check_cuda(cudaEventRecord(end.get(), side), "measuring a copy");
    check_cuda(cudaEventSynchronize(end.get()), "measuring a copy");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, start.get(), end.get()), "measuring a copy");
    best = best == 0 ? ms * 1e3 : std::min<double>(best, ms * 1e3);
  }
  copy_us_ = std::exp2(std::round(2 * std::log2(std::max(1.0, best))) / 2);
}

}  // namespace ktinject::handoff
