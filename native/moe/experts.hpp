// One layer's routed experts: packed weights and the forward pass.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "gemm/backends.hpp"
#include "gemm/k_quants.hpp"
#include "gemm/layout.hpp"
#include "gemm/pack.hpp"
#include "gemm/vector_ops.hpp"
#include "runtime/memory.hpp"

namespace ktinject::moe {

struct ExpertsConfig {
  int experts = 0;
  int hidden_size = 0;
  int intermediate_size = 0;
  gemm::Format format = gemm::Format::bf16;       // of gate and up
  gemm::Format down_format = gemm::Format::bf16;  // another one only among K-quants
  int group_size = 0;                             // int4
  bool symmetric = true;                          // int4: no zero points
  bool has_bias = false;
  gemm::Activation activation;
  std::string kernel = "auto";
  int nodes = 0;  // shards; 0: one for each node of the pool
};

// One node's part of the packed weights: of every expert some panels of gate and up, which cuts along the intermediate
// dimension, and some panels of down, which cuts along the outputs. See docs/explanation/numa.md.
struct Shard {
  struct Part {
    int first = 0;
    int panels = 0;
    runtime::Block data;  // [experts, panels] panels
  };
  Part gate_up;
  Part down;
};

enum class Projection { gate, up, down };

// Packed panels that lie together: of each expert the same ones, [experts, panels] panels.
struct PackedRun {
  gemm::Matrix matrix;
  bool is_down = false;
  int first_panel = 0;
  int panels = 0;
  const std::byte* data = nullptr;

  size_t bytes(int experts) const {
    return static_cast<size_t>(experts) * static_cast<size_t>(panels) * matrix.panel_bytes();
  }
};

// Long prompts may take so much working memory, if that is more than what was allowed before.
void allow_workspace(size_t bytes);

// Guesses at the experts of a layer's next token: how often they are right, and whether they are followed. Where most
// are wrong, workers that follow them read for nothing, so guesses are then only tried now and then. Changed within a
// Session.
class Guesses {
 public:
  // Whether to follow the next one.
  bool pay();
  // Of one that was followed: experts that were right, and those of the token.
  void count(size_t right, size_t asked);
  // Of all that were followed so far; from any thread.
  uint64_t right() const { return right_.load(std::memory_order_relaxed); }
  uint64_t asked() const { return asked_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> right_{0}, asked_{0};
  size_t lately_right_ = 0, lately_asked_ = 0;
  int followed_ = 0;  // since they were judged last
  int pause_ = 0;     // so many are not followed
};

// Many threads may use one object: each call waits for its turn at the pool.
class Experts {
 public:
  explicit Experts(ExpertsConfig config);

  const ExpertsConfig& config() const { return config_; }
  // Of gate and up, and of down, whose format may be another one.
  const gemm::Kernels& kernels() const { return kernels_; }
  const gemm::Kernels& down_kernels() const { return down_kernels_; }
  const std::vector<Shard>& shards() const { return shards_; }
  // After allocate(): why the weights could not be asked for on their nodes; then the pinned workers' first touch
  // places them. Empty where all is well or nothing is to be placed.
  std::string not_placed() const;
  // What allocate() takes: packed weights and biases of all experts.
  size_t bytes() const;

  // Once; whoever knows where the memory lies may go on using it. Throws std::bad_alloc.
  void allocate();
  // Packs one projection of one expert; without a gate the first projection is `up`. Throws std::domain_error when a
  // row holds a NaN or an infinity and the format has scales. Where it was loaded before, an error leaves it as it was.
  void load(Projection projection, int expert, const gemm::Source& source);
  // The same from fp8 codes, for fp8 weights: they are kept bit by bit. Throws std::domain_error for NaN and for scales
  // out of range.
  void load_fp8(Projection projection, int expert, const gemm::Fp8Source& source);
  // The same from NVFP4 codes, for nvfp4 weights.
  void load_nvfp4(Projection projection, int expert, const gemm::Nvfp4Source& source);
  // The same from a GGUF file's blocks of the projection's format, for K-quants.
  void load_blocks(Projection projection, int expert, const gemm::KSource& source);
  // The same from integers as they are stored, for int4 and int8 weights.
  void load_integers(Projection projection, int expert, const gemm::IntegerSource& source);
  void load_bias(Projection projection, int expert, const gemm::Source& source);
  // Every expert becomes a copy of this one, for benchmarks: only the packing of one is paid for.
  void repeat(int expert);
  // This expert, wholly loaded, leaves RAM, but for its biases: whoever called has it elsewhere. forward() and unpack()
  // then refuse it. Not while a call uses it, nor after its memory was page-locked.
  void release(int expert);
  bool is_released(int expert) const {
    return released_[static_cast<size_t>(expert)].load(std::memory_order_relaxed) != 0;
  }
  // Bytes of RAM that release() of an expert gives back, at least.
  size_t released_bytes() const;
  // Every projection (and bias) that has not been loaded, as "expert 3 up", at most `limit` of them.
  std::vector<std::string> absent(size_t limit) const;

  // out [n, k] fp32 = the dequantised weight; bias [n].
  void unpack(Projection projection, int expert, float* out) const;
  void unpack_bias(Projection projection, int expert, float* out) const;

  // Before anything is written to packed(): where not_placed() says why, the workers of each node touch its shard,
  // which puts it there.
  void touch();
  // What has been written to packed() and packed_bias() is all of the weights, as load() would have packed them.
  void mark_loaded();

  // Where all packed panels lie, after allocate().
  std::vector<PackedRun> packed() const;
  // [experts, panels * 32] in panel order; null without biases.
  const float* packed_bias(bool down) const {
    return reinterpret_cast<const float*>((down ? down_bias_ : gate_up_bias_).data());
  }

  // Working memory of a pass over so many tokens, about.
  size_t workspace_bytes(size_t tokens, int top_k) const;

  // out [tokens, hidden] = sum over the token's experts of weight * expert(x). Ids below 0 and equal to `experts` are
  // skipped. Throws std::out_of_range for other ids, before anything is written, and std::invalid_argument for experts
  // that are not wholly loaded.
  template <class Id>
  void forward(const void* x, DType dtype, const Id* ids, const float* weights, int tokens, int top_k, void* out) const;

  // A guess at what the next pass of this thread is: one token of these experts, ids [top_k]. Workers that are idle
  // until then bring the weights into their caches, those of the first ids first. Results do not depend on it. Ids that
  // are no expert are left out.
  void fetch_ahead(const int32_t* ids, int top_k) const;
  const Guesses& guesses() const { return guesses_; }

 private:
  friend class MoeExecutor;
  std::vector<std::string> absent_of(int expert) const;
  // Throws where one of these experts is not wholly loaded.
  template <class Id>
  void refuse_unloaded(const Id* ids, size_t slots) const;
  static size_t mark_of(Projection projection, int expert, bool bias) {
    return (static_cast<size_t>(expert) * 3 + static_cast<size_t>(projection)) * 2 + (bias ? 1 : 0);
  }
  uint8_t& mark(Projection projection, int expert, bool bias) { return loaded_[mark_of(projection, expert, bias)]; }
  bool is_loaded(Projection projection, int expert, bool bias) const {
    return loaded_[mark_of(projection, expert, bias)] != 0;
  }
  int rows_of(Projection projection) const;
  int inputs_of(Projection projection) const;
  void check(Projection projection, int expert, int n, int k, bool bias) const;
  // pack(workers, tiles, runs, title) of a weight [n, k].
  template <class Pack>
  void load_as(Projection projection, int expert, int n, int k, const Pack& pack);
  const gemm::Matrix& matrix_of(Projection projection) const {
    return projection == Projection::down ? down_ : gate_up_;
  }
  static const Shard::Part& part_of(const Shard& shard, Projection projection) {
    return projection == Projection::down ? shard.down : shard.gate_up;
  }
  std::vector<gemm::PanelRun> runs_of(Projection projection, int expert) const;
  // Where a panel lies; those of one expert and shard follow each other.
  std::byte* panel(Projection projection, int expert, int index) const;

  ExpertsConfig config_;
  gemm::Kernels kernels_;
  gemm::Kernels down_kernels_;
  const gemm::VectorOps* vector_ops_;
  gemm::Matrix gate_up_;
  gemm::Matrix down_;
  std::vector<Shard> shards_;
  std::string not_placed_;
  bool allocated_ = false;
  runtime::Block gate_up_bias_;  // float [experts, panels * 32], in panel order
  runtime::Block down_bias_;     // float [experts, panels * 32]
  mutable Guesses guesses_;
  std::vector<uint8_t> loaded_;  // [experts][projection][weight, bias]
  size_t absent_ = 0;            // of these that there should be
  // [experts]: was loaded, and is not in RAM. A call looks before it has the pool, while another may load.
  std::vector<std::atomic<uint8_t>> released_;
};

}  // namespace ktinject::moe
