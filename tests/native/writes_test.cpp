// Weights that are written anew, in part or with values that are refused: what was there stays until all is new, and
// nothing computes with less than whole weights.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gemm/linear.hpp"
#include "moe/experts.hpp"
#include "native_test.hpp"

using namespace ktinject;
using namespace ktinject::gemm;
using namespace ktinject::moe;
using namespace ktinject::runtime;

namespace {

constexpr int kOutputs = 200, kInputs = 128, kRows = 3;

std::vector<float> random_values(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// With a value in the last but one of the outputs that no scale is found for; those before it can be packed.
std::vector<float> spoilt(std::vector<float> values, int outputs, int inputs) {
  values[static_cast<size_t>(outputs - 2) * static_cast<size_t>(inputs) + 5] = NAN;
  return values;
}

Source source(const std::vector<float>& values, int outputs, int inputs) {
  return {values.data(), DType::f32, outputs, inputs, inputs, 1};
}

void test_linear(Format format, const char* name) {
  Linear linear({kOutputs, kInputs, format, format == Format::int4 ? 32 : 0, true, false});
  linear.allocate();
  constexpr size_t kWeights = static_cast<size_t>(kOutputs) * kInputs;
  const std::vector<float> first = random_values(kWeights, 1), second = random_values(kWeights, 2);
  const std::vector<float> bad = spoilt(second, kOutputs, kInputs);
  const std::vector<float> x = random_values(static_cast<size_t>(kRows) * kInputs, 3);
  const std::string what = std::string("linear, ") + name + ": ";
  const auto compute = [&] {
    std::vector<float> y(static_cast<size_t>(kRows) * kOutputs);
    linear.forward(x.data(), DType::f32, kRows, y.data());
    return y;
  };
  const auto bits = [&] { return std::vector<std::byte>(linear.packed(), linear.packed() + linear.matrix().bytes()); };
  const auto is_refused = [&] {
    return throws<std::domain_error>([&] { linear.load(source(bad, kOutputs, kInputs)); });
  };
  check(throws<std::invalid_argument>(compute), what + "nothing is computed with a weight that never came");
  check(is_refused() && !linear.has_weight(), what + "a first weight is refused");
  check(throws<std::invalid_argument>(compute), what + "nothing is computed with what is left of it");
  linear.load(source(first, kOutputs, kInputs));
  const std::vector<std::byte> packed = bits();
  const std::vector<float> want = compute();
  check(is_refused() && linear.has_weight(), what + "a second weight is refused");
  check(bits() == packed && compute() == want, what + "the first one is as it was");
  linear.load(source(second, kOutputs, kInputs));
  check(bits() != packed, what + "the next one is taken");
  linear.load(source(first, kOutputs, kInputs));
  check(bits() == packed, what + "the first one is taken again");
}

void test_experts(Format format, const char* name, int nodes) {
  set_nodes(nodes);
  ExpertsConfig config;
  config.experts = 3;
  config.hidden_size = kInputs;
  config.intermediate_size = kOutputs;
  config.format = config.down_format = format;
  config.group_size = format == Format::int4 ? 32 : 0;
  config.activation.gate_max = config.activation.up_limit = std::numeric_limits<float>::infinity();
  Experts experts(config);
  experts.allocate();
  constexpr size_t kWeights = static_cast<size_t>(kOutputs) * kInputs;
  const std::vector<float> first = random_values(kWeights, 1), second = random_values(kWeights, 2);
  const std::vector<float> x = random_values(static_cast<size_t>(kRows) * kInputs, 3);
  const std::string what = std::string("experts, ") + name + ", nodes " + std::to_string(nodes) + ": ";
  const auto load = [&](Projection projection, int expert, const std::vector<float>& values) {
    const bool down = projection == Projection::down;
    const int n = down ? kInputs : kOutputs, k = down ? kOutputs : kInputs;
    experts.load(projection, expert, source(values, n, k));
  };
  const auto is_refused = [&](Projection projection, int expert) {
    const bool down = projection == Projection::down;
    const std::vector<float> bad = spoilt(second, down ? kInputs : kOutputs, down ? kOutputs : kInputs);
    return throws<std::domain_error>([&] { load(projection, expert, bad); });
  };
  const auto compute = [&](int expert) {
    std::vector<float> y(x.size());
    const std::vector<int> ids{expert, -1, expert};
    const std::vector<float> weights{0.5f, 0.5f, 1.0f};
    experts.forward(x.data(), DType::f32, ids.data(), weights.data(), kRows, 1, y.data());
    return y;
  };
  const auto bits = [&] {
    std::vector<std::byte> all;
    for (const PackedRun& run : experts.packed()) all.insert(all.end(), run.data, run.data + run.bytes(config.experts));
    return all;
  };
  constexpr Projection kAll[] = {Projection::gate, Projection::up, Projection::down};
  for (const Projection projection : kAll)
    for (const int expert : {0, 2}) load(projection, expert, first);
  load(Projection::gate, 1, first);
  check(is_refused(Projection::up, 1), what + "a first weight is refused");
  check(throws<std::invalid_argument>([&] { compute(1); }), what + "an expert that is not whole computes nothing");
  const std::vector<float> want = compute(2);
  for (const Projection projection : {Projection::up, Projection::down}) load(projection, 1, first);
  check(compute(1) == want, what + "it does once it is whole");
  const std::vector<std::byte> packed = bits();
  for (const Projection projection : kAll) {
    check(is_refused(projection, 1), what + "a second weight is refused");
    check(bits() == packed && experts.absent(1).empty() && compute(1) == want, what + "the first one is as it was");
    load(projection, 1, second);
    check(bits() != packed, what + "the next one is taken");
    load(projection, 1, first);
    check(bits() == packed, what + "the first one is taken again");
  }
  set_nodes(0);
}

}  // namespace

void test_writes() {
  set_threads(2, true);
  for (const FormatName& format : kFormatNames) {
    if (format.format == Format::bf16 || is_k_quant(format.format)) continue;  // neither refuses values
    test_linear(format.format, format.name);
    for (const int nodes : {1, 3}) test_experts(format.format, format.name, nodes);
  }
  // More products of one input than there is room for.
  Linear one({32, 32, Format::bf16, 0, true, false});
  one.allocate();
  one.mark_loaded();
  std::vector<float> x(32), y(32);
  const std::vector<Linear::Product> many(Linear::kMostTogether + 1, {&one, y.data()});
  const Session workers;
  check(throws<std::invalid_argument>([&] { const Linear::Tasks tasks(*workers, many, DType::f32, 1); }),
        "more products of one input than there is room for are refused");
}
