#include "cuda/int4_blocks.hpp"

#include <algorithm>

namespace ktinject::cuda::int4 {
namespace {

// Layers with which other blocks than those of the rules below were measured to be faster, by 5 % or more: of blocks of
// 256 outputs there are too few to fill the GPU. docs/benchmarks.md has the times.
struct Row {
  int inputs, outputs;
  Blocks few, more;  // from 33 to 64 tokens, and from 65 to 128; measured with the most
};
constexpr int kMeasured = 132;  // multiprocessors of an H200
constexpr Blocks kRules{}, kEighths{32, 128, 8};
// clang-format off: a layer a line
constexpr Row kFaster[] = {
    {2048, 512, kEighths, kEighths},
    {4096, 512, kEighths, kEighths},
    {7168, 576, kEighths, {64, 128, 8}},
    {5120, 1024, kEighths, kRules},
    {512, 16384, {64, 128, 1}, {128, 128, 1}},
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

Partition clustered(int n, int k, int m, int tokens, int outputs, int sharers, int mates) {
  Partition p = cut(n, k, m, tokens, outputs, 1);
  p.sharers = sharers;
  p.mates = mates;
  p.blocks = up(up(n, outputs), mates) * mates * p.token_blocks * sharers;
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
      clustered(n, k, m, std::min(tokens, 64), 256, sharers_of(n, k, m, std::min(tokens, 64), wanted, room), 1);
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
  const bool wide = b.outputs == 256, known = wide || b.outputs == 128;
  if (!known || (b.tokens != 32 && b.tokens != 64 && b.tokens != 128 && (b.tokens != 256 || wide)))
    return "allowed are 32, 64 or 128 tokens with 128 or 256 outputs, and 256 tokens with 128 outputs";
  if (b.split < 0 || b.split > 8 || b.split > k / 64) return "allowed are splits of 0 to 8, and of one stage at least";
  if (b.mates < 1 || b.mates > 2 || b.split * b.mates > 8 || (b.mates == 2 && b.split == 0))
    return "allowed are 1 mate, or 2 in clusters of up to 8 blocks";
  if (b.split > 1 && b.tokens * b.outputs > 128 * 128)
    return "larger blocks than 128 by 128 or 64 by 256 have no room to add up sums";
  if (b.fetchers < b.mates || b.fetchers > 3) return "allowed are 1 to 3 fetchers, and 2 or 3 with mates";
  return nullptr;
}

Partition cut_into(const Blocks& b, int n, int k, int m, int multiprocessors) {
  Partition p = b.split > 1 || b.mates > 1 ? clustered(n, k, m, b.tokens, b.outputs, b.split, b.mates)
                                           : cut(n, k, m, b.tokens, b.outputs, multiprocessors);
  if (b.split == 1 && b.mates == 1) {
    p.share = k / 64;
    p.blocks = p.units;
  }
  p.fetchers = b.fetchers;
  return p;
}

Partition partition_sm90(int n, int k, int m, int multiprocessors) {
  if (multiprocessors == kMeasured && m > 32 && m <= 128) {
    for (const Row& row : kFaster) {
      const Blocks& blocks = m <= 64 ? row.few : row.more;
      if (row.inputs == k && row.outputs == n && blocks.tokens != 0) return cut_into(blocks, n, k, m, multiprocessors);
    }
  }
  return by_rules(n, k, m, multiprocessors);
}

}  // namespace ktinject::cuda::int4
