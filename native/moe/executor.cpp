#include "moe/executor.hpp"

#include <xmmintrin.h>

#include <algorithm>
#include <cstring>

#include "gemm/outlier_rows.hpp"

namespace ktinject::moe {
namespace {

// Rows of one expert, and rows times panels, that a kernel is given at once: 512 KiB of results, a part of an L2 cache.
// Not a round number: prompts of a power of two give experts about that many rows, some a few more, and for those few
// the weights would pass once again.
constexpr int kMostRows = 320;
static_assert(kMostRows <= gemm::OutlierRows::kMost);

// Past the caches; before others may read it, _mm_sfence().
void stream_row(float* to, const float* from) {
  for (int i = 0; i < gemm::kPanel; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
}

}  // namespace

void count_workers(const runtime::ThreadPool& workers, Workspace& space) {
  space.workers.resize(workers.nodes().size());
  for (size_t node = 0; node < space.workers.size(); ++node)
    space.workers[node] = workers.workers_of(static_cast<int>(node));
}

runtime::ThreadPool::Wake wake_for(const MoePlan& plan) {
  using Wake = runtime::ThreadPool::Wake;
  if (plan.caller_alone) return Wake::none;
  return plan.is_short ? Wake::most : Wake::all;
}

// Slots of the pool's buffers; 0 belongs to packing.
enum MoeExecutor::Slot : size_t {
  kInput = 1,  // and scales, sums and outliers behind it; so the next two
  kGathered = 5,
  kHiddenQ = 9,
  kHidden = 13,
  kThread,
  kOutput,  // the last: a layer with more shards than nodes takes more slots
};

const MoeExecutor::StageRow MoeExecutor::kTable[kStages] = {
    // run, waits for, signals
    {&MoeExecutor::convert_inputs, &MoeExecutor::nothing, &MoeExecutor::inputs_done},
    {&MoeExecutor::gather, &MoeExecutor::inputs_done, &MoeExecutor::gather_done},
    {&MoeExecutor::compute_gate_up, &MoeExecutor::rows_ready, &MoeExecutor::gate_up_done},
    {&MoeExecutor::quantise, &MoeExecutor::gate_up_done, &MoeExecutor::quantise_done},
    {&MoeExecutor::compute_down, &MoeExecutor::inner_ready, &MoeExecutor::chunk_done},
    {&MoeExecutor::add_up, &MoeExecutor::chunk_ready, &MoeExecutor::nothing},
};

MoeExecutor::MoeExecutor(const Experts& layer, Workspace& space, runtime::ThreadPool& workers, const Tokens& tokens)
    : layer_(layer),
      config_(layer.config_),
      gate_up_(layer.gate_up_),
      down_(layer.down_),
      vector_ops_(*layer.vector_ops_),
      space_(space),
      routing_(space.routing),
      plan_(space.plan),
      workers_(workers),
      tokens_(tokens),
      is_quantised_(gemm::has_int8_rows(config_.format)),
      has_sums_(gemm::has_group_sums(config_.format)) {}

void MoeExecutor::run() {
  count_workers(workers_, space_);
  run_round(0);
  for (int round = 1; round < plan_.rounds; ++round) run_round(round);
}

void MoeExecutor::run_round(int round) {
  plan_.make(routing_, {gate_up_, down_, layer_.shards_, space_.workers, workers_.threads()}, tokens_.count, round);
  reserve();
  space_.counters.begin(plan_.signals);
  if (round == 0 && plan_.caller_converts) {
    convert_inputs({0, 0, tokens_.count}, 0);
    routing_.for_groups([&](int place, int first, int rows) { gather({place, first, rows}, 0); });
  }
  workers_.parallel_lists(
      plan_.sizes, [&](int list, int index, int worker) { execute(list, index, worker); },
      runtime::ThreadPool::Steal::yes, wake_for(plan_));
}

void MoeExecutor::execute(int list, int index, int worker) {
  const MoeTask& task = plan_.lists[static_cast<size_t>(list)][static_cast<size_t>(index)];
  const Stage stage = plan_.stage_of(list, index);
  const StageRow& row = kTable[stage];
  const size_t before = (this->*row.waits_for)(task);
  if (before != kNothing) {
    const std::atomic<int>& left = space_.counters[before];
    runtime::Fetch fetch = stage == kDown && plan_.reads_only ? weights_of(task) : runtime::Fetch{};
    const bool ready = workers_.await([&] { return left.load(std::memory_order_acquire) == 0; },
                                      plan_.begins[static_cast<size_t>(stage)], worker, fetch);
    if (!ready) return;  // the call is ending without this
  }
  (this->*row.run)(task, worker);
  const size_t after = (this->*row.signals)(task);
  if (after == kNothing) return;
  const bool is_last = space_.counters[after].fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (!is_last || stage != kGateUp || !plan_.quantises_at_once) return;
  quantise({task.of, 0, routing_.count_of(routing_.active_at(task.of))}, worker);
  space_.counters[quantise_done(task)].fetch_sub(1, std::memory_order_acq_rel);
}

// Of a task of down, as far as they lie side by side.
runtime::Fetch MoeExecutor::weights_of(const MoeTask& task) const {
  return {{layer_.panel(Projection::down, routing_.active_at(task.of), task.first),
           static_cast<size_t>(task.count) * down_.panel_bytes()}};
}

MoeExecutor::Activations MoeExecutor::activations(const gemm::Matrix& matrix, const ActivationBytes& bytes, Slot data) {
  return {workers_.buffer(data, bytes.data),
          is_quantised_ ? reinterpret_cast<float*>(workers_.buffer(data + 1, bytes.scale)) : nullptr,
          has_sums_ ? reinterpret_cast<int32_t*>(workers_.buffer(data + 2, bytes.sums)) : nullptr,
          bytes.outliers > 0 ? reinterpret_cast<gemm::Outliers*>(workers_.buffer(data + 3, bytes.outliers)) : nullptr,
          matrix.row_bytes(),
          matrix.row_scales(),
          has_sums_ ? static_cast<size_t>(matrix.groups()) : 0};
}

void MoeExecutor::reserve() {
  input_ = activations(gate_up_, plan_.input, kInput);
  gathered_ = activations(gate_up_, plan_.gathered, kGathered);
  inner_ = activations(down_, plan_.inner, kHiddenQ);
  if (is_quantised_) hidden_ = reinterpret_cast<uint16_t*>(workers_.buffer(kHidden, plan_.hidden));
  const size_t nodes = workers_.nodes().size();
  space_.results.resize(plan_.results.size());
  for (size_t shard = 0; shard < plan_.results.size(); ++shard)
    space_.results[shard] =
        reinterpret_cast<float*>(workers_.buffer(kOutput + shard / nodes, plan_.results[shard], shard % nodes));
  space_.own.resize(nodes);
  for (size_t node = 0; node < nodes; ++node)
    space_.own[node] = workers_.buffer(kThread, plan_.own * static_cast<size_t>(space_.workers[node]), node);
}

size_t MoeExecutor::shard_of(Projection projection, int panel) const {
  size_t shard = 0;
  for (; shard + 1 < layer_.shards_.size(); ++shard) {
    const Shard::Part& part = Experts::part_of(layer_.shards_[shard], projection);
    if (panel < part.first + part.panels) break;
  }
  return shard;
}

// Rounds or quantises `values` to the contiguous row `out`; its scale, sums and outliers become those of row `at`.
void MoeExecutor::convert(const Activations& to, const gemm::Matrix& matrix, size_t at, const void* values, DType dtype,
                          std::byte* out) {
  gemm::pack_row(vector_ops_, matrix, values, dtype, out,
                 is_quantised_ ? to.scale + at * static_cast<size_t>(to.scales) : nullptr,
                 has_sums_ ? to.sums + at * to.groups : nullptr, to.outliers == nullptr ? nullptr : to.outliers + at);
}

void MoeExecutor::convert_inputs(const MoeTask& task, int) {
  const size_t x_bytes = static_cast<size_t>(config_.hidden_size) * dtype_bytes(tokens_.dtype);
  for (int token = task.first; token < task.first + task.count; ++token) {
    const auto at = static_cast<size_t>(token);
    convert(input_, gate_up_, at, tokens_.x + at * x_bytes, tokens_.dtype, input_.data + at * input_.row_bytes);
  }
}

// Up to 16 rows of an expert, side by side: written from one end to the other by one thread. (An expert with a single
// row reads the token's own.)
void MoeExecutor::gather(const MoeTask& task, int) {
  const size_t first = routing_.start_of(routing_.active_at(task.of)) + static_cast<size_t>(task.first);
  const int* token = routing_.token.data() + first;
  std::byte* to = gathered_.data + first * gathered_.row_bytes;
  for (size_t at = 0; at < gathered_.row_bytes; at += 64)
    for (int row = 0; row < task.count; ++row, to += 64)
      std::memcpy(to, input_.data + static_cast<size_t>(token[row]) * input_.row_bytes + at, 64);
  for (int row = 0; row < task.count; ++row) {
    const size_t here = first + static_cast<size_t>(row), there = static_cast<size_t>(token[row]);
    if (is_quantised_) {
      const auto scales = static_cast<size_t>(input_.scales);
      std::memcpy(gathered_.scale + here * scales, input_.scale + there * scales, scales * sizeof(float));
    }
    if (input_.outliers != nullptr) gathered_.outliers[here] = input_.outliers[there];
    if (has_sums_)
      std::memcpy(gathered_.sums + here * gathered_.groups, input_.sums + there * input_.groups,
                  input_.groups * sizeof(int32_t));
  }
}

// Calls use(first row of the expert, rows, panel, c) for the results of a task, c [rows, 32], piece by piece.
template <class Use>
void MoeExecutor::multiply(Projection projection, int expert, const MoeTask& task, const gemm::PackedActivations& all,
                           int worker, Use&& use) {
  const gemm::Matrix& matrix = layer_.matrix_of(projection);
  const gemm::Kernel& kernel = (projection == Projection::down ? layer_.down_kernels_ : layer_.kernels_)(all.m);
  const size_t panel_bytes = matrix.panel_bytes();  // found with divisions; results are taken a few rows at a time
  float* c = results(worker);
  const int pieces = (all.m + kMostRows - 1) / kMostRows;
  const int size = gemm::round_up((all.m + pieces - 1) / pieces, 2 * gemm::kTile);
  const int most = std::max(1, MoePlan::kMostResults / size);
  for (int p = task.first; p < task.first + task.count; p += most)
    for (int first = 0; first < all.m; first += size) {
      const int m = std::min(size, all.m - first), panels = std::min(most, task.first + task.count - p);
      const gemm::PackedActivations x = all.part(first, m, has_sums_ ? matrix.groups() : 0);
      const std::byte* const weights = layer_.panel(projection, expert, p);
      gemm::OutlierRows outliers(matrix, x);
      auto take = [&](int panel, int row, int count, float* results) {
        if (outliers.has(row, count))
          vector_ops_.add_outliers(outliers, weights + static_cast<size_t>(panel) * panel_bytes, row, count, results);
        use(first + row, count, p + panel, results);
      };
      const gemm::Epilogue epilogue{[](void* context, int panel, int row, int count, float* results) {
                                      (*static_cast<decltype(take)*>(context))(panel, row, count, results);
                                    },
                                    &take};
      kernel.multiply(matrix, weights, panels, x, c, kernel_scratch(worker),
                      kernel.backend->has_epilogue ? &epilogue : nullptr);
      if (!kernel.backend->has_epilogue)
        for (int panel = 0; panel < panels; ++panel)
          take(panel, 0, m, c + static_cast<size_t>(panel) * static_cast<size_t>(m) * gemm::kPanel);
    }
}

// Of rows first ... first + m: bf16 results become rows of the next product at once.
void MoeExecutor::activate(const float* c, const float* bias, int first, int m, int panel,
                           const gemm::PackedActivations& to) {
  const int columns = config_.activation.has_gate ? gemm::kTile : gemm::kPanel, column = panel * columns;
  for (int row = first; row < first + m;) {
    const int group = row / gemm::kTile * gemm::kTile, height = to.group_rows(group);
    const int rows = std::min(group + height, first + m) - row;
    auto* h = reinterpret_cast<uint16_t*>(const_cast<std::byte*>(to.group(group)) +
                                          static_cast<size_t>(column / 32 * height + row - group) * 64) +
              column % 32;
    vector_ops_.activate(config_.activation, c + (row - first) * gemm::kPanel, bias, rows, h, 32);
    // A half block at the end belongs to no panel. The weights there are zero, but zero times a stale NaN is not.
    if (panel + 1 == gate_up_.panels && column % 32 == 0 && columns == gemm::kTile)
      for (int r = 0; r < rows; ++r) std::fill(h + r * 32 + gemm::kTile, h + r * 32 + 32, uint16_t{0});
    row += rows;
  }
}

// Results that are quantised are kept as bf16 until their rows are whole.
void MoeExecutor::compute_gate_up(const MoeTask& task, int worker) {
  const int columns = config_.activation.has_gate ? gemm::kTile : gemm::kPanel;
  const auto* biases = reinterpret_cast<const float*>(layer_.gate_up_bias_.data());
  const int expert = routing_.active_at(task.of), count = routing_.count_of(expert);
  const size_t start = routing_.start_of(expert);
  const gemm::PackedActivations x =
      count == 1 ? input_.rows(static_cast<size_t>(routing_.token[start]), 1) : gathered_.rows(start, count);
  multiply(Projection::up, expert, task, x, worker, [&](int first, int m, int p, const float* c) {
    const auto panel = static_cast<size_t>(expert) * static_cast<size_t>(gate_up_.panels) + static_cast<size_t>(p);
    const float* bias = biases == nullptr ? nullptr : biases + panel * gemm::kPanel;
    if (!is_quantised_) return activate(c, bias, first, m, p, inner_.rows(start, count));
    uint16_t* h =
        hidden_ + (start + static_cast<size_t>(first)) * plan_.hidden_stride + static_cast<size_t>(p * columns);
    vector_ops_.activate(config_.activation, c, bias, m, h, plan_.hidden_stride);
  });
}

void MoeExecutor::quantise(const MoeTask& task, int worker) {
  const int expert = routing_.active_at(task.of);
  const size_t start = routing_.start_of(expert);
  for (int row = task.first; row < task.first + task.count; ++row) {
    const size_t at = start + static_cast<size_t>(row);
    convert(inner_, down_, at, hidden_ + at * plan_.hidden_stride, DType::bf16, one_row(worker));
    gemm::place_row(inner_.data + start * inner_.row_bytes, inner_.row_bytes, routing_.count_of(expert), row,
                    one_row(worker));
  }
}

void MoeExecutor::compute_down(const MoeTask& task, int worker) {
  const size_t shard = shard_of(Projection::down, task.first);
  const Columns& part = plan_.columns[shard];
  const size_t stride = static_cast<size_t>(part.panels) * gemm::kPanel;
  const int expert = routing_.active_at(task.of);
  const size_t start = routing_.start_of(expert);
  multiply(Projection::down, expert, task, inner_.rows(start, routing_.count_of(expert)), worker,
           [&](int first, int m, int p, const float* c) {
             float* to = space_.results[shard] + (start + static_cast<size_t>(first)) * stride +
                         static_cast<size_t>(p - part.first) * gemm::kPanel;
             for (int row = 0; row < m; ++row, c += gemm::kPanel, to += stride) {
               if (plan_.bypasses_caches) stream_row(to, c);
               else std::memcpy(to, c, gemm::kPanel * sizeof(float));
             }
           });
  if (plan_.bypasses_caches) _mm_sfence();
}

void MoeExecutor::add_up(const MoeTask& task, int) {
  const Chunk& chunk = plan_.chunks[static_cast<size_t>(task.of)];
  const Columns& part = plan_.columns[static_cast<size_t>(chunk.shard)];
  const size_t stride = static_cast<size_t>(part.panels) * gemm::kPanel;
  const float* y =
      space_.results[static_cast<size_t>(chunk.shard)] + static_cast<size_t>(chunk.first - part.first) * gemm::kPanel;
  const auto* down_bias = reinterpret_cast<const float*>(layer_.down_bias_.data());
  const int column = chunk.first * gemm::kPanel;
  const int columns = std::min(chunk.panels * gemm::kPanel, config_.hidden_size - column);
  for (int token = task.first; token < task.first + task.count; ++token) {
    const float* terms[kMostSlots];
    const float* biases[kMostSlots];
    float weight[kMostSlots];
    int used = 0;
    for (int slot = 0; slot < tokens_.top_k; ++slot) {
      const auto at = static_cast<size_t>(token * tokens_.top_k + slot);
      if (routing_.row[at] < 0) continue;
      const auto row = static_cast<size_t>(routing_.row[at]);
      terms[used] = y + row * stride;
      if (down_bias != nullptr)
        biases[used] = down_bias +
                       static_cast<size_t>(routing_.expert[row]) * static_cast<size_t>(down_.panels) * gemm::kPanel +
                       column;
      weight[used++] = tokens_.weights[at];
    }
    const size_t to =
        static_cast<size_t>(token) * static_cast<size_t>(config_.hidden_size) + static_cast<size_t>(column);
    vector_ops_.combine(terms, down_bias == nullptr ? nullptr : biases, weight, used, columns, tokens_.dtype,
                        tokens_.out + to * dtype_bytes(tokens_.dtype));
  }
}

}  // namespace ktinject::moe
