// Runs a plan: one pass of a layer over some tokens.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "moe/plan.hpp"
#include "runtime/counters.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::moe {

// What a thread keeps from pass to pass, so that a warmed-up layer allocates nothing.
struct Workspace {
  Routing routing;
  MoePlan plan;
  runtime::Counters counters;
  std::vector<int> workers;              // of each node
  const Experts* foreseen_of = nullptr;  // whose weights are fetched, and of which experts, by their places
  std::vector<int> foreseen;
  std::vector<float*> results;  // of each shard: [rows, its panels of down * 32]
  std::vector<std::byte*> own;  // of each node: what its workers have to themselves, one after the other
};

// The tokens of a pass.
struct Tokens {
  const std::byte* x;  // [count, hidden] of dtype
  DType dtype;
  const float* weights;  // [count, top_k]
  int count;
  int top_k;
  std::byte* out;  // as x
};

// Notes how many workers each node has.
void count_workers(const runtime::ThreadPool& workers, Workspace& space);
runtime::ThreadPool::Wake wake_for(const MoePlan& plan);

// Experts a token may be sent to; they are gathered on the stack.
inline constexpr int kMostSlots = 64;

class MoeExecutor {
 public:
  // `space` has the routing of these tokens.
  MoeExecutor(const Experts& layer, Workspace& space, runtime::ThreadPool& workers, const Tokens& tokens);

  void run();

 private:
  // What a stage does, and the counters that its task waits for and counts down.
  struct StageRow {
    void (MoeExecutor::*run)(const MoeTask& task, int worker);
    size_t (MoeExecutor::*waits_for)(const MoeTask& task) const;
    size_t (MoeExecutor::*signals)(const MoeTask& task) const;
  };
  static const StageRow kTable[kStages];
  static constexpr size_t kNothing = ~size_t{0};

  // Rounded or quantised activations, a row a token or a (token, expert) pair.
  struct Activations {
    std::byte* data;
    float* scale;              // null where rows are bf16
    int32_t* sums;             // null where the format has none
    gemm::Outliers* outliers;  // the same
    size_t row_bytes;
    int scales;  // of a row
    size_t groups;

    gemm::PackedActivations rows(size_t first, int m) const {
      return {data + first * row_bytes,
              row_bytes,
              m,
              scale == nullptr ? nullptr : scale + first * static_cast<size_t>(scales),
              sums == nullptr ? nullptr : sums + first * groups,
              outliers == nullptr ? nullptr : outliers + first,
              scales};
    }
  };
  enum Slot : size_t;

  // `data` is the first of four slots.
  Activations activations(const gemm::Matrix& matrix, const ActivationBytes& bytes, Slot data);
  void run_round(int round);
  void reserve();
  void execute(int list, int index, int worker);
  runtime::Fetch weights_of(const MoeTask& task) const;

  void convert_inputs(const MoeTask& task, int worker);
  void gather(const MoeTask& task, int worker);
  void compute_gate_up(const MoeTask& task, int worker);
  void quantise(const MoeTask& task, int worker);
  void compute_down(const MoeTask& task, int worker);
  void add_up(const MoeTask& task, int worker);

  size_t nothing(const MoeTask&) const { return kNothing; }
  size_t inputs_done(const MoeTask&) const { return plan_.inputs_done(); }
  size_t gather_done(const MoeTask& task) const { return plan_.gather_done(task.of); }
  // An expert with a single row reads the token's own.
  size_t rows_ready(const MoeTask& task) const {
    return routing_.count_of(routing_.active_at(task.of)) > 1 ? plan_.gather_done(task.of) : plan_.inputs_done();
  }
  size_t gate_up_done(const MoeTask& task) const { return plan_.gate_up_done(task.of); }
  size_t quantise_done(const MoeTask& task) const { return plan_.quantise_done(task.of); }
  size_t inner_ready(const MoeTask& task) const { return is_quantised_ ? quantise_done(task) : gate_up_done(task); }
  size_t chunk_done(const MoeTask& task) const { return plan_.down_done(plan_.chunk_of(task.first)); }
  size_t chunk_ready(const MoeTask& task) const { return plan_.down_done(task.of); }

  void convert(const Activations& to, const gemm::Matrix& matrix, size_t at, const void* values, DType dtype,
               std::byte* out);
  template <class Use>
  void multiply(Projection projection, int expert, const MoeTask& task, const gemm::PackedActivations& all, int worker,
                Use&& use);
  void activate(const float* c, const float* bias, int first, int m, int panel, const gemm::PackedActivations& to);

  size_t shard_of(Projection projection, int panel) const;
  float* results(int worker) const {
    const auto place = static_cast<size_t>(workers_.place_of(worker));
    return reinterpret_cast<float*>(space_.own[static_cast<size_t>(workers_.node_of(worker))] + place * plan_.own);
  }
  std::byte* one_row(int worker) const { return reinterpret_cast<std::byte*>(results(worker)) + MoePlan::kResultBytes; }
  std::byte* kernel_scratch(int worker) const { return one_row(worker) + down_.row_bytes(); }

  const Experts& layer_;
  const ExpertsConfig& config_;
  const gemm::Matrix& gate_up_;
  const gemm::Matrix& down_;
  const gemm::VectorOps& vector_ops_;
  Workspace& space_;
  const Routing& routing_;
  MoePlan& plan_;
  runtime::ThreadPool& workers_;
  const Tokens tokens_;
  const bool is_quantised_;
  const bool has_sums_;

  Activations input_{};
  Activations gathered_{};
  Activations inner_{};
  uint16_t* hidden_ = nullptr;  // [rows, plan_.hidden_stride] bf16: intermediates that are quantised next
};

}  // namespace ktinject::moe
