// What a layer is made of: sizes, shards, memory. The weights are in experts_weights.cpp, the forward pass in
// forward.cpp.
#include "moe/experts.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "runtime/thread_pool.hpp"

namespace ktinject::moe {

Experts::Experts(ExpertsConfig config)
    : config_(std::move(config)),
      kernels_(gemm::choose_kernel(config_.format, config_.kernel)),
      down_kernels_(config_.down_format == config_.format ? kernels_
                                                          : gemm::choose_kernel(config_.down_format, config_.kernel)),
      vector_ops_(&kernels_.vector_ops()) {
  gemm::check_size("experts", config_.experts, 1 << 16);
  gemm::check_inputs("hidden_size", config_.format, config_.hidden_size);
  gemm::check_inputs("intermediate_size", config_.down_format, config_.intermediate_size);
  if (config_.down_format != config_.format &&
      !(gemm::is_k_quant(config_.format) && gemm::is_k_quant(config_.down_format)))
    throw std::invalid_argument(std::string("down_weights: found ") + gemm::format_name(config_.down_format) +
                                " beside weights of " + gemm::format_name(config_.format) +
                                "; only K-quants may differ");
  gemm::check_format(config_.format, config_.group_size, config_.symmetric);
  const bool gate = config_.activation.has_gate;
  const int inner = config_.intermediate_size;
  const int group_size = gemm::scale_group(config_.format, config_.group_size);
  gate_up_ = {config_.format,
              gate ? 2 * inner : inner,
              config_.hidden_size,
              group_size,
              gate ? (inner + gemm::kTile - 1) / gemm::kTile : (inner + gemm::kPanel - 1) / gemm::kPanel,
              config_.symmetric};
  down_ = {config_.down_format,
           config_.hidden_size,
           inner,
           gemm::scale_group(config_.down_format, config_.group_size),
           (config_.hidden_size + gemm::kPanel - 1) / gemm::kPanel,
           config_.symmetric};
  loaded_.assign(static_cast<size_t>(config_.experts) * 3 * 2, 0);
  absent_ = static_cast<size_t>(config_.experts) * absent_of(0).size();
  released_ = std::vector<std::atomic<uint8_t>>(static_cast<size_t>(config_.experts));

  const std::vector<runtime::Node> there = runtime::nodes();
  const auto most = static_cast<int>(there.size());
  const int parts = config_.nodes == 0 ? most : config_.nodes;
  if (parts < 1 || parts > most)
    throw std::invalid_argument("numa: found " + std::to_string(parts) + "; allowed: auto, or 1 to " +
                                std::to_string(most) +
                                ", the usable NUMA nodes here (KTINJECT_NUMA makes virtual ones)");
  // Real nodes get panels by their CPUs, which may differ; virtual ones as many each.
  auto weight = [&](int i) {
    const runtime::Node& node = there[static_cast<size_t>(i)];
    return node.id >= 0 ? static_cast<int64_t>(node.cpus.size()) : int64_t{1};
  };
  int64_t all = 0, before = 0;
  for (int i = 0; i < parts; ++i) all += weight(i);
  shards_.resize(static_cast<size_t>(parts));
  for (int i = 0; i < parts; ++i) {
    const int64_t until = before + weight(i);
    auto cut = [&](int panels, Shard::Part& part) {
      part.first = static_cast<int>((panels * before + all / 2) / all);
      part.panels = static_cast<int>((panels * until + all / 2) / all) - part.first;
    };
    cut(gate_up_.panels, shards_[static_cast<size_t>(i)].gate_up);
    cut(down_.panels, shards_[static_cast<size_t>(i)].down);
    before = until;
  }
}

size_t Experts::bytes() const {
  const size_t weights = gate_up_.bytes() + down_.bytes();
  const size_t biases =
      config_.has_bias ? static_cast<size_t>(gate_up_.panels + down_.panels) * gemm::kPanel * sizeof(float) : 0;
  return static_cast<size_t>(config_.experts) * (weights + biases);
}

std::string Experts::not_placed() const {
  const runtime::Session session;
  return not_placed_;
}

void Experts::allocate() {
  const runtime::Session session;
  if (allocated_) throw std::logic_error("allocate: these experts have their memory already; make others");
  const auto experts = static_cast<size_t>(config_.experts);
  runtime::Block gate_up_bias, down_bias;
  std::vector<runtime::Block> blocks;
  std::string refused;
  const std::vector<runtime::Node> there = runtime::nodes();
  for (size_t i = 0; i < shards_.size(); ++i)
    for (const Projection projection : {Projection::up, Projection::down}) {
      const auto panels = static_cast<size_t>(part_of(shards_[i], projection).panels);
      const runtime::Block& block = blocks.emplace_back(experts * panels * matrix_of(projection).panel_bytes());
      // Uncut weights on several nodes: their pages take turns, so that all memory channels serve them.
      std::string reason;
      if (shards_.size() == 1 && there[0].id >= 0) reason = runtime::interleave(block.data(), block.size(), there);
      else if (i < there.size() && there[i].id >= 0)
        reason = runtime::place_on_node(block.data(), block.size(), there[i].id);
      if (refused.empty()) refused = reason;
    }
  if (config_.has_bias) {
    gate_up_bias = runtime::Block(experts * static_cast<size_t>(gate_up_.panels) * gemm::kPanel * sizeof(float));
    down_bias = runtime::Block(experts * static_cast<size_t>(down_.panels) * gemm::kPanel * sizeof(float));
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].gate_up.data = std::move(blocks[2 * i]);
    shards_[i].down.data = std::move(blocks[2 * i + 1]);
  }
  not_placed_ = std::move(refused);
  gate_up_bias_ = std::move(gate_up_bias);
  down_bias_ = std::move(down_bias);
  allocated_ = true;
}

std::byte* Experts::panel(Projection projection, int expert, int index) const {
  for (const Shard& shard : shards_) {
    const Shard::Part& part = part_of(shard, projection);
    if (index < part.first + part.panels)
      return part.data.data() + (static_cast<size_t>(expert) * static_cast<size_t>(part.panels) +
                                 static_cast<size_t>(index - part.first)) *
                                    matrix_of(projection).panel_bytes();
  }
  throw std::logic_error("a panel outside the matrix");
}

void Experts::repeat(int expert) {
  const runtime::Session workers;
  if (expert < 0 || expert >= config_.experts || !allocated_ || is_released(expert))
    throw std::invalid_argument("repeat: there is no such expert, or no memory yet, or it is not in RAM");
  workers->parallel_for(config_.experts, [&](int e, int) {
    if (e == expert) return;
    for (const Projection projection : {Projection::up, Projection::down}) {
      const gemm::Matrix& matrix = matrix_of(projection);
      for (int i = 0; i < matrix.panels; ++i)
        std::memcpy(panel(projection, e, i), panel(projection, expert, i), matrix.panel_bytes());
      if (!config_.has_bias) continue;
      const runtime::Block& biases = projection == Projection::down ? down_bias_ : gate_up_bias_;
      const size_t bytes = static_cast<size_t>(matrix.panels) * gemm::kPanel * sizeof(float);
      std::memcpy(biases.data() + static_cast<size_t>(e) * bytes, biases.data() + static_cast<size_t>(expert) * bytes,
                  bytes);
    }
  });
  const auto marks = static_cast<ptrdiff_t>(loaded_.size()) / config_.experts;
  for (ptrdiff_t e = 0; e < config_.experts; ++e)
    if (e != expert) std::copy_n(loaded_.begin() + expert * marks, marks, loaded_.begin() + e * marks);
  absent_ = static_cast<size_t>(config_.experts) * absent_of(expert).size();
  for (auto& one : released_) one = 0;
}

}  // namespace ktinject::moe
