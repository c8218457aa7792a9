// What one pass over some tokens does: its tasks, what each waits for, and the memory that they share.
//
// A plan follows from the routing, the layer's shapes and the number of threads alone; no weight is touched. Six
// stages:
//   1 round or quantise every token once
//   2 put a copy among the rows of each of its experts: tasks of 16 rows, for those lie side by side
//   3 gate and up, with the activation: tasks of (expert, some panels)
//   4 where the format quantises: quantise every row of the intermediate once, as a whole row
//   5 down: tasks of (expert, some panels)
//   6 weighted sum over a token's experts, in the order of its slots, so results do not depend on the number of threads
//
// Of many rows, the results of stage 5 would need more memory than all else, so stages 5 and 6 do some columns at a
// time: each round is a plan of its own, the first one with the stages before. Each weight is still read once.
//
// A round is one list of tasks for the pool, with no barrier between them. A task waits for what it reads: gate and up
// for the inputs, the intermediate for all panels of its expert, down for its expert's intermediate, a sum for the
// columns it adds up. With few rows the columns of stage 5 are worked off in chunks, so that stage 6 follows close
// behind it.
//
// With several shards there is a list for each, run by the workers of its node: its panels of gate and up, its panels
// of down, its columns of the sum. Only the intermediate is read across nodes. Every number comes about in the same way
// whatever the number of shards, so results are the same to the bit.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "moe/experts.hpp"
#include "moe/routing.hpp"

namespace ktinject::moe {

// In the order in which their tasks stand in a list.
enum Stage { kInputs, kGather, kGateUp, kQuantise, kDown, kSum, kStages };

// Some tokens, rows of an expert, panels of an expert, or tokens of a chunk: `of` is the expert's place among the
// active ones, or the chunk.
struct MoeTask {
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

// Panels of down.
struct Columns {
  int first = 0;
  int panels = 0;
};

// What a plan depends on besides the routing.
struct MoeShape {
  const gemm::Matrix& gate_up;
  const gemm::Matrix& down;
  std::span<const Shard> shards;
  std::span<const int> workers;  // of each node of the pool
  int threads;

  bool is_quantised() const { return gemm::has_int8_rows(gate_up.format); }
  bool has_sums() const { return gemm::has_group_sums(gate_up.format); }
};

// Bytes of rounded or quantised rows, their scales, the sums of their groups, and their outliers; 0 where the format
// has none.
struct ActivationBytes {
  size_t data = 0;
  size_t scale = 0;
  size_t sums = 0;
  size_t outliers = 0;
};

struct MoePlan {
  // Bytes of the results of a round.
  static constexpr size_t kMostRoundBytes = size_t{256} << 20;
  // A block of results of a worker: that many rows of a panel.
  static constexpr int kMostResults = 4096;
  static constexpr size_t kResultBytes = size_t{kMostResults} * gemm::kPanel * sizeof(float);

  // Plans a round; the first one says how many there are. Tasks are kept from the plan before where they are the same,
  // as for one token after another.
  void make(const Routing& routing, const MoeShape& shape, int tokens, int round = 0);

  std::vector<std::vector<MoeTask>> lists;
  std::vector<int> sizes;                        // [lists]: tasks
  std::array<std::vector<int>, kStages> begins;  // [stage][lists]: where the stage begins
  std::vector<Chunk> chunks;
  std::vector<Columns> columns;  // [shards]: of this round
  int rounds = 1;
  std::vector<int> signals;  // [counters]: tasks that count it down; those that wait for it begin at zero

  bool caller_converts = false;    // stages 1 and 2 have no tasks: the caller is faster alone
  bool caller_alone = false;       // waking workers would cost more than they do
  bool reads_only = false;         // few rows: reading the weights is what takes the time
  bool is_short = false;           // and these are few bytes: a few workers less will do
  bool quantises_at_once = false;  // stage 4 has no tasks: who ends an expert's stage 3 does it
  bool bypasses_caches = false;    // results of down are written past the caches

  ActivationBytes input;     // a row a token
  ActivationBytes gathered;  // a row a (token, expert) pair, as all that follow
  ActivationBytes inner;
  size_t hidden = 0;            // the intermediate before it is quantised
  size_t hidden_stride = 0;     // its values a row
  std::vector<size_t> results;  // [shards]
  size_t own = 0;               // of a worker: a block of results, a row, the kernel's scratch

  // The counters: of all converted tokens, of a chunk, and of an expert by its place among the active ones.
  size_t inputs_done() const { return 0; }
  size_t down_done(int chunk) const { return 1 + static_cast<size_t>(chunk); }
  size_t gate_up_done(int place) const { return 1 + chunks.size() + static_cast<size_t>(place); }
  size_t quantise_done(int place) const { return gate_up_done(place) + active_; }
  size_t gather_done(int place) const { return quantise_done(place) + active_; }

  Stage stage_of(int list, int index) const {
    int stage = kStages - 1;
    while (index < begins[static_cast<size_t>(stage)][static_cast<size_t>(list)]) --stage;
    return static_cast<Stage>(stage);
  }
  int chunk_of(int panel) const {
    int chunk = 0;
    while (panel >= chunks[static_cast<size_t>(chunk)].first + chunks[static_cast<size_t>(chunk)].panels) ++chunk;
    return chunk;
  }

 private:
  void size_buffers(size_t rows, const MoeShape& shape, int tokens);
  bool is_made_for(const Routing& routing, const MoeShape& shape, int tokens, int round);
  void cut_rounds(const MoeShape& shape, size_t rows, int round);
  void cut_chunks(const MoeShape& shape, size_t rows);
  void begin(Stage stage);
  void add(size_t list, const MoeTask& task, size_t counter);
  void add_inputs(const MoeShape& shape, int tokens);
  void add_gather(const Routing& routing);
  void add_gate_up(const Routing& routing, const MoeShape& shape);
  void add_quantise(const Routing& routing, const MoeShape& shape);
  void add_down(const Routing& routing, const MoeShape& shape);
  void add_sums(const MoeShape& shape, int tokens);
  size_t list_of(size_t shard) const { return lists.size() == 1 ? 0 : shard; }

  size_t active_ = 0;
  std::vector<int> made_for_, wanted_;
};

}  // namespace ktinject::moe
