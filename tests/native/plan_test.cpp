// The plan of a pass over an experts layer: pure, so it is checked for layers and machines that are not there.
#include "moe/plan.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "native_test.hpp"

using namespace ktinject;
using namespace ktinject::gemm;
using namespace ktinject::moe;

namespace {

// Shapes of a layer whose panels are cut among `nodes` nodes of two workers each.
struct Shapes {
  Matrix gate_up, down;
  std::vector<Shard> shards;
  std::vector<int> workers;

  Shapes(Format format, int hidden, int inner, int nodes) : shards(static_cast<size_t>(nodes)) {
    const int group = scale_group(format, 32);
    gate_up = {format, 2 * inner, hidden, group, (inner + kTile - 1) / kTile, true};
    down = {format, hidden, inner, group, (hidden + kPanel - 1) / kPanel, true};
    workers.assign(static_cast<size_t>(nodes), 2);
    for (int node = 0; node < nodes; ++node) {
      const auto cut = [&](int panels, Shard::Part& part) {
        part.first = panels * node / nodes;
        part.panels = panels * (node + 1) / nodes - part.first;
      };
      cut(gate_up.panels, shards[static_cast<size_t>(node)].gate_up);
      cut(down.panels, shards[static_cast<size_t>(node)].down);
    }
  }
  MoeShape shape() const { return {gate_up, down, shards, workers, static_cast<int>(2 * shards.size())}; }
};

// How often each (of, item) of a stage is done, over all lists.
std::vector<int> times_done(const MoePlan& plan, Stage stage, int items) {
  std::vector<int> times;
  for (size_t list = 0; list < plan.lists.size(); ++list)
    for (int i = 0; i < plan.sizes[list]; ++i) {
      if (plan.stage_of(static_cast<int>(list), i) != stage) continue;
      const MoeTask& task = plan.lists[list][static_cast<size_t>(i)];
      const auto end = static_cast<size_t>(task.of * items + task.first + task.count);
      if (times.size() < end) times.resize(end);
      for (int item = task.first; item < task.first + task.count; ++item)
        ++times[static_cast<size_t>(task.of * items + item)];
    }
  return times;
}

bool all_once(const std::vector<int>& times, size_t count) {
  return times.size() == count && std::all_of(times.begin(), times.end(), [](int n) { return n == 1; });
}

void check_plan(const Shapes& shapes, const Routing& routing, const MoePlan& plan, int tokens,
                const std::string& what) {
  const auto active = routing.active.size(), chunks = plan.chunks.size();
  check(all_once(times_done(plan, kGateUp, shapes.gate_up.panels), active * static_cast<size_t>(shapes.gate_up.panels)),
        what + ": each panel of gate and up once an expert");
  check(all_once(times_done(plan, kDown, shapes.down.panels), active * static_cast<size_t>(shapes.down.panels)),
        what + ": each panel of down once an expert");
  check(all_once(times_done(plan, kSum, tokens), chunks * static_cast<size_t>(tokens)),
        what + ": each token once a chunk");
  int columns = 0;
  for (const Chunk& chunk : plan.chunks) columns += chunk.panels;
  check(columns == shapes.down.panels, what + ": the chunks are all columns");
  if (!plan.caller_converts)
    check(all_once(times_done(plan, kInputs, tokens), static_cast<size_t>(tokens)), what + ": each token is converted");

  // Rows of experts are not equally many, so they are counted one by one.
  size_t quantised = 0, gathered = 0, wanted = 0;
  for (size_t list = 0; list < plan.lists.size(); ++list)
    for (int i = 0; i < plan.sizes[list]; ++i) {
      const Stage stage = plan.stage_of(static_cast<int>(list), i);
      const auto rows = static_cast<size_t>(plan.lists[list][static_cast<size_t>(i)].count);
      if (stage == kQuantise) quantised += rows;
      if (stage == kGather) gathered += rows;
    }
  for (const int expert : routing.active)
    if (routing.count_of(expert) > 1) wanted += static_cast<size_t>(routing.count_of(expert));
  check(quantised == (shapes.shape().is_quantised() && !plan.quantises_at_once ? routing.rows() : 0),
        what + ": each row is quantised");
  check(gathered == (plan.caller_converts ? 0 : wanted), what + ": rows of experts with several are gathered");

  int signalled = 0, tasks = 0;
  for (const int count : plan.signals) signalled += count;
  for (size_t list = 0; list < plan.lists.size(); ++list) {
    tasks += plan.begins[kSum][list];
    for (int stage = 1; stage < kStages; ++stage)
      check(plan.begins[static_cast<size_t>(stage - 1)][list] <= plan.begins[static_cast<size_t>(stage)][list],
            what + ": stages follow each other, so tasks wait for earlier ones only");
  }
  const size_t at_once = plan.quantises_at_once ? active : 0;
  check(signalled == tasks + static_cast<int>(at_once), what + ": every task but a sum is waited for");
  check(plan.signals.size() == plan.gather_done(static_cast<int>(active)), what + ": the counters are all there");

  size_t results = 0;
  for (const size_t bytes : plan.results) results += bytes;
  check(results == routing.rows() * static_cast<size_t>(shapes.down.panels) * kPanel * sizeof(float),
        what + ": room for the results of down");
  check(plan.input.data == static_cast<size_t>(tokens) * shapes.gate_up.row_bytes() &&
            plan.inner.data == routing.rows() * shapes.down.row_bytes(),
        what + ": room for the activations");
}

}  // namespace

void test_plan() {
  constexpr int kExperts = 7, kTopK = 3;
  std::mt19937 random(3);
  for (const Format format : {Format::bf16, Format::int4})
    for (const int nodes : {1, 3})
      for (const auto& [hidden, inner] : {std::pair{64, 48}, {2048, 1408}}) {
        const Shapes shapes(format, hidden, inner, nodes);
        Routing routing;
        MoePlan plan;
        for (const int tokens : {1, 2, 5, 300, 1}) {
          std::vector<int> ids;
          for (int i = 0; i < tokens * kTopK; ++i) ids.push_back(static_cast<int>(random() % (kExperts + 1)));
          routing.sort(ids.data(), tokens, kTopK, kExperts);
          plan.make(routing, shapes.shape(), tokens);
          check_plan(shapes, routing, plan, tokens,
                     std::string(format_name(format)) + ", " + std::to_string(tokens) + " tokens");
        }
      }

  // Experts keep the places of a guess, whatever part of it is right; nothing else about the routing changes.
  for (int turn = 0; turn < 200; ++turn) {
    constexpr int kMany = 40, kChosen = 8;
    std::vector<int> all(kMany), guess, ids;
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    guess.assign(all.begin(), all.begin() + kChosen);
    const auto right = static_cast<int>(random() % (kChosen + 1));
    ids.assign(all.begin() + kChosen - right, all.begin() + 2 * kChosen - right);
    std::shuffle(ids.begin(), ids.end(), random);
    if (turn % 3 == 0) ids[static_cast<size_t>(turn) % kChosen] = -1;
    Routing routing, before;
    routing.sort(ids.data(), 1, kChosen, kMany);
    before = routing;
    routing.keep_places(guess);
    bool kept = true;
    for (size_t place = 0; place < routing.active.size(); ++place)
      kept &= before.count_of(guess[place]) == 0 || routing.active[place] == guess[place];
    check(kept, "experts of a guess keep its places");
    std::sort(routing.active.begin(), routing.active.end());
    check(routing.active == before.active && routing.row == before.row && routing.expert == before.expert,
          "the same experts and rows");
  }

  // Results that are too long for one round: each panel of down is in one of them, and all before is in the first.
  {
    const Shapes shapes(Format::int8, 2048, 256, 3);
    constexpr int kMany = 30'000;
    std::vector<int> ids;
    for (int i = 0; i < kMany * kTopK; ++i) ids.push_back(static_cast<int>(random() % kExperts));
    Routing routing;
    routing.sort(ids.data(), kMany, kTopK, kExperts);
    MoePlan plan;
    std::vector<int> down, sums;
    size_t before = 0;
    int round = 0;
    do {
      plan.make(routing, shapes.shape(), kMany, round);
      for (size_t list = 0; list < plan.lists.size(); ++list)
        before += static_cast<size_t>(plan.begins[kDown][list] > 0 && round > 0);
      for (const int times : times_done(plan, kDown, shapes.down.panels)) down.push_back(times);
      int columns = 0;
      for (const Columns& each : plan.columns) columns += each.panels;
      sums.push_back(columns);
      size_t results = 0;
      for (const size_t bytes : plan.results) results += bytes;
      check(results <= MoePlan::kMostRoundBytes + shapes.shards.size() * routing.rows() * kPanel * sizeof(float),
            "a round's results are bounded");
    } while (++round < plan.rounds);
    check(plan.rounds == 3 && before == 0, "later rounds have down and its sums only");
    check(std::accumulate(sums.begin(), sums.end(), 0) == shapes.down.panels, "the rounds are all columns");
    check(std::accumulate(down.begin(), down.end(), 0) == kExperts * shapes.down.panels, "each panel once an expert");
  }

  // One token after another has the same tasks, whichever experts it goes to; two of a token's experts have not.
  const Shapes shapes(Format::int8, 512, 256, 1);
  Routing routing;
  MoePlan plan;
  const auto planned = [&](std::vector<int> ids) {
    routing.sort(ids.data(), 1, static_cast<int>(ids.size()), kExperts);
    if (!plan.lists.empty()) plan.lists[0].push_back({-1, 0, 0});  // is gone where the tasks are made anew
    plan.make(routing, shapes.shape(), 1);
    return plan.lists[0].back().of >= 0;
  };
  check(planned({0, 1, 2}), "the first token's tasks are made");
  check(!planned({6, 3, 1}), "the next token's are kept");
  check(planned({4, 5}), "those of fewer experts are made anew");
  check(planned({4, 4}), "those of an expert with two rows are made anew");
}
