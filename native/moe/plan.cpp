#include "moe/plan.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace ktinject::moe {
namespace {

// Layers with less than this to do are left to the caller: waking workers would cost more.
constexpr size_t kSerialBytes = size_t{128} << 10;
// Layers that read less than this, a millisecond or two, leave a whole core to the host; in longer ones it has the
// time.
constexpr size_t kShortBytes = size_t{256} << 20;
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
constexpr size_t kUncachedBytes = size_t{128} << 20;

int cost_of(const Routing& routing, int expert) { return std::max(kReadRows, routing.count_of(expert)); }

// Part `i` of `pieces` of [0, all), as even as possible: {first, count}.
std::pair<int, int> piece_of(int all, int i, int pieces) {
  const auto first = static_cast<int>(int64_t{all} * i / pieces);
  return {first, static_cast<int>(int64_t{all} * (i + 1) / pieces) - first};
}

// Panels that one projection of a shard is cut into.
struct Cut {
  const gemm::Matrix& matrix;
  int shard_panels;  // of the whole shard
  int first, panels;
  int workers;  // that the shard's whole part is for
};

// add(task) for panels of every active expert.
template <class Add>
void cut_panels(const Routing& routing, const Cut& cut, Add&& add) {
  size_t all = 0;
  for (const int expert : routing.active) all += static_cast<size_t>(cost_of(routing, expert));
  all *= static_cast<size_t>(cut.shard_panels);
  const size_t each = all / static_cast<size_t>(cut.workers);
  const size_t least = kReadRows * kLeastTaskBytes / cut.matrix.panel_bytes();
  const size_t work = std::max(each / kTasksPerThread, std::min(each, least));
  for (size_t place = 0; place < routing.active.size(); ++place) {
    const int size = std::clamp(static_cast<int>(work) / cost_of(routing, routing.active[place]), 1, cut.panels);
    const int pieces = (cut.panels + size - 1) / size;
    for (int i = 0; i < pieces; ++i) {
      const auto [begin, count] = piece_of(cut.panels, i, pieces);
      add(MoeTask{static_cast<int>(place), cut.first + begin, count});
    }
  }
}

ActivationBytes bytes_of(const gemm::Matrix& matrix, size_t rows, const MoeShape& shape) {
  return {rows * matrix.row_bytes(),
          shape.is_quantised() ? rows * static_cast<size_t>(matrix.row_scales()) * sizeof(float) : 0,
          shape.has_sums() ? rows * static_cast<size_t>(matrix.groups()) * sizeof(int32_t) : 0,
          gemm::has_outliers(matrix.format) ? rows * sizeof(gemm::Outliers) : 0};
}

}  // namespace

void MoePlan::make(const Routing& routing, const MoeShape& shape, int tokens, int round) {
  const size_t rows = routing.rows();
  active_ = routing.active.size();
  caller_converts = tokens <= kTokensAlone;
  const size_t active_bytes = active_ * (shape.gate_up.bytes() + shape.down.bytes());
  caller_alone = active_bytes * std::max<size_t>(1, rows / std::max<size_t>(1, active_) / kReadRows) < kSerialBytes;
  reads_only = rows <= active_ * kReadRows;
  is_short = reads_only && active_bytes < kShortBytes;
  quantises_at_once = shape.is_quantised() && reads_only;
  cut_rounds(shape, rows, round);
  size_buffers(rows, shape, tokens);
  if (is_made_for(routing, shape, tokens, round)) return;

  lists.resize(shape.shards.size() <= shape.workers.size() ? shape.shards.size() : 1);
  for (auto& list : lists) list.clear();
  cut_chunks(shape, rows);
  signals.assign(1 + chunks.size() + 3 * active_, 0);
  begin(kInputs);
  if (round == 0 && !caller_converts) add_inputs(shape, tokens);
  begin(kGather);
  if (round == 0 && !caller_converts) add_gather(routing);
  begin(kGateUp);
  if (round == 0) add_gate_up(routing, shape);
  begin(kQuantise);
  if (round == 0 && shape.is_quantised()) add_quantise(routing, shape);
  begin(kDown);
  add_down(routing, shape);
  begin(kSum);
  add_sums(shape, tokens);
  sizes.resize(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) sizes[i] = static_cast<int>(lists[i].size());
  made_for_ = wanted_;
}

void MoePlan::size_buffers(size_t rows, const MoeShape& shape, int tokens) {
  input = bytes_of(shape.gate_up, static_cast<size_t>(tokens), shape);
  gathered = bytes_of(shape.gate_up, rows, shape);
  inner = bytes_of(shape.down, rows, shape);
  hidden_stride = static_cast<size_t>(gemm::round_up(shape.down.k, gemm::kPanel));
  hidden = shape.is_quantised() ? rows * hidden_stride * sizeof(uint16_t) : 0;
  results.resize(shape.shards.size());
  for (size_t shard = 0; shard < shape.shards.size(); ++shard)
    results[shard] = rows * static_cast<size_t>(columns[shard].panels) * gemm::kPanel * sizeof(float);
  own = kResultBytes + shape.down.row_bytes() +
        std::max(gemm::scratch_bytes(shape.gate_up), gemm::scratch_bytes(shape.down));
}

// With a row for each expert, tasks depend on how many there are and not on which.
bool MoePlan::is_made_for(const Routing& routing, const MoeShape& shape, int tokens, int round) {
  wanted_.assign({tokens, round, static_cast<int>(active_), static_cast<int>(routing.rows()), shape.threads,
                  shape.is_quantised(), static_cast<int>(shape.gate_up.panel_bytes()),
                  static_cast<int>(shape.down.panel_bytes())});
  wanted_.insert(wanted_.end(), shape.workers.begin(), shape.workers.end());
  for (const Shard& shard : shape.shards)
    wanted_.insert(wanted_.end(), {shard.gate_up.first, shard.gate_up.panels, shard.down.first, shard.down.panels});
  if (routing.rows() == active_ && wanted_ == made_for_) return true;
  made_for_.clear();  // an allocation that fails leaves half a plan
  return false;
}

void MoePlan::cut_rounds(const MoeShape& shape, size_t rows, int round) {
  const size_t all = rows * static_cast<size_t>(shape.down.panels) * gemm::kPanel * sizeof(float);
  rounds = static_cast<int>(
      std::clamp<size_t>((all + kMostRoundBytes - 1) / kMostRoundBytes, 1, static_cast<size_t>(shape.down.panels)));
  bypasses_caches = all / static_cast<size_t>(rounds) > kUncachedBytes;
  columns.clear();
  for (const Shard& shard : shape.shards) {
    const auto [first, panels] = piece_of(shard.down.panels, round, rounds);
    columns.push_back({shard.down.first + first, panels});
  }
}

void MoePlan::cut_chunks(const MoeShape& shape, size_t rows) {
  chunks.clear();
  for (size_t shard = 0; shard < shape.shards.size(); ++shard) {
    const Columns& part = columns[shard];
    if (part.panels == 0) continue;
    const int pieces = rows > kChunkedRows ? 1 : std::min(part.panels, kChunks);
    for (int i = 0; i < pieces; ++i) {
      const auto [begin, count] = piece_of(part.panels, i, pieces);
      chunks.push_back({static_cast<int>(shard), part.first + begin, count});
    }
  }
}

void MoePlan::begin(Stage stage) {
  auto& at = begins[static_cast<size_t>(stage)];
  at.resize(lists.size());
  for (size_t i = 0; i < lists.size(); ++i) at[i] = static_cast<int>(lists[i].size());
}

void MoePlan::add(size_t list, const MoeTask& task, size_t counter) {
  lists[list].push_back(task);
  ++signals[counter];
}

void MoePlan::add_inputs(const MoeShape& shape, int tokens) {
  const int pieces = std::min(tokens, shape.threads * kTasksPerThread);
  for (int i = 0; i < pieces; ++i) {
    const auto [first, count] = piece_of(tokens, i, pieces);
    add(static_cast<size_t>(i) % lists.size(), {0, first, count}, inputs_done());
  }
}

void MoePlan::add_gather(const Routing& routing) {
  size_t next = 0;
  routing.for_groups(
      [&](int place, int first, int rows) { add(next++ % lists.size(), {place, first, rows}, gather_done(place)); });
}

void MoePlan::add_gate_up(const Routing& routing, const MoeShape& shape) {
  for (size_t shard = 0; shard < shape.shards.size(); ++shard) {
    const Shard::Part& part = shape.shards[shard].gate_up;
    if (part.panels == 0) continue;
    const int workers = lists.size() == 1 ? shape.threads : std::max(1, shape.workers[shard]);
    cut_panels(routing, {shape.gate_up, part.panels, part.first, part.panels, workers},
               [&](const MoeTask& task) { add(list_of(shard), task, gate_up_done(task.of)); });
  }
}

void MoePlan::add_quantise(const Routing& routing, const MoeShape& shape) {
  if (quantises_at_once) {
    for (int place = 0; place < static_cast<int>(active_); ++place) ++signals[quantise_done(place)];
    return;
  }
  const int size = std::clamp(static_cast<int>(routing.rows()) / (shape.threads * kTasksPerThread), 1, gemm::kTile);
  size_t next = 0;
  for (int place = 0; place < static_cast<int>(active_); ++place) {
    const int count = routing.count_of(routing.active_at(place));
    for (int first = 0; first < count; first += size)
      add(next++ % lists.size(), {place, first, std::min(size, count - first)}, quantise_done(place));
  }
}

void MoePlan::add_down(const Routing& routing, const MoeShape& shape) {
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    const auto shard = static_cast<size_t>(chunk.shard);
    const int workers = lists.size() == 1 ? shape.threads : std::max(1, shape.workers[shard]);
    cut_panels(routing, {shape.down, columns[shard].panels, chunk.first, chunk.panels, workers},
               [&](const MoeTask& task) { add(list_of(shard), task, down_done(static_cast<int>(i))); });
  }
}

void MoePlan::add_sums(const MoeShape& shape, int tokens) {
  const int sums = shape.threads * kTasksPerThread;
  const int pieces = std::clamp(sums / std::max(1, static_cast<int>(chunks.size())), 1, tokens);
  for (size_t i = 0; i < chunks.size(); ++i)
    for (int piece = 0; piece < pieces; ++piece) {
      const auto [first, count] = piece_of(tokens, piece, pieces);
      lists[list_of(static_cast<size_t>(chunks[i].shard))].push_back({static_cast<int>(i), first, count});
    }
}

}  // namespace ktinject::moe
