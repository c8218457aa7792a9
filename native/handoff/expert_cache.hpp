// The experts on a GPU as a cache: which of them lie there changes with what is used, between the steps of a model.
//
//   stream of the model   ── boundary ── step k ────────────── boundary ── step k + 1 ─────
//                             │ counts    reads the table          ▲ changes the table
//   thread of the cache       └──► policy ──► copies to spare places ┘
//
// A boundary is one kernel: it puts the experts that were copied meanwhile into the table of places, takes others off
// it, and writes the counts of uses to the host. Both happen between two steps in the stream's order, so a step sees
// one table, also a captured one. What is decided takes effect at the next boundary, however long copies take. It
// depends on the counts, and on how long a copy takes, which is measured once and rounded to half octaves: so the same
// steps see the same tables, except in another run whose link is slower or faster by so much, or close to where
// rounding divides. Tables decide which experts the GPU computes, which rounds otherwise than the CPU. An expert that
// leaves stays in use until then, since each layer has spare places to copy to. Its place becomes a spare one; it is
// written to when every submit that may have seen the expert there has ended, on any stream.
//
// Where exchanges pay in no layer, most boundaries are left out: the thread would take a core from the workers that
// compute the experts.
//
// Copies are bounded by a share of the time that a step takes, estimated from its uses.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/resident.hpp"
#include "handoff/channel.hpp"
#include "handoff/reuse_policy.hpp"
#include "moe/experts.hpp"

namespace ktinject::handoff {

// A layer that takes part. The caller keeps all of it until leave() has returned.
struct CachedLayer {
  const moe::Experts* experts = nullptr;  // page-locked, else copies hold up the cache's thread
  const cuda::Resident* shapes = nullptr;
  const Channel* channel = nullptr;   // of all submits of the layer from this device
  int32_t* places = nullptr;          // [experts] on the device: expert → place, or -1
  const uint32_t* traffic = nullptr;  // [experts] on the device: uses so far
  std::byte* memory = nullptr;        // [resident + spares] experts on the device
};

// What a layer's cache has done.
struct CacheCounts {
  uint64_t uses = 0;     // of experts, in steps that were counted
  uint64_t hits = 0;     // of them, of experts that were on the GPU
  uint64_t fetches = 0;  // experts copied
  uint64_t bytes = 0;    // of these copies
  float gain = 0;        // uses that an exchange saves, lately
  bool moves = false;    // whether that is worth copying
};

class ExpertCache {
 public:
  // Throws std::runtime_error.
  explicit ExpertCache(int device);
  ~ExpertCache();
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;

  // resident: the experts by place; behind them are `spares` spare places. Returns a number for the layer.
  int join(const CachedLayer& layer, const std::vector<int>& resident, int spares);
  // The layer is gone. Waits for copies to it.
  void leave(int layer);
  // A boundary between two steps, in `stream`. Does nothing while the stream is captured. Throws std::runtime_error if
  // the cache's thread failed since the last call: from then on the experts stay where they are.
  void step(uintptr_t stream);
  // The place of each expert of a layer, or -1.
  std::vector<int> places(int layer) const;
  // The same; it is there for the work that `stream` gets from now on. What lies there stays until release(), and until
  // the work that is in `stream` by then has ended.
  std::vector<int> hold(int layer, uintptr_t stream);
  void release(uintptr_t stream);
  CacheCounts counts(int layer) const;

 private:
  struct Held {
    CachedLayer layer;
    ReusePolicy policy;
    std::vector<int> place_of;   // as the table will be when all work queued so far has run
    std::vector<int> spares;     // places that nobody uses
    std::vector<uint32_t> seen;  // counts of the boundary before
    size_t at = 0;               // of its counts in counted_
    CacheCounts counts;
  };
  struct Move {
    int layer;
    Exchange exchange;
    int place;
  };
  void work();
  void decide();
  void copy();
  void await_thread(std::unique_lock<std::mutex>& lock);
  void make_room();
  void await_idle(std::vector<SlotCounts> slots);
  void measure();
  int most_moves(uint64_t uses) const;

  const int device_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, Held> layers_;  // by number; in this order moves of equal use are chosen
  int next_ = 0;
  std::vector<Move> moves_;  // whose copies are in side_, for the next boundary
  int holds_ = 0;
  bool busy_ = false;  // the thread has a boundary to work on
  bool ending_ = false;
  std::string failure_;
  bool stopped_ = false;
  int watched_ = 0;  // boundaries in a row at which no layer's exchanges paid
  int rests_ = 0;    // boundaries that are left out
  bool rested_ = false;
  double copy_us_ = 0;  // of one expert
  size_t most_counts_ = 0;
  uint32_t* counted_ = nullptr;  // mapped: counts of all layers
  uint32_t* counted_on_device_ = nullptr;
  uint32_t* idle_ = nullptr;  // mapped: which slots have been free
  uint32_t* idle_on_device_ = nullptr;
  void *side_ = nullptr, *stepped_ = nullptr, *copied_ = nullptr, *looked_ = nullptr;  // a stream and three events
  std::thread thread_;
};

}  // namespace ktinject::handoff
