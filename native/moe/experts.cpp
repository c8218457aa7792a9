// The forward pass. Five stages, each a set of independent tasks handed to the pool:
//   1 round or quantise every token once
//   2 gate and up, with the activation: tasks of (expert, a few panels)
//   3 int8, int4: quantise every row of the intermediate once
//   4 down: tasks of (expert, a few panels)
//   5 weighted sum over a token's experts, in the order of its slots, so results do not depend on the number of threads
#include "moe/experts.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "runtime/thread_pool.hpp"

namespace ktinject {
namespace {

// Slots of the pool's buffers; 0 belongs to packing.
enum Slot : size_t { kInput = 1, kInputScale, kInputSums, kHidden, kHiddenQ, kHiddenScale, kHiddenSums, kOutput, kThread, kRouting };

// Long prompts are cut so that the working memory stays below this; the result is the same.
constexpr size_t kMostWorkspaceBytes = size_t{512} << 20;
// Rows of one expert that a task gathers at a time: what half an L2 cache holds beside the weights.
constexpr size_t kGatherBytes = size_t{512} << 10;
// A task's weights when an expert has many rows: they are read again for every gathered run of rows.
constexpr size_t kTaskBytes = size_t{1} << 20;
// Layers with less than this to do are left to the caller: waking workers would cost more.
constexpr size_t kSerialBytes = size_t{128} << 10;

// Experts a token may be sent to; they are gathered on the stack.
constexpr int kMostSlots = 64;

struct Task {
  int expert;
  int first_panel;
  int panels;
};

// Quantised or rounded activations of a stage, one row a token or a (token, expert) pair.
struct Activations {
  std::byte* data;
  size_t stride;
  float* scale;
  int32_t* sums;
  int groups;
};

}  // namespace

// Which token goes to which expert, as lists: rows sorted by expert.
struct Experts::Routing {
  std::vector<int> count;    // [experts]
  std::vector<int> start;    // [experts]
  std::vector<int> token;    // [rows]: token of a sorted row
  std::vector<int> row;      // [tokens, top_k]: sorted row of a slot, or -1
  std::vector<int> active;   // experts with rows, most rows first
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
    : config_(std::move(config)), kernels_(choose_kernel(config_.format, config_.kernel)),
      stages_(&choose_stages(kernels_.many->isa & kernels_.few->isa)) {
  auto positive = [](const char* name, int value, int most) {
    if (value < 1 || value > most)
      throw std::invalid_argument(std::string(name) + ": found " + std::to_string(value) + "; allowed: 1 to " + std::to_string(most));
  };
  // 255 * 127 * 65536 is the longest int32 sum that cannot overflow.
  positive("experts", config_.experts, 1 << 16);
  positive("hidden_size", config_.hidden_size, 65536);
  positive("intermediate_size", config_.intermediate_size, 65536);
  if (config_.format == Format::int4 && config_.group_size != 32 && config_.group_size != 64 && config_.group_size != 128)
    throw std::invalid_argument("group_size: found " + std::to_string(config_.group_size) + "; allowed: 32, 64, 128");
  const bool gate = config_.activation.has_gate;
  const int inner = config_.intermediate_size;
  gate_up_ = {config_.format, gate ? 2 * inner : inner, config_.hidden_size, config_.group_size,
              gate ? (inner + kTile - 1) / kTile : (inner + kPanel - 1) / kPanel};
  down_ = {config_.format, config_.hidden_size, inner, config_.group_size, (config_.hidden_size + kPanel - 1) / kPanel};
  loaded_.assign(static_cast<size_t>(config_.experts) * 3 * 2, 0);
}

size_t Experts::bytes() const {
  const size_t weights = gate_up_.bytes() + down_.bytes();
  const size_t biases = config_.has_bias ? static_cast<size_t>(gate_up_.panels + down_.panels) * kPanel * sizeof(float) : 0;
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
  return block.data() + static_cast<size_t>(expert) * matrix.bytes() + static_cast<size_t>(index) * matrix.panel_bytes();
}

template <class Id>
void Experts::forward(const void* x, DType dtype, const Id* ids, const float* weights, int tokens, int top_k, void* out) const {
  if (gate_up_data_.data() == nullptr) throw std::invalid_argument("forward before allocate()");
  if (top_k < 1 || top_k > kMostSlots)
    throw std::invalid_argument("experts a token: found " + std::to_string(top_k) + "; allowed: 1 to " + std::to_string(kMostSlots));
  for (size_t i = 0; i < static_cast<size_t>(tokens) * static_cast<size_t>(top_k); ++i)
    if (ids[i] < -1 || ids[i] > config_.experts)
      throw std::out_of_range("token " + std::to_string(i / static_cast<size_t>(top_k)) + " is routed to expert " + std::to_string(ids[i]) +
                              "; allowed: 0 to " + std::to_string(config_.experts - 1) + ", or -1 or " +
                              std::to_string(config_.experts) + " for none");

  const auto workers = pool();
  const auto session = workers->session();
  const size_t row_bytes = gate_up_.row_bytes() + static_cast<size_t>(top_k) * (static_cast<size_t>(down_.panels) * kPanel * sizeof(float) +
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
    routing.token.resize(static_cast<size_t>(rows));
    std::vector<int>& next = routing.start;  // advanced while filling, set back below
    for (int slot = 0; slot < slots; ++slot) {
      if (!routed(slot)) continue;
      const int row = next[static_cast<size_t>(chosen[slot])]++;
      routing.row[static_cast<size_t>(slot)] = row;
      routing.token[static_cast<size_t>(row)] = slot / top_k;
    }
    for (int expert = 0; expert < config_.experts; ++expert)
      routing.start[static_cast<size_t>(expert)] -= routing.count[static_cast<size_t>(expert)];
    // The longest first, so that no long task is left for the end.
    std::stable_sort(routing.active.begin(), routing.active.end(), [&](int a, int b) {
      return routing.count[static_cast<size_t>(a)] > routing.count[static_cast<size_t>(b)];
    });
    const size_t offset = static_cast<size_t>(first) * static_cast<size_t>(config_.hidden_size) * dtype_bytes(dtype);
    run({static_cast<const std::byte*>(x) + offset, dtype, weights + static_cast<size_t>(first) * static_cast<size_t>(top_k), take, top_k,
         static_cast<std::byte*>(out) + offset, &routing, workers.get()});
  }
}

template void Experts::forward(const void*, DType, const int32_t*, const float*, int, int, void*) const;
template void Experts::forward(const void*, DType, const int64_t*, const float*, int, int, void*) const;

void Experts::run(const Pass& pass) const {
  Routing& routing = *pass.routing;
  ThreadPool& workers = *pass.workers;
  const auto rows = routing.token.size();
  const bool quantised = config_.format != Format::bf16;
  const int zero_point = config_.format == Format::int8 ? 128 : 0;
  const bool sums = config_.format == Format::int4;
  const size_t active_bytes = routing.active.size() * (gate_up_.bytes() + down_.bytes());
  const bool serial = active_bytes * std::max<size_t>(1, rows / std::max<size_t>(1, routing.active.size()) / 4) < kSerialBytes;
  auto each = [&](int tasks, auto&& task) {
    if (serial)
      for (int index = 0; index < tasks; ++index) task(index, 0);
    else
      workers.parallel_for(tasks, task);
  };

  auto activations = [&](const Matrix& matrix, size_t count, Slot data, Slot scale, Slot sum) {
    const int groups = sums ? matrix.groups() : 0;
    return Activations{workers.buffer(data, count * matrix.row_bytes()), matrix.row_bytes(),
                       reinterpret_cast<float*>(workers.buffer(scale, quantised ? count * sizeof(float) : 0)),
                       reinterpret_cast<int32_t*>(workers.buffer(sum, count * static_cast<size_t>(groups) * sizeof(int32_t))), groups};
  };
  auto quantise = [&](const Activations& to, const Matrix& matrix, size_t row, const void* values, DType dtype) {
    to.scale[row] = stages_->quantise_row(values, dtype, matrix.k, matrix.padded_k(), zero_point, matrix.group_size,
                                          reinterpret_cast<uint8_t*>(to.data) + row * to.stride,
                                          sums ? to.sums + row * static_cast<size_t>(to.groups) : nullptr);
  };

  // 1: inputs, a few tokens a task.
  const Activations input = activations(gate_up_, static_cast<size_t>(pass.tokens), kInput, kInputScale, kInputSums);
  const size_t x_stride = static_cast<size_t>(config_.hidden_size) * dtype_bytes(pass.dtype);
  constexpr int kTokensPerTask = 4;
  each((pass.tokens + kTokensPerTask - 1) / kTokensPerTask, [&](int index, int) {
    const int end = std::min(pass.tokens, (index + 1) * kTokensPerTask);
    for (int token = index * kTokensPerTask; token < end; ++token) {
      const auto at = static_cast<size_t>(token);
      const std::byte* x = static_cast<const std::byte*>(pass.x) + at * x_stride;
      if (quantised) quantise(input, gate_up_, at, x, pass.dtype);
      else stages_->round_row(x, pass.dtype, gate_up_.k, gate_up_.padded_k(), reinterpret_cast<uint16_t*>(input.data + at * input.stride));
    }
  });

  // Memory a worker has to itself: gathered rows with their scales and sums, a block of results, the kernel's scratch.
  const size_t gather_rows = std::clamp<size_t>(kGatherBytes / gate_up_.row_bytes() / 32 * 32, 32, 256);
  const size_t gather_bytes = gather_rows * gate_up_.row_bytes();
  const size_t c_bytes = gather_rows * kPanel * sizeof(float);
  const size_t scale_bytes = gather_rows * sizeof(float);
  const size_t sums_bytes = (gather_rows * static_cast<size_t>(input.groups) * sizeof(int32_t) + 63) / 64 * 64;
  const size_t scratch = (std::max(scratch_bytes(gate_up_), scratch_bytes(down_)) + 63) / 64 * 64;
  const size_t thread_bytes = gather_bytes + c_bytes + scale_bytes + sums_bytes + scratch;
  std::byte* threads = workers.buffer(kThread, thread_bytes * static_cast<size_t>(workers.threads()));

  auto plan_tasks = [&](const Matrix& matrix) {
    routing.tasks.clear();
    const int all = matrix.panels * static_cast<int>(routing.active.size());
    const int even = std::max(1, all / (workers.threads() * 8));
    const int cached = std::max(1, static_cast<int>(kTaskBytes / matrix.panel_bytes()));
    for (const int expert : routing.active) {
      const bool few = routing.count[static_cast<size_t>(expert)] <= 4;
      // Gathering rows for one panel only would cost more than it saves.
      const int size = few ? even : std::min(cached, std::max(even, 4));
      for (int first = 0; first < matrix.panels; first += size)
        routing.tasks.push_back({expert, first, std::min(size, matrix.panels - first)});
    }
  };

  // 2: gate and up.
  const size_t h_stride = std::max<size_t>(static_cast<size_t>(down_.padded_k()),
                                           static_cast<size_t>(gate_up_.panels) * (config_.activation.has_gate ? kTile : kPanel));
  auto* hidden = reinterpret_cast<uint16_t*>(workers.buffer(kHidden, rows * h_stride * sizeof(uint16_t)));
  const size_t panel_columns = config_.activation.has_gate ? kTile : kPanel;
  const auto* gate_up_bias = reinterpret_cast<const float*>(gate_up_bias_.data());
  plan_tasks(gate_up_);
  each(static_cast<int>(routing.tasks.size()), [&](int index, int worker) {
    const Task& task = routing.tasks[static_cast<size_t>(index)];
    const auto expert = static_cast<size_t>(task.expert);
    const auto count = static_cast<size_t>(routing.count[expert]), start = static_cast<size_t>(routing.start[expert]);
    const Kernel& kernel = kernels_(static_cast<int>(count));
    std::byte* gathered = threads + static_cast<size_t>(worker) * thread_bytes;
    auto* c = reinterpret_cast<float*>(gathered + gather_bytes);
    auto* scale = reinterpret_cast<float*>(gathered + gather_bytes + c_bytes);
    auto* group_sums = reinterpret_cast<int32_t*>(gathered + gather_bytes + c_bytes + scale_bytes);
    std::byte* kernel_scratch = gathered + gather_bytes + c_bytes + scale_bytes + sums_bytes;
    for (size_t first = 0; first < count; first += gather_rows) {
      const size_t take = std::min(gather_rows, count - first);
      const int* token = routing.token.data() + start + first;
      Rows x{gathered, input.stride, static_cast<int>(take), scale, group_sums};
      if (take == 1) {
        const auto at = static_cast<size_t>(token[0]);
        x.data = input.data + at * input.stride;
        x.scale = input.scale + (quantised ? at : 0);
        x.group_sum = input.sums + at * static_cast<size_t>(input.groups);
      } else {
        for (size_t row = 0; row < take; ++row) {
          const auto at = static_cast<size_t>(token[row]);
          std::memcpy(gathered + row * input.stride, input.data + at * input.stride, input.stride);
          if (quantised) scale[row] = input.scale[at];
          if (sums)
            std::memcpy(group_sums + row * static_cast<size_t>(input.groups), input.sums + at * static_cast<size_t>(input.groups),
                        static_cast<size_t>(input.groups) * sizeof(int32_t));
        }
      }
      uint16_t* h = hidden + (start + first) * h_stride;
      for (int p = task.first_panel; p < task.first_panel + task.panels; ++p) {
        kernel.multiply(gate_up_, panel(gate_up_, gate_up_data_, task.expert, p), x, c, kernel_scratch);
        const float* bias = gate_up_bias == nullptr
                                ? nullptr
                                : gate_up_bias + (expert * static_cast<size_t>(gate_up_.panels) + static_cast<size_t>(p)) * kPanel;
        stages_->activate(config_.activation, c, bias, static_cast<int>(take), h + static_cast<size_t>(p) * panel_columns, h_stride);
      }
      // The padding that the next product reads; the weights there are zero, but zero times a stale NaN is not.
      const size_t written = static_cast<size_t>(gate_up_.panels) * panel_columns;
      if (task.first_panel + task.panels == gate_up_.panels && written < h_stride)
        for (size_t row = 0; row < take; ++row) std::fill(h + row * h_stride + written, h + (row + 1) * h_stride, uint16_t{0});
    }
  });

  // 3: quantise the intermediate.
  Activations inner{reinterpret_cast<std::byte*>(hidden), h_stride * sizeof(uint16_t), nullptr, nullptr, 0};
  if (quantised) {
    inner = activations(down_, rows, kHiddenQ, kHiddenScale, kHiddenSums);
    constexpr size_t kRowsPerTask = 4;
    each(static_cast<int>((rows + kRowsPerTask - 1) / kRowsPerTask), [&](int index, int) {
      const size_t first = static_cast<size_t>(index) * kRowsPerTask;
      for (size_t row = first; row < std::min(rows, first + kRowsPerTask); ++row)
        quantise(inner, down_, row, hidden + row * h_stride, DType::bf16);
    });
  }

  // 4: down. Rows of an expert lie together already.
  const size_t y_stride = static_cast<size_t>(down_.panels) * kPanel;
  auto* y = reinterpret_cast<float*>(workers.buffer(kOutput, rows * y_stride * sizeof(float)));
  plan_tasks(down_);
  each(static_cast<int>(routing.tasks.size()), [&](int index, int worker) {
    const Task& task = routing.tasks[static_cast<size_t>(index)];
    const auto expert = static_cast<size_t>(task.expert);
    const auto count = static_cast<size_t>(routing.count[expert]), start = static_cast<size_t>(routing.start[expert]);
    const Kernel& kernel = kernels_(static_cast<int>(count));
    std::byte* own = threads + static_cast<size_t>(worker) * thread_bytes;
    auto* c = reinterpret_cast<float*>(own + gather_bytes);
    std::byte* kernel_scratch = own + gather_bytes + c_bytes + scale_bytes + sums_bytes;
    for (size_t first = 0; first < count; first += gather_rows) {
      const size_t take = std::min(gather_rows, count - first), row = start + first;
      const Rows x{inner.data + row * inner.stride, inner.stride, static_cast<int>(take), inner.scale + (quantised ? row : 0),
                   inner.sums + row * static_cast<size_t>(inner.groups)};
      for (int p = task.first_panel; p < task.first_panel + task.panels; ++p) {
        kernel.multiply(down_, panel(down_, down_data_, task.expert, p), x, c, kernel_scratch);
        float* target = y + row * y_stride + static_cast<size_t>(p) * kPanel;
        for (size_t r = 0; r < take; ++r) std::memcpy(target + r * y_stride, c + r * kPanel, kPanel * sizeof(float));
      }
    }
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
        const auto after = std::upper_bound(routing.start.begin(), routing.start.end(), row) - routing.start.begin();
        biases[used] = down_bias + static_cast<size_t>(after - 1) * y_stride + column;
      }
      weight[used++] = pass.weights[at];
    }
    auto* out = static_cast<std::byte*>(pass.out) +
                (static_cast<size_t>(token) * static_cast<size_t>(config_.hidden_size) + static_cast<size_t>(column)) * out_bytes;
    stages_->combine(terms, down_bias == nullptr ? nullptr : biases, weight, used, std::min(kColumns, config_.hidden_size - column),
                     pass.dtype, out);
  });
}

}  // namespace ktinject
