// The forward pass. Six stages:
//   1 round or quantise every token once
//   2 put a copy among the rows of each of its experts: tasks of 16 rows, for those lie side by side
//   3 gate and up, with the activation: tasks of (expert, some panels)
//   4 where the format quantises: quantise every row of the intermediate once, as a whole row
//   5 down: tasks of (expert, some panels)
//   6 weighted sum over a token's experts, in the order of its slots, so results do not depend on the number of threads
//
// They are one list of tasks for the pool, with no barrier between them. A task waits for what it reads: gate and up
// for the inputs, the intermediate for all panels of its expert, down for its expert's intermediate, a sum for the
// columns it adds up. With few rows the columns of stage 5 are worked off in chunks, so that stage 6 follows close
// behind it.
//
// With several shards there is a list for each, run by the workers of its node: its panels of gate and up, its panels
// of down, its columns of the sum. Only the intermediate is read across nodes. Every number comes about in the same way
// whatever the number of shards, so results are the same to the bit.
#include <xmmintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "moe/experts.hpp"
#include "moe/routing.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"

namespace ktinject::moe {
namespace {

// Slots of the pool's buffers; 0 belongs to packing.
enum Slot : size_t {
  kInput = 1,
  kInputScale,
  kInputSums,
  kGathered,
  kGatheredScale,
  kGatheredSums,
  kHidden,
  kHiddenQ,
  kHiddenScale,
  kHiddenSums,
  kThread,
  kOutput,  // the last: a layer with more shards than nodes takes more slots
};

// Long prompts are cut so that the working memory stays below this; the result is the same.
constexpr size_t kMostWorkspaceBytes = size_t{512} << 20;
// Rows of one expert, and rows times panels, that a kernel is given at once: 512 KiB of results, a part of an L2 cache.
// Not a round number: prompts of a power of two give experts about that many rows, some a few more, and for those few
// the weights would pass once again.
constexpr int kMostRows = 320;
constexpr int kMostResults = 4096;
// Layers with less than this to do are left to the caller: waking workers would cost more.
constexpr size_t kSerialBytes = size_t{128} << 10;
// So many tokens are converted by the caller at once, which is faster than having others wait for others.
constexpr int kTokensAlone = 2;
// Tasks a thread, on average, so that a slow one does not hold up the rest; fewer where a task would read less than the
// second, for each begins with a wait for memory: one token's int4 experts took 7 % longer with tasks of half that.
constexpr int kTasksPerThread = 8;
constexpr size_t kLeastTaskBytes = size_t{100} << 10;
// Up to about so many rows a panel costs what reading its weights costs.
constexpr int kReadRows = 4;
// Up to so many rows, down is worked off in chunks of columns; above, expert by expert, for its rows stay in the
// caches.
constexpr int kChunkedRows = 16;
constexpr int kChunks = 8;
// Results of down that are together longer than this are written past the caches: they would not be there any more when
// they are added up, and a line that is written as a whole need not be read first.
constexpr size_t kPassingBytes = size_t{128} << 20;
// Experts a token may be sent to; they are gathered on the stack.
constexpr int kMostSlots = 64;

// Rounded or quantised activations, a row a token or a (token, expert) pair.
struct Activations {
  std::byte* data;
  float* scale;   // null where rows are bf16
  int32_t* sums;  // null unless int4
  size_t row_bytes;
  size_t groups;

  gemm::PackedActivations rows(size_t first, int m) const {
    return {data + first * row_bytes, row_bytes, m, scale == nullptr ? nullptr : scale + first,
            sums == nullptr ? nullptr : sums + first * groups};
  }
};

// Past the caches; before others may read it, _mm_sfence().
void stream_row(float* to, const float* from) {
  for (int i = 0; i < gemm::kPanel; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
}

}  // namespace

// One pass over at most as many tokens as the workspace holds.
class Forward {
 public:
  Forward(const Experts& layer, RoutingPlan& routing, runtime::ThreadPool& workers, const void* x, DType dtype,
          const float* weights, int tokens, int top_k, void* out)
      : layer_(layer),
        config_(layer.config_),
        gate_up_(layer.gate_up_),
        down_(layer.down_),
        vector_ops_(*layer.vector_ops_),
        routing_(routing),
        workers_(workers),
        x_(static_cast<const std::byte*>(x)),
        dtype_(dtype),
        weights_(weights),
        tokens_(tokens),
        top_k_(top_k),
        out_(static_cast<std::byte*>(out)),
        rows_(routing.expert.size()),
        is_quantised_(gemm::has_int8_rows(config_.format)),
        has_sums_(config_.format == gemm::Format::int4),
        is_passing_(rows_ * static_cast<size_t>(down_.panels) * gemm::kPanel * sizeof(float) > kPassingBytes) {}

  void run();

 private:
  static constexpr size_t kResultBytes = size_t{kMostResults} * gemm::kPanel * sizeof(float);

  Activations activations(const gemm::Matrix& matrix, size_t count, Slot data, Slot scale, Slot sums);
  void reserve();
  void plan();
  template <class Add>
  void plan_panels(Projection projection, const Shard& shard, int first, int panels, int workers, Add&& add);

  void convert_inputs(const LayerTask& task);
  void gather(const LayerTask& task);
  void compute_gate_up(const LayerTask& task, int worker);
  void quantise(const LayerTask& task, int worker);
  void compute_down(const LayerTask& task, int worker);
  void add_up(const LayerTask& task);

  // What is counted: tasks that convert tokens, then for each chunk tasks of down, for each active expert tasks of gate
  // and up, for each those that quantise, and for each those that gather.
  size_t inputs_left() const { return 0; }
  size_t down_left(int chunk) const { return 1 + static_cast<size_t>(chunk); }
  size_t gate_up_left(int place) const { return 1 + routing_.chunks.size() + static_cast<size_t>(place); }
  size_t quantise_left(int place) const { return gate_up_left(place) + routing_.active.size(); }
  size_t gather_left(int place) const { return quantise_left(place) + routing_.active.size(); }
  // False if the call is ending without this.
  bool await(size_t counter, Stage stage, int worker) {
    const std::atomic<int>& left = routing_.counters[counter];
    return workers_.await([&] { return left.load(std::memory_order_acquire) == 0; },
                          routing_.limit[static_cast<size_t>(stage)], worker);
  }
  void done(size_t counter) { routing_.counters[counter].fetch_sub(1, std::memory_order_acq_rel); }

  void convert(const Activations& to, const gemm::Matrix& matrix, size_t at, const void* values, DType dtype,
               std::byte* out);
  template <class Use>
  void multiply(Projection projection, const LayerTask& task, const gemm::PackedActivations& all, int worker,
                Use&& use);

  // The groups of up to 16 rows of every expert that has more than one.
  template <class Use>
  void for_groups(Use&& use) const {
    for (size_t place = 0; place < routing_.active.size(); ++place) {
      const int count = count_of(routing_.active[place]);
      for (int first = 0; count > 1 && first < count; first += gemm::kTile)
        use(LayerTask{static_cast<int>(place), first, std::min(gemm::kTile, count - first)});
    }
  }
  LayerTask of_expert(LayerTask task) const {
    task.of = routing_.active[static_cast<size_t>(task.of)];
    return task;
  }

  int count_of(int expert) const { return routing_.count[static_cast<size_t>(expert)]; }
  size_t start_of(int expert) const { return static_cast<size_t>(routing_.start[static_cast<size_t>(expert)]); }
  int cost_of(int expert) const { return std::max(kReadRows, count_of(expert)); }
  size_t shard_of(Projection projection, int panel) const {
    size_t shard = 0;
    for (; shard + 1 < layer_.shards_.size(); ++shard) {
      const Shard::Part& part = Experts::part_of(layer_.shards_[shard], projection);
      if (panel < part.first + part.panels) break;
    }
    return shard;
  }
  int chunk_of(int panel) const {
    int chunk = 0;
    while (panel >=
           routing_.chunks[static_cast<size_t>(chunk)].first + routing_.chunks[static_cast<size_t>(chunk)].panels)
      ++chunk;
    return chunk;
  }
  float* results(int worker) const {
    const auto place = static_cast<size_t>(workers_.place_of(worker));
    return reinterpret_cast<float*>(routing_.own[static_cast<size_t>(workers_.node_of(worker))] + place * own_bytes_);
  }
  std::byte* one_row(int worker) const { return reinterpret_cast<std::byte*>(results(worker)) + kResultBytes; }
  std::byte* kernel_scratch(int worker) const { return one_row(worker) + down_.row_bytes(); }

  const Experts& layer_;
  const ExpertsConfig& config_;
  const gemm::Matrix& gate_up_;
  const gemm::Matrix& down_;
  const gemm::VectorOps& vector_ops_;
  RoutingPlan& routing_;
  runtime::ThreadPool& workers_;
  const std::byte* const x_;
  const DType dtype_;
  const float* const weights_;
  const int tokens_;
  const int top_k_;
  std::byte* const out_;
  const size_t rows_;
  const bool is_quantised_;
  const bool has_sums_;
  const bool is_passing_;  // results of down

  Activations input_{};
  Activations gathered_{};
  Activations inner_{};
  uint16_t* hidden_ = nullptr;  // [rows, hidden_stride_] bf16: intermediates that are quantised next
  size_t hidden_stride_ = 0;
  size_t own_bytes_ = 0;  // of a worker: a block of results, a row, the kernel's scratch
};

Activations Forward::activations(const gemm::Matrix& matrix, size_t count, Slot data, Slot scale, Slot sums) {
  const auto groups = has_sums_ ? static_cast<size_t>(matrix.groups()) : 0;
  return {workers_.buffer(data, count * matrix.row_bytes()),
          is_quantised_ ? reinterpret_cast<float*>(workers_.buffer(scale, count * sizeof(float))) : nullptr,
          has_sums_ ? reinterpret_cast<int32_t*>(workers_.buffer(sums, count * groups * sizeof(int32_t))) : nullptr,
          matrix.row_bytes(), groups};
}

void Forward::reserve() {
  input_ = activations(gate_up_, static_cast<size_t>(tokens_), kInput, kInputScale, kInputSums);
  gathered_ = activations(gate_up_, rows_, kGathered, kGatheredScale, kGatheredSums);
  inner_ = activations(down_, rows_, kHiddenQ, kHiddenScale, kHiddenSums);
  hidden_stride_ = static_cast<size_t>(gemm::round_up(config_.intermediate_size, gemm::kPanel));
  if (is_quantised_)
    hidden_ = reinterpret_cast<uint16_t*>(workers_.buffer(kHidden, rows_ * hidden_stride_ * sizeof(uint16_t)));
  const size_t nodes = workers_.nodes().size();
  routing_.results.resize(layer_.shards_.size());
  routing_.own.resize(nodes);
  for (size_t shard = 0; shard < layer_.shards_.size(); ++shard) {
    const size_t columns = static_cast<size_t>(layer_.shards_[shard].down.panels) * gemm::kPanel;
    routing_.results[shard] = reinterpret_cast<float*>(
        workers_.buffer(kOutput + shard / nodes, rows_ * columns * sizeof(float), shard % nodes));
  }
  own_bytes_ = kResultBytes + down_.row_bytes() + std::max(gemm::scratch_bytes(gate_up_), gemm::scratch_bytes(down_));
  for (size_t node = 0; node < nodes; ++node)
    routing_.own[node] =
        workers_.buffer(kThread, own_bytes_ * static_cast<size_t>(workers_.workers_of(static_cast<int>(node))), node);
}

// Cuts panels [first, first + panels) of every active expert into tasks; the shard's whole part is for `workers`.
template <class Add>
void Forward::plan_panels(Projection projection, const Shard& shard, int first, int panels, int workers, Add&& add) {
  size_t all = 0;
  for (const int expert : routing_.active) all += static_cast<size_t>(cost_of(expert));
  all *= static_cast<size_t>(Experts::part_of(shard, projection).panels);
  const size_t each = all / static_cast<size_t>(workers);
  const size_t least = kReadRows * kLeastTaskBytes / layer_.matrix_of(projection).panel_bytes();
  const size_t work = std::max(each / kTasksPerThread, std::min(each, least));
  for (size_t place = 0; place < routing_.active.size(); ++place) {
    const int size = std::clamp(static_cast<int>(work) / cost_of(routing_.active[place]), 1, panels);
    // As even as possible.
    const int pieces = (panels + size - 1) / size;
    for (int i = 0; i < pieces; ++i) {
      const int begin = panels * i / pieces, end = panels * (i + 1) / pieces;
      add(LayerTask{static_cast<int>(place), first + begin, end - begin});
    }
  }
}

void Forward::plan() {
  const std::vector<Shard>& shards = layer_.shards_;
  const size_t lists = shards.size() <= workers_.nodes().size() ? shards.size() : 1;
  // With a row for each expert, tasks depend on how many there are and not on which: one token after another has the
  // same.
  auto& wanted = routing_.wanted;
  wanted.assign({tokens_, static_cast<int>(routing_.active.size()), static_cast<int>(rows_), workers_.threads(),
                 static_cast<int>(lists), is_quantised_, static_cast<int>(gate_up_.panel_bytes()),
                 static_cast<int>(down_.panel_bytes())});
  for (const Shard& shard : shards)
    for (const Shard::Part* part : {&shard.gate_up, &shard.down})
      wanted.insert(wanted.end(), {part->first, part->panels});
  if (rows_ == routing_.active.size() && wanted == routing_.planned) return routing_.counters.begin();
  routing_.planned.clear();
  auto list_of = [&](size_t shard) { return lists == 1 ? size_t{0} : shard; };
  auto workers_for = [&](size_t shard) {
    return lists == 1 ? workers_.threads() : std::max(1, workers_.workers_of(static_cast<int>(shard)));
  };
  routing_.lists.resize(lists);
  for (auto& list : routing_.lists) list.clear();
  auto begin_stage = [&](Stage stage) {
    auto& limit = routing_.limit[static_cast<size_t>(stage)];
    limit.resize(lists);
    for (size_t i = 0; i < lists; ++i) limit[i] = static_cast<int>(routing_.lists[i].size());
  };

  routing_.chunks.clear();
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const Shard::Part& part = shards[shard].down;
    if (part.panels == 0) continue;
    const int chunks = rows_ > kChunkedRows ? 1 : std::min(part.panels, kChunks);
    for (int i = 0; i < chunks; ++i) {
      const int begin = part.panels * i / chunks, end = part.panels * (i + 1) / chunks;
      routing_.chunks.push_back({static_cast<int>(shard), part.first + begin, end - begin});
    }
  }
  Counters& counters = routing_.counters;
  counters.plan(1 + routing_.chunks.size() + 3 * routing_.active.size());
  auto add = [&](size_t list, const LayerTask& task, size_t counter) {
    routing_.lists[list].push_back(task);
    counters.add(counter);
  };

  begin_stage(kInputs);
  if (tokens_ > kTokensAlone) {
    const int pieces = std::min(tokens_, workers_.threads() * kTasksPerThread);
    for (int i = 0; i < pieces; ++i) {
      const int first = static_cast<int>(int64_t{tokens_} * i / pieces);
      const int end = static_cast<int>(int64_t{tokens_} * (i + 1) / pieces);
      add(static_cast<size_t>(i) % lists, {0, first, end - first}, inputs_left());
    }
  }
  begin_stage(kGather);
  size_t next = 0;
  if (tokens_ > kTokensAlone)
    for_groups([&](const LayerTask& task) { add(next++ % lists, task, gather_left(task.of)); });
  begin_stage(kGateUp);
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const Shard::Part& part = shards[shard].gate_up;
    if (part.panels > 0)
      plan_panels(Projection::up, shards[shard], part.first, part.panels, workers_for(shard),
                  [&](const LayerTask& task) { add(list_of(shard), task, gate_up_left(task.of)); });
  }
  begin_stage(kQuantise);
  if (is_quantised_) {
    const int size = std::clamp(static_cast<int>(rows_) / (workers_.threads() * kTasksPerThread), 1, gemm::kTile);
    next = 0;
    for (int place = 0; place < static_cast<int>(routing_.active.size()); ++place) {
      const int count = count_of(routing_.active[static_cast<size_t>(place)]);
      for (int first = 0; first < count; first += size)
        add(next++ % lists, {place, first, std::min(size, count - first)}, quantise_left(place));
    }
  }
  begin_stage(kDown);
  for (size_t i = 0; i < routing_.chunks.size(); ++i) {
    const Chunk& chunk = routing_.chunks[i];
    const auto shard = static_cast<size_t>(chunk.shard);
    plan_panels(Projection::down, shards[shard], chunk.first, chunk.panels, workers_for(shard),
                [&](const LayerTask& task) { add(list_of(shard), task, down_left(static_cast<int>(i))); });
  }
  begin_stage(kSum);
  const int sums = workers_.threads() * kTasksPerThread;
  const int pieces = std::clamp(sums / std::max(1, static_cast<int>(routing_.chunks.size())), 1, tokens_);
  for (size_t i = 0; i < routing_.chunks.size(); ++i)
    for (int piece = 0; piece < pieces; ++piece) {
      const int first = static_cast<int>(int64_t{tokens_} * piece / pieces);
      const int end = static_cast<int>(int64_t{tokens_} * (piece + 1) / pieces);
      routing_.lists[list_of(static_cast<size_t>(routing_.chunks[i].shard))].push_back(
          {static_cast<int>(i), first, end - first});
    }
  routing_.counts.resize(lists);
  for (size_t i = 0; i < lists; ++i) routing_.counts[i] = static_cast<int>(routing_.lists[i].size());
  counters.begin();
  routing_.planned = wanted;
}

void Forward::run() {
  reserve();
  plan();
  if (tokens_ <= kTokensAlone) {
    convert_inputs({0, 0, tokens_});
    for_groups([&](const LayerTask& task) { gather(of_expert(task)); });
  }
  const size_t active = routing_.active.size();
  const size_t active_bytes = active * (gate_up_.bytes() + down_.bytes());
  const bool alone = active_bytes * std::max<size_t>(1, rows_ / std::max<size_t>(1, active) / kReadRows) < kSerialBytes;
  workers_.parallel_lists(
      routing_.counts,
      [&](int list, int index, int worker) {
        const LayerTask& planned = routing_.lists[static_cast<size_t>(list)][static_cast<size_t>(index)];
        auto before = [&](Stage stage) {
          return index < routing_.limit[static_cast<size_t>(stage)][static_cast<size_t>(list)];
        };
        const int of = planned.of;
        const LayerTask task = before(kGather) || !before(kSum) ? planned : of_expert(planned);
        if (before(kGather)) {
          convert_inputs(task);
          done(inputs_left());
        } else if (before(kGateUp)) {
          if (!await(inputs_left(), kGather, worker)) return;
          gather(task);
          done(gather_left(of));
        } else if (before(kQuantise)) {
          if (!await(count_of(task.of) > 1 ? gather_left(of) : inputs_left(), kGateUp, worker)) return;
          compute_gate_up(task, worker);
          done(gate_up_left(of));
        } else if (before(kDown)) {
          if (!await(gate_up_left(of), kQuantise, worker)) return;
          quantise(task, worker);
          done(quantise_left(of));
        } else if (before(kSum)) {
          if (!await(is_quantised_ ? quantise_left(of) : gate_up_left(of), kDown, worker)) return;
          compute_down(task, worker);
          done(down_left(chunk_of(task.first)));
        } else {
          if (!await(down_left(of), kSum, worker)) return;
          add_up(task);
        }
      },
      runtime::ThreadPool::Steal::yes, alone ? runtime::ThreadPool::Wake::none : runtime::ThreadPool::Wake::all);
}

// Rounds or quantises `values` to the contiguous row `out`, and its scale and sums to those of row `at`.
void Forward::convert(const Activations& to, const gemm::Matrix& matrix, size_t at, const void* values, DType dtype,
                      std::byte* out) {
  if (!is_quantised_)
    return vector_ops_.round_row(values, dtype, matrix.k, matrix.padded_k(), reinterpret_cast<uint16_t*>(out));
  const int zero_point = config_.format == gemm::Format::int8 ? 128 : 0;
  to.scale[at] =
      vector_ops_.quantise_row(values, dtype, matrix.k, matrix.padded_k(), zero_point, matrix.group_size,
                               reinterpret_cast<uint8_t*>(out), has_sums_ ? to.sums + at * to.groups : nullptr);
}

void Forward::convert_inputs(const LayerTask& task) {
  const size_t x_bytes = static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype_);
  for (int token = task.first; token < task.first + task.count; ++token) {
    const auto at = static_cast<size_t>(token);
    convert(input_, gate_up_, at, x_ + at * x_bytes, dtype_, input_.data + at * input_.row_bytes);
  }
}

// Up to 16 rows of an expert, side by side: written from one end to the other by one thread. (An expert with a single
// row reads the token's own.)
void Forward::gather(const LayerTask& task) {
  const size_t first = start_of(task.of) + static_cast<size_t>(task.first);
  const int* token = routing_.token.data() + first;
  std::byte* to = gathered_.data + first * gathered_.row_bytes;
  for (size_t at = 0; at < gathered_.row_bytes; at += 64)
    for (int row = 0; row < task.count; ++row, to += 64)
      std::memcpy(to, input_.data + static_cast<size_t>(token[row]) * input_.row_bytes + at, 64);
  for (int row = 0; row < task.count; ++row) {
    const size_t here = first + static_cast<size_t>(row), there = static_cast<size_t>(token[row]);
    if (is_quantised_) gathered_.scale[here] = input_.scale[there];
    if (has_sums_)
      std::memcpy(gathered_.sums + here * gathered_.groups, input_.sums + there * input_.groups,
                  input_.groups * sizeof(int32_t));
  }
}

// Calls use(first row of the expert, rows, panel, c) for the results of a task, c [rows, 32], piece by piece.
template <class Use>
void Forward::multiply(Projection projection, const LayerTask& task, const gemm::PackedActivations& all, int worker,
                       Use&& use) {
  const gemm::Matrix& matrix = layer_.matrix_of(projection);
  const gemm::Kernel& kernel = layer_.kernels_(all.m);
  float* c = results(worker);
  const int pieces = (all.m + kMostRows - 1) / kMostRows;
  const int size = gemm::round_up((all.m + pieces - 1) / pieces, 2 * gemm::kTile);
  const int most = std::max(1, kMostResults / size);
  for (int p = task.first; p < task.first + task.count; p += most)
    for (int first = 0; first < all.m; first += size) {
      // A run of whole groups of 16 rows is laid out like rows of its own.
      const int m = std::min(size, all.m - first), panels = std::min(most, task.first + task.count - p);
      const gemm::PackedActivations x{
          all.group(first), all.row_bytes, m, all.scale == nullptr ? nullptr : all.scale + first,
          all.group_sum == nullptr ? nullptr
                                   : all.group_sum + static_cast<size_t>(first) * static_cast<size_t>(matrix.groups())};
      auto take = [&](int panel, int row, int count, const float* results) {
        use(first + row, count, p + panel, results);
      };
      const gemm::Epilogue epilogue{[](void* context, int panel, int row, int count, const float* results) {
                                      (*static_cast<decltype(take)*>(context))(panel, row, count, results);
                                    },
                                    &take};
      kernel.multiply(matrix, layer_.panel(projection, task.of, p), panels, x, c, kernel_scratch(worker),
                      kernel.backend->has_epilogue ? &epilogue : nullptr);
      if (!kernel.backend->has_epilogue)
        for (int panel = 0; panel < panels; ++panel)
          take(panel, 0, m, c + static_cast<size_t>(panel) * static_cast<size_t>(m) * gemm::kPanel);
    }
}

// bf16 results are the next product's rows at once; the others are quantised first, as whole rows.
void Forward::compute_gate_up(const LayerTask& task, int worker) {
  const int columns = config_.activation.has_gate ? gemm::kTile : gemm::kPanel;
  const auto* biases = reinterpret_cast<const float*>(layer_.gate_up_bias_.data());
  const size_t start = start_of(task.of);
  const int count = count_of(task.of);
  const gemm::PackedActivations x =
      count == 1 ? input_.rows(static_cast<size_t>(routing_.token[start]), 1) : gathered_.rows(start, count);
  multiply(Projection::up, task, x, worker, [&](int first, int m, int p, const float* c) {
    const auto panel = static_cast<size_t>(task.of) * static_cast<size_t>(gate_up_.panels) + static_cast<size_t>(p);
    const float* bias = biases == nullptr ? nullptr : biases + panel * gemm::kPanel;
    const int column = p * columns;
    if (is_quantised_) {
      uint16_t* h = hidden_ + (start + static_cast<size_t>(first)) * hidden_stride_ + static_cast<size_t>(column);
      vector_ops_.activate(config_.activation, c, bias, m, h, hidden_stride_);
      return;
    }
    const gemm::PackedActivations to = inner_.rows(start, count);
    for (int row = first; row < first + m;) {
      const int group = row / gemm::kTile * gemm::kTile, height = to.group_rows(group);
      const int rows = std::min(group + height, first + m) - row;
      auto* h = reinterpret_cast<uint16_t*>(const_cast<std::byte*>(to.group(group)) +
                                            static_cast<size_t>(column / 32 * height + row - group) * 64) +
                column % 32;
      vector_ops_.activate(config_.activation, c + (row - first) * gemm::kPanel, bias, rows, h, 32);
      // A half block at the end belongs to no panel. The weights there are zero, but zero times a stale NaN is not.
      if (p + 1 == gate_up_.panels && column % 32 == 0 && columns == gemm::kTile)
        for (int r = 0; r < rows; ++r) std::fill(h + r * 32 + gemm::kTile, h + r * 32 + 32, uint16_t{0});
      row += rows;
    }
  });
}

void Forward::quantise(const LayerTask& task, int worker) {
  const size_t start = start_of(task.of);
  for (int row = task.first; row < task.first + task.count; ++row) {
    const size_t at = start + static_cast<size_t>(row);
    convert(inner_, down_, at, hidden_ + at * hidden_stride_, DType::bf16, one_row(worker));
    gemm::place_row(inner_.data + start * inner_.row_bytes, inner_.row_bytes, count_of(task.of), row, one_row(worker));
  }
}

void Forward::compute_down(const LayerTask& task, int worker) {
  const size_t shard = shard_of(Projection::down, task.first);
  const Shard::Part& part = layer_.shards_[shard].down;
  const size_t stride = static_cast<size_t>(part.panels) * gemm::kPanel;
  const size_t start = start_of(task.of);
  multiply(Projection::down, task, inner_.rows(start, count_of(task.of)), worker,
           [&](int first, int m, int p, const float* c) {
             float* to = routing_.results[shard] + (start + static_cast<size_t>(first)) * stride +
                         static_cast<size_t>(p - part.first) * gemm::kPanel;
             for (int row = 0; row < m; ++row, c += gemm::kPanel, to += stride) {
               if (is_passing_) stream_row(to, c);
               else std::memcpy(to, c, gemm::kPanel * sizeof(float));
             }
           });
  if (is_passing_) _mm_sfence();
}

void Forward::add_up(const LayerTask& task) {
  const Chunk& chunk = routing_.chunks[static_cast<size_t>(task.of)];
  const Shard::Part& part = layer_.shards_[static_cast<size_t>(chunk.shard)].down;
  const size_t stride = static_cast<size_t>(part.panels) * gemm::kPanel;
  const float* y =
      routing_.results[static_cast<size_t>(chunk.shard)] + static_cast<size_t>(chunk.first - part.first) * gemm::kPanel;
  const auto* down_bias = reinterpret_cast<const float*>(layer_.down_bias_.data());
  const int column = chunk.first * gemm::kPanel;
  const int columns = std::min(chunk.panels * gemm::kPanel, config_.hidden_size - column);
  for (int token = task.first; token < task.first + task.count; ++token) {
    const float* terms[kMostSlots];
    const float* biases[kMostSlots];
    float weight[kMostSlots];
    int used = 0;
    for (int slot = 0; slot < top_k_; ++slot) {
      const auto at = static_cast<size_t>(token * top_k_ + slot);
      if (routing_.row[at] < 0) continue;
      const auto row = static_cast<size_t>(routing_.row[at]);
      terms[used] = y + row * stride;
      if (down_bias != nullptr)
        biases[used] = down_bias +
                       static_cast<size_t>(routing_.expert[row]) * static_cast<size_t>(down_.panels) * gemm::kPanel +
                       column;
      weight[used++] = weights_[at];
    }
    const size_t to =
        static_cast<size_t>(token) * static_cast<size_t>(config_.hidden_size) + static_cast<size_t>(column);
    vector_ops_.combine(terms, down_bias == nullptr ? nullptr : biases, weight, used, columns, dtype_,
                        out_ + to * dtype_bytes(dtype_));
  }
}

template <class Id>
void Experts::forward(const void* x, DType dtype, const Id* ids, const float* weights, int tokens, int top_k,
                      void* out) const {
  if (top_k < 1 || top_k > kMostSlots)
    throw std::invalid_argument("experts a token: found " + std::to_string(top_k) + "; allowed: 1 to " +
                                std::to_string(kMostSlots));
  for (size_t i = 0; i < static_cast<size_t>(tokens) * static_cast<size_t>(top_k); ++i)
    if (ids[i] < -1 || ids[i] > config_.experts)
      throw std::out_of_range("token " + std::to_string(i / static_cast<size_t>(top_k)) + " is routed to expert " +
                              std::to_string(ids[i]) + "; allowed: 0 to " + std::to_string(config_.experts - 1) +
                              ", or -1 or " + std::to_string(config_.experts) + " for none");

  const size_t row_bytes =
      gate_up_.row_bytes() +
      static_cast<size_t>(top_k) *
          (gate_up_.row_bytes() + static_cast<size_t>(down_.panels) * gemm::kPanel * sizeof(float) +
           static_cast<size_t>(config_.intermediate_size) * 3);
  const int most = std::max(64, static_cast<int>(std::min<size_t>(kMostWorkspaceBytes / row_bytes, 1u << 20)));
  // As even as possible: each pass reads the weights, and a few tokens at the end would do so for little.
  const auto passes = static_cast<int>((int64_t{tokens} + most - 1) / most);
  static thread_local RoutingPlan routing;  // keeps its capacity from call to call
  for (int pass = 0; pass < passes; ++pass) {
    const runtime::Session workers;  // given back in between: others wait for a pass, not for a whole prompt
    if (!allocated_) throw std::invalid_argument("forward before allocate()");
    const int first = static_cast<int>(int64_t{tokens} * pass / passes);
    const int take = static_cast<int>(int64_t{tokens} * (pass + 1) / passes) - first;
    const runtime::TraceSpan span(this, take);
    const size_t slots = static_cast<size_t>(first) * static_cast<size_t>(top_k);
    routing.sort(ids + slots, take, top_k, config_.experts);
    const size_t offset = static_cast<size_t>(first) * static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype);
    Forward(*this, routing, *workers, static_cast<const std::byte*>(x) + offset, dtype, weights + slots, take, top_k,
            static_cast<std::byte*>(out) + offset)
        .run();
  }
}

template void Experts::forward(const void*, DType, const int32_t*, const float*, int, int, void*) const;
template void Experts::forward(const void*, DType, const int64_t*, const float*, int, int, void*) const;

}  // namespace ktinject::moe
