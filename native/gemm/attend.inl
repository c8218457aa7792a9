// Attention of some heads to a stretch of the cache; included by step_ops.inl. Heads go in blocks, so that what is
// loaded of a key or a value serves several of them: sums over a key stay in registers, a block of heads by a block of
// places.

// A vector register of this level. Sums of a key lie side by side in its lanes.
typedef float Vector __attribute__((vector_size(kVector * sizeof(float))));
typedef int32_t Order __attribute__((vector_size(kVector * sizeof(int32_t))));

static inline Vector vector_of(const float* x) {
  Vector vector;
  __builtin_memcpy(&vector, x, sizeof vector);
  return vector;
}
static inline void put_vector(float* x, const Vector& vector) { __builtin_memcpy(x, &vector, sizeof vector); }

// Lane i of the result is the sum of the lanes of sums[i].
static inline Vector sums_of(Vector (&sums)[kVector]) {
#pragma GCC unroll 4
  for (int half = kVector / 2; half > 0; half /= 2) {
    // Of two vectors, one keeps the lanes whose number has this bit clear, the other the rest.
    Order first, second;
    for (int i = 0; i < kVector; ++i) {
      first[i] = i & half ? kVector + i : i;
      second[i] = i & half ? kVector + i - half : i + half;
    }
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      sums[i] = __builtin_shuffle(sums[i], sums[i + half], first) + __builtin_shuffle(sums[i], sums[i + half], second);
  }
  return sums[0];
}

// score [kHeads, kAttendPositions] from place 0 on = q [kHeads, d] times k [places, d] of kVector / kHeads places.
template <int kHeads>
static inline void block_scores(const float* q, const float* k, int d, float* score) {
  constexpr int kPlaces = kVector / kHeads;
  Vector sums[kVector] = {};
  int i = 0;
  for (; i + kVector <= d; i += kVector) {
    Vector part[kHeads];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) part[h] = vector_of(q + h * d + i);
#pragma GCC unroll 16
    for (int j = 0; j < kPlaces; ++j) {
      const Vector key = vector_of(k + j * d + i);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) sums[h * kPlaces + j] += part[h] * key;
    }
  }
  float found[kVector];
  put_vector(found, sums_of(sums));
  for (int h = 0; h < kHeads; ++h)
    for (int j = 0; j < kPlaces; ++j) {
      float sum = found[h * kPlaces + j];
      for (int rest = i; rest < d; ++rest) sum += q[h * d + rest] * k[j * d + rest];
      score[h * kAttendPositions + j] = sum;
    }
}

// out [kHeads, .. n] = factor * out + weight [kHeads, count] times v [count, n], rows `stride` apart; heads of out lie
// `apart` values apart.
template <int kHeads>
static inline void block_values(const float* weight, const float* v, int stride, int count, int n, const float* factor,
                                float* out, int apart) {
  constexpr int kWide = kVector == 16 ? 4 : 2;
  int i = 0;
  for (; i + kWide * kVector <= n; i += kWide * kVector) {
    Vector sums[kHeads][kWide];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
      for (int t = 0; t < kWide; ++t) sums[h][t] = vector_of(out + h * apart + i + t * kVector) * factor[h];
    for (int j = 0; j < count; ++j) {
      Vector row[kWide];
#pragma GCC unroll 4
      for (int t = 0; t < kWide; ++t) row[t] = vector_of(v + j * stride + i + t * kVector);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
        for (int t = 0; t < kWide; ++t) sums[h][t] += row[t] * weight[h * kAttendPositions + j];
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
      for (int t = 0; t < kWide; ++t) put_vector(out + h * apart + i + t * kVector, sums[h][t]);
  }
  if (i == n) return;
  for (int h = 0; h < kHeads; ++h) {
    for (int rest = i; rest < n; ++rest) out[h * apart + rest] *= factor[h];
    for (int j = 0; j < count; ++j)
      for (int rest = i; rest < n; ++rest)
        out[h * apart + rest] += weight[h * kAttendPositions + j] * v[j * stride + rest];
  }
}

template <int n>
struct IntOf {
  static constexpr int value = n;
};

// task(first head, a constant of how many) for blocks of as many heads as a register has room for, at most four.
template <class Task>
static inline void head_blocks(int heads, const Task& task) {
  int h = 0;
  for (; h + 4 <= heads; h += 4) task(h, IntOf<4>());
  if (heads - h >= 2) {
    task(h, IntOf<2>());
    h += 2;
  }
  if (h < heads) task(h, IntOf<1>());
}

// Their queries and sums share the widened keys, and stay in the L2 cache with them.
constexpr int kPlainHeads = 32;

static size_t attend_scratch(const Attend& task) {
  const int d = task.d1 + task.d2, wide = d > task.dv ? d : task.dv;
  return static_cast<size_t>((wide + task.heads) * kAttendPositions);
}

static void attend(const Attend& task) {
  const int d = task.d1 + task.d2, wide = d > task.dv ? d : task.dv, apart = 2 + task.dv;
  float *rows = task.scratch, *scores = rows + kAttendPositions * wide;
  const float never = -__builtin_inff();
  for (int h = 0; h < task.heads; ++h) {
    float* out = task.out + h * apart;
    out[0] = never;
    for (int i = 1; i < apart; ++i) out[i] = 0.0f;
  }
  for (int first = task.first; first < task.last; first += kAttendPositions) {
    const int count = task.last - first < kAttendPositions ? task.last - first : kAttendPositions;
    const uint8_t* mask = task.mask == nullptr ? nullptr : task.mask + first;
    bool is_seen = mask == nullptr;
    for (int j = 0; j < count && !is_seen; ++j) is_seen = mask[j] != 0;
    if (!is_seen) continue;
    for (int j = 0; j < count; ++j) {
      const auto position = static_cast<size_t>(first + j);
      widen_any(task.k1, task.dtype, position * static_cast<size_t>(task.d1), task.d1, rows + j * d);
      if (task.d2 > 0)
        widen_any(task.k2, task.dtype, position * static_cast<size_t>(task.d2), task.d2, rows + j * d + task.d1);
    }
    // Places past the last are computed as well, of what lay there before, and not used.
    for (int j = 0; j < count; j += kVector)
      head_blocks(task.heads, [&](int h, auto block) {
        constexpr int kHeads = decltype(block)::value < kVector ? decltype(block)::value : kVector;
        for (int at = j; at < j + kVector && at < count; at += kVector / kHeads)
          block_scores<kHeads>(task.q + h * d, rows + at * d, d, scores + h * kAttendPositions + at);
      });
    // The latent is the first part of the key and the value, too.
    const bool same = task.v == task.k1 && task.dv == task.d1;
    for (int j = 0; j < count && !same; ++j)
      widen_any(task.v, task.dtype, static_cast<size_t>(first + j) * static_cast<size_t>(task.dv), task.dv,
                rows + j * task.dv);
    head_blocks(task.heads, [&](int begin, auto block) {
      constexpr int kHeads = decltype(block)::value;
      float factor[kHeads];
      for (int h = 0; h < kHeads; ++h) {
        float *out = task.out + (begin + h) * apart, *score = scores + (begin + h) * kAttendPositions;
        for (int j = 0; j < count; ++j) score[j] *= task.scale;
        for (int j = 0; j < count && mask != nullptr; ++j) score[j] = mask[j] != 0 ? score[j] : never;
        const float most = greatest(score, count), before = out[0];
        const float top = most > before ? most : before;
        factor[h] = before == never ? 0.0f : exp_of(before - top);
        float sum = 0.0f;
        for (int j = 0; j < count; ++j) score[j] = score[j] == never ? 0.0f : exp_of(score[j] - top);
        for (int j = 0; j < count; ++j) sum += score[j];
        out[0] = top;
        out[1] = out[1] * factor[h] + sum;
      }
      block_values<kHeads>(scores + begin * kAttendPositions, rows, same ? d : task.dv, count, task.dv, factor,
                           task.out + begin * apart + 2, apart);
    });
  }
}
