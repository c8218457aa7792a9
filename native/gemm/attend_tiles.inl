// attend() on tiles of bf16; included by step_ops_avx512.cpp under the rules of gemm/vector_ops.inl. Keys go from the
// cache to the tile unit as they lie there: scores come out with places as rows and heads as columns. Their weights,
// turned round, are then the rows of the other product, whose columns are the values.
//
//   scores [32 places, 32 heads] += keys [32 places, 32 inputs] times queries [32 inputs, 32 heads]
//   out [32 heads, 32 values]    += weights [32 heads, 32 places] times values [32 places, 32 values]
//
// Queries are exact as bf16 where the model is of bf16; weights are rounded to bf16, and so is what their sum is of, as
// transformers rounds them.

// Places whose values are added while sums of the output are in the tiles once.
constexpr int kTilePlaces = 128, kTileHeads = 32, kPairBytes = 2048;
// Of a task: packing the values once is a part of its work that does not grow with them.
constexpr int kManyHeads = 128;
// Of a task: with fewer, turning round values and weights takes longer than tiles spare.
constexpr int kLeastHeads = 4;

typedef u32 Words __attribute__((vector_size(64)));

// words[i][j] → words[j][i]
static inline void turn_round(Words (&words)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    Words first, second;
    for (u32 i = 0; i < kLanes; ++i) {
      const u32 set = i & static_cast<u32>(half);
      first[i] = set ? kLanes + i - static_cast<u32>(half) : i;
      second[i] = set ? kLanes + i : i + static_cast<u32>(half);
    }
    for (int i = 0; i < kLanes; ++i) {
      if (i & half) continue;
      const Words a = words[i], b = words[i + half];
      words[i] = __builtin_shuffle(a, b, first);
      words[i + half] = __builtin_shuffle(a, b, second);
    }
  }
}

// How the scratch of a task is laid out; in floats.
struct TileSpace {
  int groups;  // of 32 heads
  int tiles;   // of 16 heads that a group has: one where the task has no more, and half of what is said below is unused
  size_t queries, values, out, scores, weights, factors, count;

  explicit TileSpace(const Attend& task)
      : groups((task.heads + kTileHeads - 1) / kTileHeads), tiles(task.heads > kLanes ? 2 : 1) {
    const auto heads = static_cast<size_t>(groups * kTileHeads), d = static_cast<size_t>(task.d1 + task.d2),
               dv = static_cast<size_t>(task.dv);
    size_t at = 0;
    const auto take = [&](size_t floats) {
      const size_t begin = at;
      at += floats;
      return begin;
    };
    queries = take(heads * d / 2);        // [groups, d / 32] pairs of tiles, [16 pairs of inputs, 16 heads]
    values = take(kTilePlaces * dv / 2);  // [dv / 32, places / 32] pairs of tiles, [16 pairs of places, 16 values]
    out = take(heads * dv);               // [groups, dv / 32, 32 heads, 32 values]
    scores = take(kTilePlaces * kTileHeads);
    weights = take(kTilePlaces * kTileHeads / 2);  // [places / 32] pairs of tiles, [16 heads, 16 pairs of places]
    factors = take(3 * heads);  // of each head: by which the sums shrink, the greatest score, the sum
    count = at;
  }
};

static bool fits_tiles(const Attend& task) {
  return task.dtype == DType::bf16 && task.heads >= kLeastHeads && task.d1 % 32 == 0 && task.d2 % 32 == 0 &&
         task.dv % 32 == 0 && task.last - task.first >= kLanes;
}

static size_t attend_tiles_scratch(const Attend& task) {
  const size_t tiles = TileSpace(task).count, plain = attend_scratch(task);
  return tiles > plain ? tiles : plain;
}

// Pairs of neighbouring inputs of 32 heads, those past the last as zeros, to B tiles.
static void pack_queries(const Attend& task, int group, int tiles, std::byte* to) {
  const int d = task.d1 + task.d2;
  for (int block = 0; block < d / 32; ++block, to += kPairBytes)
    for (int tile = 0; tile < tiles; ++tile) {
      Words words[kLanes];
      for (int h = 0; h < kLanes; ++h) {
        const int head = group * kTileHeads + tile * kLanes + h;
        u32 pairs[kLanes] = {};
        if (head < task.heads) {
          const float* q = task.q + head * d + block * 32;
          for (int i = 0; i < kLanes; ++i)
            pairs[i] = static_cast<u32>(to_bf16(q[2 * i])) | static_cast<u32>(to_bf16(q[2 * i + 1])) << 16;
        }
        __builtin_memcpy(&words[h], pairs, sizeof pairs);
      }
      turn_round(words);
      __builtin_memcpy(to + tile * (kPairBytes / 2), words, sizeof words);
    }
}

// Asks for the memory of some places, of which each has so many bytes. A task's stretch of the cache has not been read
// since the last token, and is too short for the CPU to foresee it.
static void fetch_places(const void* first, int place, int last, size_t bytes) {
  const auto* from = static_cast<const char*>(first) + static_cast<size_t>(place) * bytes;
  const auto* end = static_cast<const char*>(first) + static_cast<size_t>(last > place ? last : place) * bytes;
  for (; from < end; from += 64) __builtin_prefetch(from, 0, 2);
}

// Values of `count` places from `v` on, zeros behind them, to B tiles: pairs of neighbouring places.
static void pack_values(const Attend& task, int first, int count, std::byte* to) {
  const int dv = task.dv, next = first + kTilePlaces;
  const u16* v = static_cast<const u16*>(task.v) + static_cast<size_t>(first) * static_cast<size_t>(dv);
  const size_t strip = static_cast<size_t>(kTilePlaces / 32) * kPairBytes;
  for (int place = 0; place < (count + 31) / 32 * 32; place += 2) {
    std::byte* row = to + place / 32 * kPairBytes + place % 32 / 2 * 64;
    const u16 *a = v + place * dv, *b = a + dv;
    fetch_places(task.v, next + place, next + place + 2 < task.last ? next + place + 2 : task.last,
                 static_cast<size_t>(dv) * 2);
    for (int i = 0; i < dv; i += 16, row += i % 32 == 0 ? strip - kPairBytes / 2 : kPairBytes / 2) {
      u32 pairs[kLanes] = {};
      if (place + 1 < count)
        for (int j = 0; j < kLanes; ++j) pairs[j] = static_cast<u32>(a[i + j]) | static_cast<u32>(b[i + j]) << 16;
      else if (place < count)
        for (int j = 0; j < kLanes; ++j) pairs[j] = a[i + j];
      __builtin_memcpy(row, pairs, sizeof pairs);
    }
  }
}

// The scores of some places become weights, whose sum and greatest score are kept, and the factors by which what was
// added up before shrinks; true if any factor is not 1. `weights`: A tiles.
static bool weigh(const Attend& task, const uint8_t* mask, int tiles, int count, const float* scores, float* factor,
                  float* top, float* sum, std::byte* weights) {
  const float never = -__builtin_inff();
  bool shrinks = false;
  for (int tile = 0; tile < tiles; ++tile, factor += kLanes, top += kLanes, sum += kLanes) {
    const float* score = scores + tile * kLanes;
    float most[kLanes], added[kLanes] = {};
    for (int l = 0; l < kLanes; ++l) most[l] = never;
    for (int j = 0; j < count; ++j) {
      if (mask != nullptr && mask[j] == 0) continue;
      for (int l = 0; l < kLanes; ++l) {
        const float value = score[j * kTileHeads + l] * task.scale;
        most[l] = value > most[l] ? value : most[l];
      }
    }
    for (int l = 0; l < kLanes; ++l) {
      const float before = top[l];
      top[l] = most[l] > before ? most[l] : before;
      factor[l] = before == never ? 0.0f : exp_of(before - top[l]);
      shrinks |= factor[l] != 1.0f;
    }
    for (int first = 0; first < count; first += 32) {
      Words words[kLanes];
      for (int pair = 0; pair < kLanes; ++pair) {
        u32 both[kLanes] = {};
        for (int odd = 0; odd < 2; ++odd) {
          const int j = first + 2 * pair + odd;
          if (j >= count || (mask != nullptr && mask[j] == 0)) continue;
          for (int l = 0; l < kLanes; ++l) {
            const float value = score[j * kTileHeads + l] * task.scale;
            const u32 weight = to_bf16(value == never ? 0.0f : exp_of(value - top[l]));
            added[l] += as_float(weight << 16);
            both[l] |= odd ? weight << 16 : weight;
          }
        }
        __builtin_memcpy(&words[pair], both, sizeof both);
      }
      turn_round(words);
      __builtin_memcpy(weights + first / 32 * kPairBytes + tile * kPairBytes / 2, words, sizeof words);
    }
    for (int l = 0; l < kLanes; ++l) sum[l] = sum[l] * factor[l] + added[l];
  }
  return shrinks;
}

// scores [count, 32 heads] of a group of heads.
template <class Tiles>
static void score_tiles(const Attend& task, const std::byte* queries, int tiles, bool is_first_group, int first,
                        int count, float* scores) {
  const auto *k1 = static_cast<const std::byte*>(task.k1), *k2 = static_cast<const std::byte*>(task.k2);
  const int blocks1 = task.d1 / 32, blocks = (task.d1 + task.d2) / 32;
  for (int place = 0; place < count; place += 32) {
    const int h0 = count - place < kLanes ? count - place : kLanes;
    const int h1 = count - place - h0 < kLanes ? count - place - h0 : kLanes;
    const bool two = h1 > 0, whole = h1 == kLanes;
    if (!whole) Tiles::configure(TileShapes(h0, h1));
    Tiles::zero(two);
    const auto at = static_cast<size_t>(first + place);
    if (is_first_group) {
      const int next = first + kTilePlaces + place, last = next + 32 < task.last ? next + 32 : task.last;
      fetch_places(k1, next, last, static_cast<size_t>(task.d1) * 2);
      if (k2 != nullptr) fetch_places(k2, next, last, static_cast<size_t>(task.d2) * 2);
    }
    for (int block = 0; block < blocks; ++block) {
      const bool is_first = block < blocks1;
      const size_t width = static_cast<size_t>(is_first ? task.d1 : task.d2) * 2;
      const std::byte* key =
          (is_first ? k1 : k2) + at * width + static_cast<size_t>(is_first ? block : block - blocks1) * 64;
      Tiles::load_a(key, key + kLanes * width, width, two);
      const std::byte* query = queries + block * kPairBytes;
      if (tiles == 1) {
        Tiles::load_b0(query);
        Tiles::bf16_first(two);
      } else {
        Tiles::load_b(query, query + kPairBytes / 2);
        Tiles::bf16(two);
      }
    }
    if (tiles == 1) Tiles::store_first(scores + place * kTileHeads, two);
    else Tiles::store(scores + place * kTileHeads, two);
    if (!whole) Tiles::configure(TileShapes(kLanes, kLanes));
  }
}

template <class Tiles>
static void attend_tiles(const Attend& task) {
  if (!fits_tiles(task)) return attend(task);
  const TileSpace space(task);
  const int dv = task.dv, heads = space.groups * kTileHeads, tiles = space.tiles;
  const bool two = tiles == 2;
  float *out = task.scratch + space.out, *scores = task.scratch + space.scores;
  float *factor = task.scratch + space.factors, *top = factor + heads, *sum = top + heads;
  auto* queries = reinterpret_cast<std::byte*>(task.scratch + space.queries);
  auto* values = reinterpret_cast<std::byte*>(task.scratch + space.values);
  auto* weights = reinterpret_cast<std::byte*>(task.scratch + space.weights);
  const size_t group_queries = static_cast<size_t>((task.d1 + task.d2) / 32) * kPairBytes;
  const int begun = task.first + kTilePlaces < task.last ? task.first + kTilePlaces : task.last;
  fetch_places(task.v, task.first, begun, static_cast<size_t>(dv) * 2);
  fetch_places(task.k1, task.first, begun, static_cast<size_t>(task.d1) * 2);
  if (task.k2 != nullptr) fetch_places(task.k2, task.first, begun, static_cast<size_t>(task.d2) * 2);
  for (int group = 0; group < space.groups; ++group)
    pack_queries(task, group, tiles, queries + static_cast<size_t>(group) * group_queries);
  __builtin_memset(out, 0, static_cast<size_t>(heads * dv) * sizeof(float));
  for (int h = 0; h < heads; ++h) top[h] = -__builtin_inff(), sum[h] = 0.0f;
  Tiles::configure(TileShapes(kLanes, kLanes));
  for (int first = task.first; first < task.last; first += kTilePlaces) {
    const int count = task.last - first < kTilePlaces ? task.last - first : kTilePlaces;
    const uint8_t* mask = task.mask == nullptr ? nullptr : task.mask + first;
    bool is_seen = mask == nullptr;
    for (int j = 0; j < count && !is_seen; ++j) is_seen = mask[j] != 0;
    if (!is_seen) continue;
    pack_values(task, first, count, values);
    for (int group = 0; group < space.groups; ++group) {
      const int head = group * kTileHeads;
      score_tiles<Tiles>(task, queries + static_cast<size_t>(group) * group_queries, tiles, group == 0, first, count,
                         scores);
      const bool shrinks = weigh(task, mask, tiles, count, scores, factor + head, top + head, sum + head, weights);
      for (int strip = 0; strip < dv / 32; ++strip) {
        float* part = out + (head * dv) + strip * 32 * kTileHeads;
        for (int h = 0; h < tiles * kLanes && shrinks; ++h)
          for (int i = 0; i < 32; ++i) part[h * 32 + i] *= factor[head + h];
        Tiles::load_c(part, two);
        const std::byte* v = values + static_cast<size_t>(strip) * (kTilePlaces / 32) * kPairBytes;
        for (int step = 0; step < (count + 31) / 32; ++step) {
          Tiles::load_a0(weights + step * kPairBytes);
          if (two) Tiles::load_a1(weights + step * kPairBytes + kPairBytes / 2);
          Tiles::load_b(v + step * kPairBytes, v + step * kPairBytes + kPairBytes / 2);
          Tiles::bf16(two);
        }
        Tiles::store(part, two);
      }
    }
  }
  Tiles::release();
  for (int h = 0; h < task.heads; ++h) {
    float* to = task.out + h * (2 + dv);
    to[0] = top[h];
    to[1] = sum[h];
    const float* from = out + h / kTileHeads * kTileHeads * dv + h % kTileHeads * 32;
    for (int strip = 0; strip < dv / 32; ++strip)
      __builtin_memcpy(to + 2 + strip * 32, from + strip * 32 * kTileHeads, 32 * sizeof(float));
  }
}
