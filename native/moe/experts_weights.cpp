// The weights of experts: checked, packed, and given back.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "moe/experts.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::moe {
namespace {

const char* name_of(Projection projection) {
  return projection == Projection::gate ? "gate" : projection == Projection::up ? "up" : "down";
}

// Where a projection's outputs lie.
gemm::TileMap tiles_of(const ExpertsConfig& config, Projection projection) {
  if (projection == Projection::down || !config.activation.has_gate) return gemm::paired_tiles;
  return projection == Projection::up ? gemm::second_tiles : gemm::first_tiles;
}

std::string title(Projection projection, int expert) {
  return "expert " + std::to_string(expert) + ", " + name_of(projection);
}

}  // namespace

int Experts::rows_of(Projection projection) const {
  return projection == Projection::down ? config_.hidden_size : config_.intermediate_size;
}
int Experts::inputs_of(Projection projection) const {
  return projection == Projection::down ? config_.intermediate_size : config_.hidden_size;
}

void Experts::check(Projection projection, int expert, int n, int k, bool bias) const {
  auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(title(projection, expert) + (bias ? " bias" : "") + ": " + why);
  };
  if (!allocated_) refuse("allocate() was not called");
  if (expert < 0 || expert >= config_.experts)
    refuse("there is no such expert; allowed: 0 to " + std::to_string(config_.experts - 1));
  if (projection == Projection::gate && !config_.activation.has_gate) refuse("these experts have no gate; use up");
  if (bias && !config_.has_bias) refuse("these experts were built without biases");
  const int rows = rows_of(projection), inputs = bias ? 1 : inputs_of(projection);
  if (n != rows || k != inputs)
    refuse("found shape [" + std::to_string(n) + ", " + std::to_string(k) + "]; expected [" + std::to_string(rows) +
           ", " + std::to_string(inputs) + "]");
}

std::vector<gemm::PanelRun> Experts::runs_of(Projection projection, int expert) const {
  std::vector<gemm::PanelRun> runs;
  for (const Shard& shard : shards_) {
    const Shard::Part& part = part_of(shard, projection);
    const size_t before = static_cast<size_t>(expert) * static_cast<size_t>(part.panels);
    runs.push_back({part.first, part.panels, part.data.data() + before * matrix_of(projection).panel_bytes()});
  }
  return runs;
}

template <class Pack>
void Experts::load_as(Projection projection, int expert, int n, int k, const Pack& pack) {
  const runtime::Session workers;
  check(projection, expert, n, k, false);
  if (is_released(expert))
    throw std::invalid_argument(title(projection, expert) + ": the expert was loaded before, and has left RAM since");
  const std::vector<gemm::PanelRun> runs = runs_of(projection, expert);
  uint8_t& is_loaded = mark(projection, expert, false);
  if (is_loaded == 0) {
    pack(*workers, tiles_of(config_, projection), runs, title(projection, expert));
    is_loaded = 1;
    --absent_;
    return;
  }
  // A weight that is there stays as it is until all of the new one is packed: packing may end by an error. The panels
  // may hold another projection's outputs, too, and stay where they are: their memory may be known to a GPU.
  const gemm::Matrix& matrix = matrix_of(projection);
  const auto bytes_of = [&](int panels) { return static_cast<size_t>(panels) * matrix.panel_bytes(); };
  runtime::Block copy(matrix.bytes());
  std::vector<gemm::PanelRun> copies = runs;
  for (gemm::PanelRun& run : copies) {
    const std::byte* const from = std::exchange(run.data, copy.data() + bytes_of(run.first));
    std::memcpy(run.data, from, bytes_of(run.panels));
  }
  pack(*workers, tiles_of(config_, projection), copies, title(projection, expert));
  for (size_t i = 0; i < runs.size(); ++i) std::memcpy(runs[i].data, copies[i].data, bytes_of(runs[i].panels));
}

void Experts::load(Projection projection, int expert, const gemm::Source& source) {
  load_as(projection, expert, source.n, source.k, [&](auto& workers, const auto&... to) {
    gemm::pack_matrix(workers, matrix_of(projection), *vector_ops_, source, to...);
  });
}

void Experts::load_integers(Projection projection, int expert, const gemm::IntegerSource& source) {
  load_as(projection, expert, source.n, source.k, [&](auto& workers, const auto&... to) {
    gemm::pack_integers(workers, matrix_of(projection), source, to...);
  });
}

void Experts::load_fp8(Projection projection, int expert, const gemm::Fp8Source& source) {
  load_as(projection, expert, source.n, source.k,
          [&](auto& workers, const auto&... to) { gemm::pack_fp8(workers, matrix_of(projection), source, to...); });
}

void Experts::load_nvfp4(Projection projection, int expert, const gemm::Nvfp4Source& source) {
  load_as(projection, expert, source.n, source.k,
          [&](auto& workers, const auto&... to) { gemm::pack_nvfp4(workers, matrix_of(projection), source, to...); });
}

void Experts::load_blocks(Projection projection, int expert, const gemm::KSource& source) {
  // The length of the rows tells how many inputs there are; it is checked where they are packed.
  load_as(projection, expert, source.n, inputs_of(projection), [&](auto& workers, const auto&... to) {
    gemm::pack_k_quants(workers, matrix_of(projection), source, to...);
  });
}

void Experts::load_bias(Projection projection, int expert, const gemm::Source& source) {
  const runtime::Session session;
  check(projection, expert, source.n, source.k, true);
  const gemm::Matrix& matrix = projection == Projection::down ? down_ : gate_up_;
  auto* bias = reinterpret_cast<float*>((projection == Projection::down ? down_bias_ : gate_up_bias_).data()) +
               static_cast<size_t>(expert) * static_cast<size_t>(matrix.panels) * gemm::kPanel;
  const gemm::TileMap place = tiles_of(config_, projection);
  std::vector<float> values(static_cast<size_t>(source.n));
  vector_ops_->widen(source.data, source.dtype, source.n_stride, source.n, values.data());
  for (int n = 0; n < source.n; ++n) {
    const gemm::TileAt at = place(n / gemm::kTile);
    bias[at.panel * gemm::kPanel + at.second * gemm::kTile + n % gemm::kTile] = values[static_cast<size_t>(n)];
  }
  if (std::exchange(mark(projection, expert, true), uint8_t{1}) == 0) --absent_;
}

std::vector<std::string> Experts::absent(size_t limit) const {
  const runtime::Session session;
  std::vector<std::string> names;
  for (int expert = 0; expert < config_.experts && names.size() < limit; ++expert)
    for (std::string& name : absent_of(expert)) names.push_back(std::move(name));
  if (names.size() > limit) names.resize(limit);
  return names;
}

std::vector<std::string> Experts::absent_of(int expert) const {
  std::vector<std::string> names;
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    if (projection == Projection::gate && !config_.activation.has_gate) continue;
    const std::string name = "expert " + std::to_string(expert) + " " + name_of(projection);
    if (!is_loaded(projection, expert, false)) names.push_back(name);
    if (config_.has_bias && !is_loaded(projection, expert, true)) names.push_back(name + " bias");
  }
  return names;
}

void Experts::release(int expert) {
  const runtime::Session session;
  if (expert < 0 || expert >= config_.experts || !allocated_)
    throw std::invalid_argument("release: there is no expert " + std::to_string(expert) + ", or no memory yet");
  for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
    if (projection == Projection::gate && !config_.activation.has_gate) continue;
    if (!is_loaded(projection, expert, false) || (config_.has_bias && !is_loaded(projection, expert, true)))
      throw std::invalid_argument(title(projection, expert) + ": was not loaded yet, so the expert cannot leave RAM");
  }
  released_[static_cast<size_t>(expert)] = 1;
  for (const PackedRun& run : packed())
    runtime::Block::release(const_cast<std::byte*>(run.data) + run.bytes(expert), run.bytes(1));
}

size_t Experts::released_bytes() const {
  size_t bytes = 0;
  for (const PackedRun& run : packed()) bytes += runtime::Block::released(run.bytes(1));
  return bytes;
}

void Experts::unpack(Projection projection, int expert, float* out) const {
  const int rows = rows_of(projection);
  const runtime::Session workers;
  check(projection, expert, rows, inputs_of(projection), false);
  if (is_released(expert)) throw std::invalid_argument(title(projection, expert) + ": the expert is not in RAM");
  gemm::unpack_matrix(*workers, matrix_of(projection), runs_of(projection, expert), tiles_of(config_, projection), rows,
                      out);
}

void Experts::unpack_bias(Projection projection, int expert, float* out) const {
  const int rows = rows_of(projection);
  const runtime::Session session;
  check(projection, expert, rows, 1, true);
  const gemm::Matrix& matrix = projection == Projection::down ? down_ : gate_up_;
  const auto* bias =
      reinterpret_cast<const float*>((projection == Projection::down ? down_bias_ : gate_up_bias_).data()) +
      static_cast<size_t>(expert) * static_cast<size_t>(matrix.panels) * gemm::kPanel;
  const gemm::TileMap place = tiles_of(config_, projection);
  for (int n = 0; n < rows; ++n) {
    const gemm::TileAt at = place(n / gemm::kTile);
    out[n] = bias[at.panel * gemm::kPanel + at.second * gemm::kTile + n % gemm::kTile];
  }
}

void Experts::touch() {
  constexpr size_t kStep = size_t{2} << 20, kPage = 4096;
  const runtime::Session workers;
  if (not_placed_.empty()) return;
  for (const Projection projection : {Projection::up, Projection::down}) {
    std::vector<int> lists;
    for (const Shard& shard : shards_)
      lists.push_back(static_cast<int>((part_of(shard, projection).data.size() + kStep - 1) / kStep));
    if (lists.size() > workers->nodes().size()) return;
    auto task = [&](int list, int index, int) {
      const runtime::Block& block = part_of(shards_[static_cast<size_t>(list)], projection).data;
      const size_t start = static_cast<size_t>(index) * kStep, end = std::min(block.size(), start + kStep);
      for (size_t at = start; at < end; at += kPage) block.data()[at] = std::byte{0};
    };
    workers->parallel_lists(lists, task,
                            lists.size() > 1 ? runtime::ThreadPool::Steal::no : runtime::ThreadPool::Steal::yes);
  }
}

void Experts::mark_loaded() {
  const runtime::Session session;
  if (!allocated_) throw std::invalid_argument("mark_loaded: allocate() was not called");
  std::fill(loaded_.begin(), loaded_.end(), uint8_t{1});
  absent_ = 0;
  for (auto& one : released_) one = 0;
}

std::vector<PackedRun> Experts::packed() const {
  std::vector<PackedRun> runs;
  for (const Shard& shard : shards_) {
    runs.push_back({gate_up_, false, shard.gate_up.first, shard.gate_up.panels, shard.gate_up.data.data()});
    runs.push_back({down_, true, shard.down.first, shard.down.panels, shard.down.data.data()});
  }
  return runs;
}

}  // namespace ktinject::moe
