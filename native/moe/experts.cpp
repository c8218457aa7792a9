// The forward pass. Five stages, each a set of independent tasks handed to the pool:
//   1 round or quantise every token once, and put a copy among the rows of each of its experts
//   2 gate and up, with the activation: tasks of (expert, some panels)
//   3 int8, int4: quantise every row of the intermediate once
//   4 down: tasks of (expert, some panels)
//   5 weighted sum over a token's experts, in the order of its slots, so results do not depend on the number of threads
#include "moe/experts.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"

namespace ktinject {
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
  kOutput,
  kThread,
};

// Long prompts are cut so that the working memory stays below this; the result is the same.
constexpr size_t kMostWorkspaceBytes = size_t{512} << 20;
// Rows of one expert, and rows times panels, that a kernel is given at once: 512 KiB of results, a part of an L2 cache.
constexpr int kMostRows = 256;
constexpr int kMostResults = 4096;
// Layers with less than this to do are left to the caller: waking workers would cost more.
constexpr size_t kSerialBytes = size_t{128} << 10;
// Tasks a thread, on average, so that a slow one does not hold up the rest.
constexpr int kTasksPerThread = 8;
// Up to about so many rows a panel costs what reading its weights costs.
constexpr int kReadRows = 4;

// Experts a token may be sent to; they are gathered on the stack.
constexpr int kMostSlots = 64;

struct Task {
  int expert;
  int first_panel;
  int panels;
};

// Rounded or quantised activations, a row a token or a (token, expert) pair.
struct Activations {
  std::byte* data;
  float* scale;   // null for bf16
  int32_t* sums;  // null unless int4
  size_t row_bytes;
  size_t groups;

  Rows rows(size_t first, int m) const {
    return {data + first * row_bytes, row_bytes, m, scale == nullptr ? nullptr : scale + first,
            sums == nullptr ? nullptr : sums + first * groups};
  }
};

}  // namespace

// Which token goes to which expert, as lists: rows sorted by expert.
struct Experts::Routing {
  std::vector<int> count;   // [experts]
  std::vector<int> start;   // [experts]
  std::vector<int> expert;  // [rows]: expert of a sorted row
  std::vector<int> token;   // [rows]: token of a sorted row
  std::vector<int> row;     // [tokens, top_k]: sorted row of a slot, or -1
  std::vector<int> active;  // experts with rows, most rows first
  std::vector<Task> tasks;
};

struct Experts::Pass {
  const void* x;
  DType dtype;
  const float* weights;
  int tokens;
  int top_k;
  void* out;
  Routing* routing;
  ThreadPool* workers;
};

Experts::Experts(ExpertsConfig config)
    : config_(std::move(config)),
      kernels_(choose_kernel(config_.format, config_.kernel)),
      stages_(&choose_stages(kernels_.many->isa & kernels_.few->isa)) {
  auto positive = [](const char* name, int value, int most) {
    if (value < 1 || value > most)
      throw std::invalid_argument(std::string(name) + ": found " + std::to_string(value) + "; allowed: 1 to " +
                                  std::to_string(most));
  };
  // 255 * 127 * 65536 is the longest int32 sum that cannot overflow.
  positive("experts", config_.experts, 1 << 16);
  positive("hidden_size", config_.hidden_size, 65536);
  positive("intermediate_size", config_.intermediate_size, 65536);
  if (config_.format == Format::int4 && config_.group_size != 32 && config_.group_size != 64 &&
      config_.group_size != 128)
    throw std::invalid_argument("group_size: found " + std::to_string(config_.group_size) + "; allowed: 32, 64, 128");
  if (config_.format != Format::int4 && !config_.symmetric)
    throw std::invalid_argument("symmetric: found false; only int4 weights have zero points");
  const bool gate = config_.activation.has_gate;
  const int inner = config_.intermediate_size;
  const int group_size = scale_group(config_.format, config_.group_size);
  gate_up_ = {config_.format,
              gate ? 2 * inner : inner,
              config_.hidden_size,
              group_size,
              gate ? (inner + kTile - 1) / kTile : (inner + kPanel - 1) / kPanel,
              config_.symmetric};
  down_ = {config_.format,   config_.hidden_size, inner, group_size, (config_.hidden_size + kPanel - 1) / kPanel,
           config_.symmetric};
  loaded_.assign(static_cast<size_t>(config_.experts) * 3 * 2, 0);
}

size_t Experts::bytes() const {
  const size_t weights = gate_up_.bytes() + down_.bytes();
  const size_t biases =
      config_.has_bias ? static_cast<size_t>(gate_up_.panels + down_.panels) * kPanel * sizeof(float) : 0;
  return static_cast<size_t>(config_.experts) * (weights + biases);
}

void Experts::allocate() {
  const auto experts = static_cast<size_t>(config_.experts);
  Block gate_up(experts * gate_up_.bytes()), down(experts * down_.bytes()), gate_up_bias, down_bias;
  if (config_.has_bias) {
    gate_up_bias = Block(experts * static_cast<size_t>(gate_up_.panels) * kPanel * sizeof(float));
    down_bias = Block(experts * static_cast<size_t>(down_.panels) * kPanel * sizeof(float));
  }
  std::fill(loaded_.begin(), loaded_.end(), uint8_t{0});
  gate_up_data_ = std::move(gate_up);
  down_data_ = std::move(down);
  gate_up_bias_ = std::move(gate_up_bias);
  down_bias_ = std::move(down_bias);
}

const std::byte* Experts::panel(const Matrix& matrix, const Block& block, int expert, int index) const {
  return block.data() + static_cast<size_t>(expert) * matrix.bytes() +
         static_cast<size_t>(index) * matrix.panel_bytes();
}

void Experts::repeat(int expert) {
  if (expert < 0 || expert >= config_.experts || gate_up_data_.data() == nullptr)
    throw std::invalid_argument("repeat: there is no such expert, or no memory yet");
  const size_t marks = loaded_.size() / static_cast<size_t>(config_.experts);
  for (int e = 0; e < config_.experts; ++e) {
    if (e == expert) continue;
    auto copy = [&](const Matrix& matrix, const Block& block) {
      for (int i = 0; i < matrix.panels; ++i)
        std::memcpy(const_cast<std::byte*>(panel(matrix, block, e, i)), panel(matrix, block, expert, i),
                    matrix.panel_bytes());
    };
    copy(gate_up_, gate_up_data_);
    copy(down_, down_data_);
    auto copy_bias = [&](const Matrix& matrix, const Block& block) {
      const size_t bytes = static_cast<size_t>(matrix.panels) * kPanel * sizeof(float);
      std::memcpy(block.data() + static_cast<size_t>(e) * bytes, block.data() + static_cast<size_t>(expert) * bytes,
                  bytes);
    };
    if (config_.has_bias) {
      copy_bias(gate_up_, gate_up_bias_);
      copy_bias(down_, down_bias_);
    }
    std::copy_n(loaded_.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(expert) * marks), marks,
                loaded_.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(e) * marks));
  }
}

template <class Id>
void Experts::forward(const void* x, DType dtype, const Id* ids, const float* weights, int tokens, int top_k,
                      void* out) const {
  if (gate_up_data_.data() == nullptr) throw std::invalid_argument("forward before allocate()");
  if (top_k < 1 || top_k > kMostSlots)
    throw std::invalid_argument("experts a token: found " + std::to_string(top_k) + "; allowed: 1 to " +
                                std::to_string(kMostSlots));
  for (size_t i = 0; i < static_cast<size_t>(tokens) * static_cast<size_t>(top_k); ++i)
    if (ids[i] < -1 || ids[i] > config_.experts)
      throw std::out_of_range("token " + std::to_string(i / static_cast<size_t>(top_k)) + " is routed to expert " +
                              std::to_string(ids[i]) + "; allowed: 0 to " + std::to_string(config_.experts - 1) +
                              ", or -1 or " + std::to_string(config_.experts) + " for none");

  const auto workers = pool();
  const auto session = workers->session();
  const TraceSpan span(this, tokens);
  const size_t row_bytes =
      gate_up_.row_bytes() +
      static_cast<size_t>(top_k) * (gate_up_.row_bytes() + static_cast<size_t>(down_.panels) * kPanel * sizeof(float) +
                                    static_cast<size_t>(config_.intermediate_size) * 3);
  const int most = std::max(64, static_cast<int>(std::min<size_t>(kMostWorkspaceBytes / row_bytes, 1u << 20)));
  static thread_local Routing routing;  // keeps its capacity from call to call
  for (int first = 0; first < tokens; first += most) {
    const int take = std::min(most, tokens - first);
    const Id* chosen = ids + static_cast<size_t>(first) * static_cast<size_t>(top_k);
    const int slots = take * top_k;
    routing.count.assign(static_cast<size_t>(config_.experts), 0);
    routing.start.assign(static_cast<size_t>(config_.experts), 0);
    routing.row.assign(static_cast<size_t>(slots), -1);
    routing.active.clear();
    auto routed = [&](int slot) { return chosen[slot] >= 0 && chosen[slot] < config_.experts; };
    for (int slot = 0; slot < slots; ++slot)
      if (routed(slot)) ++routing.count[static_cast<size_t>(chosen[slot])];
    int rows = 0;
    for (int expert = 0; expert < config_.experts; ++expert) {
      routing.start[static_cast<size_t>(expert)] = rows;
      rows += routing.count[static_cast<size_t>(expert)];
      if (routing.count[static_cast<size_t>(expert)] > 0) routing.active.push_back(expert);
    }
    routing.expert.resize(static_cast<size_t>(rows));
    std::vector<int>& next = routing.start;  // advanced while filling, set back below
    for (int slot = 0; slot < slots; ++slot) {
      if (!routed(slot)) continue;
      const int row = next[static_cast<size_t>(chosen[slot])]++;
      routing.row[static_cast<size_t>(slot)] = row;
      routing.expert[static_cast<size_t>(row)] = static_cast<int>(chosen[slot]);
    }
    for (int expert = 0; expert < config_.experts; ++expert)
      routing.start[static_cast<size_t>(expert)] -= routing.count[static_cast<size_t>(expert)];
    // The longest first, so that no long task is left for the end.
    std::stable_sort(routing.active.begin(), routing.active.end(), [&](int a, int b) {
      return routing.count[static_cast<size_t>(a)] > routing.count[static_cast<size_t>(b)];
    });
    const size_t offset = static_cast<size_t>(first) * static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype);
    run({static_cast<const std::byte*>(x) + offset, dtype,
         weights + static_cast<size_t>(first) * static_cast<size_t>(top_k), take, top_k,
         static_cast<std::byte*>(out) + offset, &routing, workers.get()});
  }
}

template void Experts::forward(const void*, DType, const int32_t*, const float*, int, int, void*) const;
template void Experts::forward(const void*, DType, const int64_t*, const float*, int, int, void*) const;

void Experts::run(const Pass& pass) const {
  Routing& routing = *pass.routing;
  ThreadPool& workers = *pass.workers;
  const auto rows = routing.expert.size();
  const bool quantised = has_int8_rows(config_.format);
  const int zero_point = config_.format == Format::int8 ? 128 : 0;
  const bool sums = config_.format == Format::int4;
  const size_t active_bytes = routing.active.size() * (gate_up_.bytes() + down_.bytes());
  const bool serial =
      active_bytes * std::max<size_t>(1, rows / std::max<size_t>(1, routing.active.size()) / kReadRows) < kSerialBytes;
  auto each = [&](int tasks, auto&& task) {
    if (serial)
      for (int index = 0; index < tasks; ++index) task(index, 0);
    else workers.parallel_for(tasks, task);
  };

  auto activations = [&](const Matrix& matrix, size_t count, Slot data, Slot scale, Slot sum) {
    const auto groups = sums ? static_cast<size_t>(matrix.groups()) : 0;
    return Activations{
        workers.buffer(data, count * matrix.row_bytes()),
        quantised ? reinterpret_cast<float*>(workers.buffer(scale, count * sizeof(float))) : nullptr,
        sums ? reinterpret_cast<int32_t*>(workers.buffer(sum, count * groups * sizeof(int32_t))) : nullptr,
        matrix.row_bytes(), groups};
  };
  // Rounds or quantises `values` to the contiguous row `out`, and its scale and sums to those of row `at`.
  auto convert = [&](const Activations& to, const Matrix& matrix, size_t at, const void* values, DType dtype,
                     std::byte* out) {
    if (!quantised)
      return stages_->round_row(values, dtype, matrix.k, matrix.padded_k(), reinterpret_cast<uint16_t*>(out));
    to.scale[at] = stages_->quantise_row(values, dtype, matrix.k, matrix.padded_k(), zero_point, matrix.group_size,
                                         reinterpret_cast<uint8_t*>(out), sums ? to.sums + at * to.groups : nullptr);
  };
  auto count_of = [&](size_t expert) { return routing.count[expert]; };
  auto start_of = [&](size_t expert) { return static_cast<size_t>(routing.start[expert]); };

  // Memory a worker has to itself: a block of results, a row, the kernel's scratch.
  constexpr size_t kResultBytes = size_t{kMostResults} * kPanel * sizeof(float);
  const size_t scratch = std::max(scratch_bytes(gate_up_), scratch_bytes(down_));
  const size_t thread_bytes = kResultBytes + down_.row_bytes() + scratch;
  std::byte* own = workers.buffer(kThread, thread_bytes * static_cast<size_t>(workers.threads()));
  auto results = [&](int worker) { return reinterpret_cast<float*>(own + static_cast<size_t>(worker) * thread_bytes); };
  auto one_row = [&](int worker) { return own + static_cast<size_t>(worker) * thread_bytes + kResultBytes; };
  auto kernel_scratch = [&](int worker) { return one_row(worker) + down_.row_bytes(); };

  // 1: inputs. An expert with one row reads the token's own.
  const Activations input = activations(gate_up_, static_cast<size_t>(pass.tokens), kInput, kInputScale, kInputSums);
  const Activations gathered = activations(gate_up_, rows, kGathered, kGatheredScale, kGatheredSums);
  routing.token.resize(rows);
  const size_t x_bytes = static_cast<size_t>(config_.hidden_size) * dtype_bytes(pass.dtype);
  each(pass.tokens, [&](int token, int) {
    const auto at = static_cast<size_t>(token);
    std::byte* row = input.data + at * input.row_bytes;
    convert(input, gate_up_, at, static_cast<const std::byte*>(pass.x) + at * x_bytes, pass.dtype, row);
    for (int slot = token * pass.top_k; slot < (token + 1) * pass.top_k; ++slot) {
      if (routing.row[static_cast<size_t>(slot)] < 0) continue;
      const auto to = static_cast<size_t>(routing.row[static_cast<size_t>(slot)]);
      const auto expert = static_cast<size_t>(routing.expert[to]);
      routing.token[to] = token;
      if (count_of(expert) == 1) continue;
      place_row(gathered.data + start_of(expert) * gathered.row_bytes, gathered.row_bytes, count_of(expert),
                static_cast<int>(to - start_of(expert)), row);
      if (quantised) gathered.scale[to] = input.scale[at];
      if (sums)
        std::memcpy(gathered.sums + to * gathered.groups, input.sums + at * input.groups,
                    input.groups * sizeof(int32_t));
    }
  });

  auto plan_tasks = [&](const Matrix& matrix) {
    routing.tasks.clear();
    size_t work = 0;
    for (const int expert : routing.active)
      work += static_cast<size_t>(std::max(kReadRows, count_of(static_cast<size_t>(expert))));
    work = work * static_cast<size_t>(matrix.panels) / static_cast<size_t>(workers.threads() * kTasksPerThread);
    for (const int expert : routing.active) {
      const auto each_panel = static_cast<size_t>(std::max(kReadRows, count_of(static_cast<size_t>(expert))));
      const int size = std::clamp(static_cast<int>(work / each_panel), 1, matrix.panels);
      for (int first = 0; first < matrix.panels; first += size)
        routing.tasks.push_back({expert, first, std::min(size, matrix.panels - first)});
    }
  };
  // Calls use(first row of the expert, rows, first panel, panels, c) for the results of a task, piece by piece.
  auto multiply = [&](const Task& task, const Matrix& matrix, const Block& weights, const Rows& all, int worker,
                      auto&& use) {
    const Kernel& kernel = kernels_(all.m);
    float* c = results(worker);
    for (int first = 0; first < all.m; first += kMostRows) {
      // A run of whole groups of 16 rows is laid out like rows of its own.
      const int m = std::min(kMostRows, all.m - first);
      const Rows x{all.group(first), all.row_bytes, m, all.scale == nullptr ? nullptr : all.scale + first,
                   all.group_sum == nullptr
                       ? nullptr
                       : all.group_sum + static_cast<size_t>(first) * static_cast<size_t>(matrix.groups())};
      const int most = std::max(1, kMostResults / round_up(m, kTile));
      for (int p = task.first_panel; p < task.first_panel + task.panels; p += most) {
        const int panels = std::min(most, task.first_panel + task.panels - p);
        kernel.multiply(matrix, panel(matrix, weights, task.expert, p), panels, x, c, kernel_scratch(worker));
        use(first, m, p, panels, c);
      }
    }
  };

  // 2: gate and up. bf16 results are the next product's rows at once; the others are quantised first, as whole rows.
  const Activations inner = activations(down_, rows, kHiddenQ, kHiddenScale, kHiddenSums);
  const auto wide = static_cast<size_t>(round_up(config_.intermediate_size, kPanel));
  auto* hidden =
      quantised ? reinterpret_cast<uint16_t*>(workers.buffer(kHidden, rows * wide * sizeof(uint16_t))) : nullptr;
  const int columns = config_.activation.has_gate ? kTile : kPanel;
  const auto* gate_up_bias = reinterpret_cast<const float*>(gate_up_bias_.data());
  plan_tasks(gate_up_);
  each(static_cast<int>(routing.tasks.size()), [&](int index, int worker) {
    const Task& task = routing.tasks[static_cast<size_t>(index)];
    const auto expert = static_cast<size_t>(task.expert);
    const size_t start = start_of(expert);
    const int count = count_of(expert);
    const Rows x = count == 1 ? input.rows(static_cast<size_t>(routing.token[start]), 1) : gathered.rows(start, count);
    multiply(
        task, gate_up_, gate_up_data_, x, worker, [&](int first, int m, int first_panel, int panels, const float* c) {
          for (int p = first_panel; p < first_panel + panels; ++p, c += static_cast<size_t>(m) * kPanel) {
            const float* bias =
                gate_up_bias == nullptr
                    ? nullptr
                    : gate_up_bias + (expert * static_cast<size_t>(gate_up_.panels) + static_cast<size_t>(p)) * kPanel;
            const int column = p * columns;
            if (quantised) {
              uint16_t* h = hidden + (start + static_cast<size_t>(first)) * wide + static_cast<size_t>(column);
              stages_->activate(config_.activation, c, bias, m, h, wide);
              continue;
            }
            const Rows to = inner.rows(start, count);
            for (int row = first; row < first + m; row += kTile) {
              const int height = to.group_rows(row);
              auto* h = reinterpret_cast<uint16_t*>(const_cast<std::byte*>(to.group(row)) +
                                                    static_cast<size_t>(column / 32 * height) * 64) +
                        column % 32;
              stages_->activate(config_.activation, c + (row - first) * kPanel, bias, height, h, 32);
              // A half block at the end belongs to no panel. The weights there are zero, but zero times a stale NaN is
              // not.
              if (p + 1 == gate_up_.panels && column % 32 == 0 && columns == kTile)
                for (int r = 0; r < height; ++r) std::fill(h + r * 32 + kTile, h + r * 32 + 32, uint16_t{0});
            }
          }
        });
  });

  // 3: quantise the intermediate.
  if (quantised)
    each(static_cast<int>(rows), [&](int row, int worker) {
      const auto at = static_cast<size_t>(row);
      const auto expert = static_cast<size_t>(routing.expert[at]);
      convert(inner, down_, at, hidden + at * wide, DType::bf16, one_row(worker));
      place_row(inner.data + start_of(expert) * inner.row_bytes, inner.row_bytes, count_of(expert),
                static_cast<int>(at - start_of(expert)), one_row(worker));
    });

  // 4: down.
  const size_t y_stride = static_cast<size_t>(down_.panels) * kPanel;
  auto* y = reinterpret_cast<float*>(workers.buffer(kOutput, rows * y_stride * sizeof(float)));
  plan_tasks(down_);
  each(static_cast<int>(routing.tasks.size()), [&](int index, int worker) {
    const Task& task = routing.tasks[static_cast<size_t>(index)];
    const auto expert = static_cast<size_t>(task.expert);
    multiply(task, down_, down_data_, inner.rows(start_of(expert), count_of(expert)), worker,
             [&](int first, int m, int first_panel, int panels, const float* c) {
               for (int p = first_panel; p < first_panel + panels; ++p) {
                 float* to =
                     y + (start_of(expert) + static_cast<size_t>(first)) * y_stride + static_cast<size_t>(p) * kPanel;
                 for (int row = 0; row < m; ++row, c += kPanel, to += y_stride)
                   std::memcpy(to, c, kPanel * sizeof(float));
               }
             });
  });

  // 5: weighted sum; columns are cut too, so that one token still has work for several workers.
  constexpr int kColumns = 1024;
  const int cuts = (config_.hidden_size + kColumns - 1) / kColumns;
  const size_t out_bytes = dtype_bytes(pass.dtype);
  const auto* down_bias = reinterpret_cast<const float*>(down_bias_.data());
  each(pass.tokens * cuts, [&](int index, int) {
    const int token = index / cuts, column = index % cuts * kColumns;
    const float* terms[kMostSlots];
    const float* biases[kMostSlots];
    float weight[kMostSlots];
    int used = 0;
    for (int slot = 0; slot < pass.top_k; ++slot) {
      const auto at = static_cast<size_t>(token * pass.top_k + slot);
      const int row = routing.row[at];
      if (row < 0) continue;
      terms[used] = y + static_cast<size_t>(row) * y_stride + column;
      if (down_bias != nullptr) {
        biases[used] = down_bias + static_cast<size_t>(routing.expert[static_cast<size_t>(row)]) * y_stride + column;
      }
      weight[used++] = pass.weights[at];
    }
    auto* out = static_cast<std::byte*>(pass.out) +
                (static_cast<size_t>(token) * static_cast<size_t>(config_.hidden_size) + static_cast<size_t>(column)) *
                    out_bytes;
    stages_->combine(terms, down_bias == nullptr ? nullptr : biases, weight, used,
                     std::min(kColumns, config_.hidden_size - column), pass.dtype, out);
  });
}

}  // namespace ktinject
