// Which token goes to which expert, and the tasks that follow from it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

namespace ktinject::moe {

// Stages of a layer, in the order in which their tasks stand in a list.
enum Stage { kInputs, kGather, kGateUp, kQuantise, kDown, kSum, kStages };

// Some tokens, rows of an expert, panels of an expert, or tokens of a chunk: `of` is the expert's place among the
// active ones, or the chunk.
struct LayerTask {
  int of;
  int first;
  int count;
};

// Columns of the output whose sums wait for the same tasks: panels of down of one shard.
struct Chunk {
  int shard;
  int first;
  int panels;
};

// Tasks that are still to be done before another can start, each counter a thing that is waited for. Each has a cache
// line: all threads count down, and others look on.
class Counters {
 public:
  void plan(size_t count) { planned_.assign(count, 0); }
  void add(size_t index) { ++planned_[index]; }
  void begin() {
    if (planned_.size() > capacity_) {
      left_ = std::make_unique<Counter[]>(planned_.size());
      capacity_ = planned_.size();
    }
    for (size_t i = 0; i < planned_.size(); ++i) left_[i].left.store(planned_[i], std::memory_order_relaxed);
  }
  std::atomic<int>& operator[](size_t index) { return left_[index].left; }

 private:
  struct Counter {
    alignas(64) std::atomic<int> left{0};
  };
  std::vector<int> planned_;
  std::unique_ptr<Counter[]> left_;
  size_t capacity_ = 0;
};

// As lists: rows sorted by expert.
struct RoutingPlan {
  std::vector<int> count;   // [experts]
  std::vector<int> start;   // [experts]
  std::vector<int> expert;  // [rows]: expert of a sorted row
  std::vector<int> token;   // [rows]: token of a sorted row
  std::vector<int> row;     // [tokens, top_k]: sorted row of a slot, or -1
  std::vector<int> active;  // experts with rows, most rows first
  std::vector<std::vector<LayerTask>> lists;
  std::vector<Chunk> chunks;
  std::vector<int> counts;                      // [lists]: all tasks
  std::array<std::vector<int>, kStages> limit;  // [stage][lists]: where the stage begins
  Counters counters;
  std::vector<int> planned, wanted;  // what lists were made for, and what they are to be made for
  std::vector<float*> results;       // of each shard: [rows, its panels of down * 32]
  std::vector<std::byte*> own;       // of each node: what its workers have to themselves, one after the other

  // Slots [tokens * top_k] whose id is none of the experts' are left out.
  template <class Id>
  void sort(const Id* ids, int tokens, int top_k, int experts);
};

}  // namespace ktinject::moe
