#include "cuda/int4_blocks.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "cuda/launch_shapes.hpp"

namespace ktinject::cuda::int4 {
namespace {

// Layers of models with which these blocks were measured to be faster than what the rules below choose, narrow ones by
// 5 % or more, those of whole sums by 3 % or more than narrow ones, too: of the larger blocks there are too few to fill
// the GPU. docs/benchmarks.md has the times. A column is of the tokens up to its number and above the one before.
// Within a column the rules and the table have the same blocks, or fewer; what was measured is its greatest number, or
// for some blocks of whole sums that of a column to the right, which has no fewer of them.
constexpr int kMeasured = 132;  // multiprocessors of an H100 or H200
constexpr int kUpTo[] = {32, 64, 128, 192, 256, 320, 384, 448, 512};
struct Row {
  int inputs, outputs;
  Blocks columns[std::size(kUpTo)];  // {}: what the rules choose
};
// clang-format off: a layer a line
constexpr Row kFaster[] = {
    {2048, 512, {{32, 8}, {32, 7}, {32, 7}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}}},
    {512, 2048, {{32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 64}}},
    {2560, 512, {{32, 6}, {32, 7}, {32, 6}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}}},
    {2880, 512, {{32, 8}, {32, 7}, {32, 6}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}}},
    {3584, 512, {{32, 7}, {32, 7}, {32, 6}, {}, {32, 1, 64}, {}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}}},
    {4096, 512, {{32, 7}, {32, 7}, {32, 7}, {32, 7}, {}, {}, {}, {32, 1, 64}, {32, 1, 64}}},
    {3072, 1024, {{32, 8}, {64, 6}, {32, 1, 64}, {32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}}},
    {7168, 576, {{32, 8}, {32, 8}, {64, 8}, {64, 8}, {64, 8}, {}, {128, 5}, {128, 5}, {128, 5}}},
    {4096, 1024, {{32, 7}, {32, 7}, {128, 8}, {}, {32, 1, 64}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}}},
    {2048, 2048, {{32, 8}, {32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 64}}},
    {5120, 1024, {{32, 8}, {64, 8}, {}, {}, {128, 6}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}, {64, 1, 64}}},
    {4096, 1408, {{32, 8}, {32, 8}, {64, 8}, {64, 5}, {64, 1, 64}, {}, {128, 0}, {96, 1, 64}, {96, 1, 64}}},
    {1408, 4096, {{32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 128}, {128, 1, 128}, {128, 1, 128}, {128, 1, 128}}},
    {1536, 4096, {{32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1, 128}, {128, 1, 128}}},
    {2560, 2560, {{32, 8}, {32, 1, 64}, {64, 1, 64}, {96, 1, 64}, {96, 1, 64}, {96, 1, 128}, {128, 0}, {96, 1, 128}, {96, 1, 128}}},
    {2560, 3072, {{32, 8}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 128}, {128, 1, 128}, {128, 1, 128}, {128, 1, 128}}},
    {3072, 2560, {{32, 8}, {64, 8}, {64, 1, 64}, {96, 1, 64}, {96, 1, 64}, {128, 0}, {128, 0}, {96, 1, 128}, {96, 1, 128}}},
    {4096, 2048, {{32, 8}, {32, 6}, {32, 1, 64}, {64, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1, 64}}},
    {2048, 4096, {{32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1, 128}, {128, 1, 128}}},
    {512, 16384, {{32, 1, 128}, {64, 1, 128}, {128, 1, 128}, {}, {}, {}, {}, {}, {}}},
    {7168, 1536, {{}, {}, {128, 8}, {128, 4}, {128, 4}, {128, 0}, {128, 0}, {}, {128, 0}}},
    {4096, 2816, {{32, 8}, {64, 8}, {64, 1, 64}, {96, 1, 64}, {96, 1, 64}, {128, 0}, {128, 0}, {96, 1, 128}, {96, 1, 128}}},
    {2816, 4096, {{32, 1, 64}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1}, {128, 1, 128}}},
    {2880, 4096, {{32, 6}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1}, {128, 1, 128}}},
    {4096, 2880, {{32, 8}, {64, 8}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 0}, {128, 0}, {128, 1, 128}, {128, 1, 128}}},
    {2048, 6144, {{32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 128}, {128, 1, 128}, {128, 1, 192}, {128, 1, 192}, {128, 1, 192}, {128, 1, 192}}},
    {3072, 4096, {{32, 6}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1}, {128, 1, 128}}},
    {4096, 3072, {{32, 8}, {64, 8}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 0}, {128, 0}, {}, {128, 1, 128}}},
    {3584, 3584, {{32, 8}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1, 128}, {128, 1, 128}}},
    {7168, 2048, {{32, 8}, {}, {128, 6}, {128, 0}, {64, 1, 64}, {128, 0}, {128, 0}, {128, 1, 64}, {128, 1, 64}}},
    {2048, 7168, {{32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 128}, {128, 1, 128}, {128, 0}, {128, 0}, {}, {128, 1, 128}}},
    {2048, 8192, {{32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 128}, {128, 1, 128}, {}, {}, {}, {}}},
    {4096, 4096, {{32, 6}, {32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {128, 1, 64}, {128, 1}, {128, 1}, {128, 1}, {128, 1, 128}}},
    {3072, 6144, {{32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {}, {128, 1, 128}, {}, {}, {}, {128, 1, 192}}},
    {6144, 3072, {{}, {}, {64, 1, 64}, {}, {128, 1, 64}, {}, {}, {}, {128, 1, 128}}},
    {5120, 5120, {{32, 1, 64}, {64, 1, 64}, {64, 1, 128}, {}, {96, 1, 128}, {}, {}, {}, {128, 1, 192}}},
    {4096, 8192, {{32, 1, 64}, {64, 1, 64}, {128, 1, 64}, {}, {128, 1, 128}, {}, {}, {}, {}}},
    {8192, 4096, {{}, {32, 1, 64}, {64, 1, 64}, {}, {128, 1, 64}, {}, {}, {}, {128, 1, 128}}},
    {1536, 12288, {{32, 1, 128}, {64, 1, 128}, {128, 1, 128}, {}, {128, 1, 192}, {}, {}, {}, {128, 1, 192}}},
    {2048, 12288, {{32, 1, 128}, {64, 1, 128}, {128, 1, 128}, {}, {128, 1, 192}, {}, {}, {}, {128, 1, 192}}},
    {2560, 12288, {{32, 1, 128}, {64, 1, 128}, {128, 1, 128}, {}, {128, 1, 192}, {}, {}, {}, {128, 1, 192}}},
    {12288, 2560, {{}, {}, {64, 1, 64}, {}, {96, 1, 64}, {}, {}, {}, {}}},
};
// clang-format on

// Tokens of a block: with 256, half as many conversions a product, if that adds few rows that nobody wants.
int tokens_of(int m) {
  if (m <= 128) return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
  const int blocks = up(m, 128);
  return blocks % 2 == 0 || blocks > 20 ? 256 : 128;
}
int outputs_of(int tokens) { return tokens == 256 ? 128 : 256; }

// Blocks of a cluster that share a strip of 256 outputs: up to eight, `wanted` in all. `room`: blocks that the GPU runs
// at a time; a cluster's stand close together, so that with four or eight a part of that stays empty.
int sharers_of(int n, int k, int m, int tokens, int wanted, int room) {
  const int units = up(n, 256) * up(m, tokens);
  int found = 1;
  for (int sharers = 2; sharers <= 8; sharers *= 2) {
    const int blocks = sharers * units;
    if (blocks <= wanted && 11 * blocks <= (sharers >= 4 ? 10 : 11) * room && sharers <= k / 64) found = sharers;
  }
  return found;
}

Partition clustered(int n, int k, int m, int tokens, int outputs, int sharers) {
  Partition p = cut(n, k, m, tokens, outputs, 1);
  p.sharers = sharers;
  p.blocks = p.units * sharers;
  return p;
}

Partition by_rules(int n, int k, int m, int multiprocessors) {
  constexpr int kMuch = 16;  // stages a block: worth it that all blocks have as many
  const int tokens = tokens_of(m);
  // With few tokens, two blocks on a multiprocessor hide each other's waits.
  const int room = tokens <= 16 ? 2 * multiprocessors : multiprocessors;
  Partition line = cut(n, k, m, tokens, outputs_of(tokens), room);
  const bool much = line.share >= kMuch;
  const int wanted = much ? room : multiprocessors;
  const Partition cluster =
      clustered(n, k, m, std::min(tokens, 64), 256, sharers_of(n, k, m, std::min(tokens, 64), wanted, room));
  if (cluster.sharers > 1 && (!much || (tokens <= 16 && 5 * room <= 6 * cluster.blocks))) return cluster;
  // Whole strips, where that keeps nearly all multiprocessors busy: nothing to add up.
  const int turns = up(line.units, room);
  if (20 * turns * room <= 21 * line.units) {
    line.share = turns * (k / 64);
    line.blocks = up(line.units, turns);
  }
  return line;
}

}  // namespace

const char* why_not(const Blocks& b, int k) {
  if (b.outputs != 0) {
    for (const Whole& w : kWhole)
      if (w.tokens == b.tokens && w.outputs == b.outputs)
        return k / 64 >= w.sets ? nullptr : "allowed are blocks of whole sums with a stage for each set of warpgroups";
    return "allowed are the blocks of whole sums of native/cuda/int4_blocks.hpp, `kWhole`";
  }
  if (b.tokens != 32 && b.tokens != 64 && b.tokens != 128) return "allowed are 32, 64 and 128 tokens";
  if (b.split < 0 || b.split > 8 || b.split > k / 64) return "allowed are splits of 0 to 8, and of one stage at least";
  return nullptr;
}

Partition cut_into(const Blocks& b, int n, int k, int m, int multiprocessors) {
  const bool whole = b.outputs != 0;
  if (!whole && b.split > 1) return clustered(n, k, m, b.tokens, 128, b.split);
  Partition p = cut(n, k, m, b.tokens, whole ? b.outputs : 128, multiprocessors);
  p.whole = whole;
  if (whole || b.split == 1) {
    p.share = k / 64;
    p.blocks = p.units;
  }
  return p;
}

ShapeSm80 shape_sm80(int n, int k, int m, bool half_groups, const Limits& limits) {
  const int tokens = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  auto room = [&](int stages) {
    return blocks_at_once(limits, ShapeSm80::shared_bytes(tokens, half_groups, stages), ShapeSm80::kThreads);
  };
  ShapeSm80 shape{{}, tokens <= 16 ? 6 : tokens == 32 ? 5 : 4, 1};
  // With few tokens, two blocks on a multiprocessor hide each other's waits: rather with shorter rings than not at all.
  if (tokens <= 16) {
    if (room(6) < 2 && room(4) >= 2) shape.stages = 4;
    shape.room = room(shape.stages) >= 2 ? 2 : 1;
  }
  shape.partition = cut(n, k, m, tokens, ShapeSm80::kOutputs, limits.multiprocessors * shape.room);
  return shape;
}

Partition partition_sm90(int n, int k, int m, int multiprocessors) {
  const auto column = std::lower_bound(std::begin(kUpTo), std::end(kUpTo), m) - std::begin(kUpTo);
  if (multiprocessors != kMeasured || m <= 16 || column == std::size(kUpTo)) return by_rules(n, k, m, multiprocessors);
  for (const Row& row : kFaster) {
    const Blocks& found = row.columns[column];
    if (row.inputs == k && row.outputs == n && found.tokens != 0) return cut_into(found, n, k, m, multiprocessors);
  }
  return by_rules(n, k, m, multiprocessors);
}

}  // namespace ktinject::cuda::int4
