// Included by vector_ops_<level>.cpp inside its target region and namespace. Nothing here may call an inline function
// of the standard library: it would be compiled for that target and could be the copy the linker keeps for everybody.

//
// `Vector` is what a register of the level holds, `Integers` the same of int32; `lesser` and `greater` are its minimum
// and maximum, `fused(a, b, c)` is a * b + c with one rounding where the level has that, `widen_bytes` and
// `widen_halves` read as many unsigned integers of 8 and 16 bits. The loops that choose the scales of int4 groups are
// written with it: their sums must come out the same at every level, and compilers leave such loops scalar. So are
// those that add outliers.

#include "gemm/values.inl"

template <ActivationKind kind>
static inline float activation_of(float x, float alpha) {
  if (kind == ActivationKind::silu) return x * sigmoid(alpha * x);
  if (kind == ActivationKind::gelu) return 0.5f * x * (1.0f + __builtin_erff(x * 0.70710678118654752f));
  if (kind == ActivationKind::gelu_tanh)  // 0.5 (1 + tanh(u)) is sigmoid(2u)
    return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
  const float positive = x > 0.0f ? x : 0.0f;
  if (kind == ActivationKind::relu) return positive;
  if (kind == ActivationKind::relu2) return positive * positive;
  return x;
}

template <class T>
static void round_typed(const T* x, int k, u16* out) {
  for (int i = 0; i < k; ++i) out[i] = to_bf16(load_value(x + i));
}

static void round_row(const void* x, DType dtype, int k, int padded_k, uint16_t* out) {
  if (dtype == DType::bf16) __builtin_memcpy(out, x, static_cast<size_t>(k) * 2);
  else if (dtype == DType::f32) round_typed(static_cast<const float*>(x), k, out);
  else round_typed(static_cast<const F16*>(x), k, out);
  for (int i = k; i < padded_k; ++i) out[i] = 0;
}

// As integers, because a maximum of floats is not a reduction the compiler may reorder; NaN compares above infinity.
template <class T>
static u32 max_bits(const T* x, int k) {
  u32 most = 0;
  for (int i = 0; i < k; ++i) {
    const u32 bits = as_bits(load_value(x + i)) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

template <class T>
static int count_above(const T* x, int k, u32 limit) {
  int count = 0;
  for (int i = 0; i < k; ++i) count += (as_bits(load_value(x + i)) & 0x7fffffffu) > limit;
  return count;
}

// A row is searched for outliers by runs, of which nearly all are done with once their maxima are known.
template <class T>
struct Runs {
  static constexpr int kRun = 64, kMost = 1024;

  Runs(const T* values, int inputs) : x(values), k(inputs), count((inputs + kRun - 1) / kRun) {
    for (int run = 0; run < count; ++run) {
      most_of[run] = is_whole(run) ? max_bits(x + run * kRun, kRun) : max_bits(x + run * kRun, k - run * kRun);
      most = most_of[run] > most ? most_of[run] : most;
    }
  }
  // Loops of a length the compiler knows are much faster.
  bool is_whole(int run) const { return k - run * kRun >= kRun; }
  int length(int run) const { return is_whole(run) ? kRun : k - run * kRun; }
  // Of each run one, at least.
  int least_above(u32 limit) const {
    int above = 0;
    for (int run = 0; run < count; ++run) above += most_of[run] > limit;
    return above;
  }
  // Counts no further once there are more than `enough`.
  int above(u32 limit, int enough) const {
    int above = 0;
    for (int run = 0; run < count && above <= enough; ++run) {
      if (most_of[run] <= limit) continue;
      const T* from = x + run * kRun;
      above += is_whole(run) ? count_above(from, kRun, limit) : count_above(from, k - run * kRun, limit);
    }
    return above;
  }

  const T* x;
  int k, count;
  u32 most = 0;
  u32 most_of[kMost];
};

// The limit above which values of a row are outliers; the largest magnitude if none is. Values that are hardly above it
// are not worth it: rows have such in channels of their own, and the steps would be as much finer as they are above it.
template <class T>
static u32 outlier_limit(const Runs<T>& runs) {
  constexpr u32 kHalvings = 10;
  constexpr float kWorth = 1.25f;
  u32 limit = runs.most, taken_at = 0;
  if (limit >= 0x7f800000u) return limit;
  const int room =
      runs.k / Outliers::kLeastInputs < Outliers::kMost ? runs.k / Outliers::kLeastInputs : Outliers::kMost;
  int taken = 0;
  for (u32 i = 1; i <= kHalvings && runs.most >> 23 > i; ++i) {
    const u32 half = runs.most - (i << 23);
    const int least = runs.least_above(half), enough = taken + (1 << (i - taken_at));
    if (least > room) break;
    if (least > enough) continue;
    const int above = runs.above(half, room);
    if (above > room) break;
    if (above > enough) continue;
    if (above > taken && runs.above(as_bits(as_float(half) * kWorth), taken) <= taken) continue;
    limit = half, taken = above, taken_at = i;
  }
  return limit;
}

// Takes the outliers out of a row; returns the bits of the largest magnitude that is left.
template <class T>
static u32 take_outliers(const T* x, int k, Outliers* outliers) {
  constexpr int kPiece = 16;
  const Runs<T> runs(x, k);
  if (outliers == nullptr) return runs.most;
  outliers->count = 0;
  const u32 limit = outlier_limit(runs);
  if (limit == runs.most) return limit;
  u32 rest = 0;
  for (int run = 0; run < runs.count; ++run) {
    if (runs.most_of[run] <= limit) {
      rest = runs.most_of[run] > rest ? runs.most_of[run] : rest;
      continue;
    }
    const int end = run * Runs<T>::kRun + runs.length(run);
    for (int i = run * Runs<T>::kRun; i < end;) {
      const u32 most = end - i >= kPiece ? max_bits(x + i, kPiece) : ~0u;
      if (most <= limit) {
        rest = most > rest ? most : rest;
        i += kPiece;
        continue;
      }
      for (const int stop = end - i >= kPiece ? i + kPiece : end; i < stop; ++i) {
        const float value = load_value(x + i);
        const u32 bits = as_bits(value) & 0x7fffffffu;
        if (bits <= limit) {
          rest = bits > rest ? bits : rest;
        } else {
          outliers->at[outliers->count] = static_cast<uint16_t>(i);
          outliers->value[outliers->count++] = value;
        }
      }
    }
  }
  return rest;
}

template <class T>
static float quantise_typed(const T* x, int k, int padded_k, int zero_point, uint8_t* out, Outliers* outliers) {
  const float most = as_float(take_outliers(x, k, outliers));
  // So small that the quotient would be infinite counts as zero.
  const float scale = most / 127.0f, inverse = most > 4e-37f ? 127.0f / most : 0.0f;
  for (int i = 0; i < k; ++i) {
    const float magic = load_value(x + i) * inverse + 12582912.0f;
    out[i] = static_cast<uint8_t>(static_cast<int32_t>(as_bits(magic)) - 0x4b400000 + zero_point);
  }
  for (int i = k; i < padded_k; ++i) out[i] = static_cast<uint8_t>(zero_point);
  for (int i = 0; outliers != nullptr && i < outliers->count; ++i)
    out[outliers->at[i]] = static_cast<uint8_t>(zero_point);
  return scale;
}

static float quantise_row(const void* x, DType dtype, int k, int padded_k, int zero_point, int group_size, uint8_t* out,
                          int32_t* group_sum, Outliers* outliers) {
  auto typed = [&](const auto* values) { return quantise_typed(values, k, padded_k, zero_point, out, outliers); };
  const float scale = dtype == DType::bf16  ? typed(static_cast<const Bf16*>(x))
                      : dtype == DType::f32 ? typed(static_cast<const float*>(x))
                                            : typed(static_cast<const F16*>(x));
  if (group_sum != nullptr) {
    for (int start = 0, g = 0; start < padded_k; start += group_size, ++g) {
      const int end = start + group_size < padded_k ? start + group_size : padded_k;
      int32_t sum = 0;
      for (int i = start; i < end; ++i) sum += static_cast<int8_t>(out[i]);
      group_sum[g] = sum;
    }
  }
  return scale;
}

constexpr int kWide = sizeof(Vector) / sizeof(float), kVectors = kPanel / kWide;

template <class Lanes>
static inline Lanes load_lanes(const void* from) {
  Lanes lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// A panel's weights of input k for outputs `first` ...: as many as a Vector has, so that few registers are needed.
// Where k was cut into slices, they left the caches long ago: those of the next panel are asked for.
template <Format format>
static inline Vector weights_of(const OutlierRows& rows, const std::byte* panel, u32 k, int first) {
  // Inputs that share the lanes of 32 bits of a row.
  constexpr u32 kTogether = format == Format::int8 ? 4 : 8;
  const u32 shift = k % 4 * 8 + k % kTogether / 4 * 4;
  const std::byte* codes =
      panel + rows.codes_at + weight_at(format, first, static_cast<int>(k & 0xffff & ~(kTogether - 1))).byte;
  const auto lanes = load_lanes<Integers>(codes);
  if (first % kTile == 0) __builtin_prefetch(codes + rows.panel_bytes);
  if constexpr (format == Format::int8) {
    const Integers q = (lanes << static_cast<int>(24 - shift)) >> 24;
    return __builtin_convertvector(q, Vector) * load_lanes<Vector>(panel + static_cast<size_t>(first) * sizeof(float));
  } else {
    const size_t group = static_cast<size_t>(k >> rows.group_shift) * kPanel + static_cast<size_t>(first);
    if (first == 0) __builtin_prefetch(panel + rows.panel_bytes + kInt4ScalesAt + group * sizeof(u16));
    const Integers zero = rows.zeros_at == 0 ? Integers{} + 8 : widen_bytes(panel + rows.zeros_at + group);
    const Integers scale = widen_halves(panel + kInt4ScalesAt + group * sizeof(u16)) << 16;
    return __builtin_convertvector(((lanes >> static_cast<int>(shift)) & 15) - zero, Vector) * (Vector)scale;
  }
}

// out [32] = a panel's weights of input k.
template <Format format>
static inline void read_column(const OutlierRows& rows, const std::byte* panel, u32 k, float* out) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const Vector weights = weights_of<format>(rows, panel, k, v * kWide);
    __builtin_memcpy(out + v * kWide, &weights, sizeof weights);
  }
}

// c [count, 32] += values [count, channels] times weights(channel, v), a Vector of them. The sums stay in registers.
template <int count, class Weights>
static inline void add_products(int channels, const float* values, float* c, Weights&& weights) {
  Vector sums[count][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < count; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = load_lanes<Vector>(c + row * kPanel + v * kWide);
  for (int i = 0; i < channels; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Vector column = weights(i, v);
#pragma GCC unroll 8
      for (int row = 0; row < count; ++row) sums[row][v] = fused(values[row * channels + i], column, sums[row][v]);
    }
#pragma GCC unroll 8
  for (int row = 0; row < count; ++row)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) __builtin_memcpy(c + row * kPanel + v * kWide, &sums[row][v], sizeof(Vector));
}

template <Format format>
static void add_outliers_of(OutlierRows& rows, const std::byte* panel, int first, int count, float* c) {
  constexpr int kRows = kWide / 4;  // whose sums take half of the registers
  const int shared = rows.shared;
  if (shared > 0) {
    if (rows.panel != panel) {
      rows.panel = panel;
      for (int i = 0; i < shared; ++i) read_column<format>(rows, panel, rows.channel[i], rows.columns + i * kPanel);
    }
    const auto column = [&](int i, int v) { return load_lanes<Vector>(rows.columns + i * kPanel + v * kWide); };
    const float* values = rows.values + first * shared;
    int row = 0;
    for (; row + kRows <= count; row += kRows)
      add_products<kRows>(shared, values + row * shared, c + row * kPanel, column);
    for (; row < count; ++row) add_products<1>(shared, values + row * shared, c + row * kPanel, column);
  }
  for (int i = rows.before[first]; i < rows.before[first + count]; ++i) {
    const Outliers& of = rows.outliers[rows.apart[i]];
    const uint8_t* places = rows.places + i * Outliers::kMost;
    add_products<1>(of.count, of.value, c + (rows.apart[i] - first) * kPanel, [&](int j, int v) {
      return places[j] < shared ? load_lanes<Vector>(rows.columns + places[j] * kPanel + v * kWide)
                                : weights_of<format>(rows, panel, of.at[j], v * kWide);
    });
  }
}

static void add_outliers(OutlierRows& rows, const std::byte* panel, int first, int count, float* c) {
  if (rows.format == Format::int8) add_outliers_of<Format::int8>(rows, panel, first, count, c);
  else add_outliers_of<Format::int4>(rows, panel, first, count, c);
}

template <ActivationKind kind>
static void activate_kind(const Activation& activation, const float* c, const float* bias, int m, u16* h,
                          size_t h_stride) {
  const float alpha = activation.alpha, gate_max = activation.gate_max, limit = activation.up_limit,
              offset = activation.up_offset;
  static const float zeros[kPanel] = {};
  const float* b = bias != nullptr ? bias : zeros;
  for (int row = 0; row < m; ++row, c += kPanel, h += h_stride) {
    if (activation.has_gate) {
      for (int j = 0; j < kTile; ++j) {
        float gate = c[j] + b[j], up = c[kTile + j] + b[kTile + j];
        gate = gate > gate_max ? gate_max : gate;
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        h[j] = to_bf16(activation_of<kind>(gate, alpha) * (up + offset));
      }
    } else {
      for (int j = 0; j < kPanel; ++j) h[j] = to_bf16(activation_of<kind>(c[j] + b[j], alpha));
    }
  }
}

static void activate(const Activation& activation, const float* c, const float* bias, int m, uint16_t* h,
                     size_t h_stride) {
  switch (activation.kind) {
    case ActivationKind::silu:
      return activate_kind<ActivationKind::silu>(activation, c, bias, m, h, h_stride);
    case ActivationKind::gelu:
      return activate_kind<ActivationKind::gelu>(activation, c, bias, m, h, h_stride);
    case ActivationKind::gelu_tanh:
      return activate_kind<ActivationKind::gelu_tanh>(activation, c, bias, m, h, h_stride);
    case ActivationKind::relu:
      return activate_kind<ActivationKind::relu>(activation, c, bias, m, h, h_stride);
    case ActivationKind::relu2:
      return activate_kind<ActivationKind::relu2>(activation, c, bias, m, h, h_stride);
    case ActivationKind::identity:
      return activate_kind<ActivationKind::identity>(activation, c, bias, m, h, h_stride);
  }
}

static void combine(const float* const* y, const float* const* bias, const float* weight, int terms, int n, DType dtype,
                    void* out) {
  constexpr int kChunk = 64;
  for (int start = 0; start < n; start += kChunk) {
    const int width = n - start < kChunk ? n - start : kChunk;
    float sum[kChunk] = {};
    for (int s = 0; s < terms; ++s) {
      const float w = weight[s];
      const float* values = y[s] + start;
      for (int j = 0; j < width; ++j) sum[j] += w * values[j];
      if (bias != nullptr)
        for (int j = 0; j < width; ++j) sum[j] += w * bias[s][start + j];
    }
    if (dtype == DType::f32)
      __builtin_memcpy(static_cast<float*>(out) + start, sum, static_cast<size_t>(width) * sizeof(float));
    else if (dtype == DType::bf16)
      for (int j = 0; j < width; ++j) static_cast<u16*>(out)[start + j] = to_bf16(sum[j]);
    else
      for (int j = 0; j < width; ++j) static_cast<u16*>(out)[start + j] = to_f16(sum[j]);
  }
}

template <class T>
static void widen_typed(const T* x, ptrdiff_t stride, int k, float* out) {
  if (stride == 1)
    for (int i = 0; i < k; ++i) out[i] = load_value(x + i);
  else
    for (int i = 0; i < k; ++i) out[i] = load_value(x + i * stride);
}

static void widen(const void* x, DType dtype, ptrdiff_t stride, int k, float* out) {
  if (dtype == DType::f32) widen_typed(static_cast<const float*>(x), stride, k, out);
  else if (dtype == DType::bf16) widen_typed(static_cast<const Bf16*>(x), stride, k, out);
  else widen_typed(static_cast<const F16*>(x), stride, k, out);
}

static float max_abs(const float* x, int k) { return as_float(max_bits(x, k)); }

static inline float nearest(float x) { return (x + 12582912.0f) - 12582912.0f; }

static inline float clamp_to(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

static void quantise_int8(const float* x, int k, float scale, int8_t* q) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < k; ++i) q[i] = static_cast<int8_t>(clamp_to(nearest(x[i] * inverse), -127.0f, 127.0f));
}

static inline Vector nearest(Vector x) { return (x + 12582912.0f) - 12582912.0f; }

static inline Vector clamp_to(Vector x, float low, float high) {
  return lesser(greater(x, Vector{} + low), Vector{} + high);
}

// A group of weights, continued with zeros to a multiple of 16.
struct Group {
  static constexpr int kSums = 16, kMost = 128, kWide = sizeof(Vector) / sizeof(float), kVectors = kSums / kWide;

  Group(const float* x, int k) {
    for (int i = 0; i < k; ++i) values[i] = x[i];
    for (; k % kSums != 0; ++k) values[k] = 0.0f;
    size = k;
  }

  // term(values, sums) over all of them, with 16 independent sums at every level.
  template <class Term>
  float sum(Term term) const {
    Vector sums[kVectors] = {};
    for (int start = 0; start < size; start += kSums)
      for (int v = 0; v < kVectors; ++v) term(*reinterpret_cast<const Vector*>(values + start + v * kWide), sums[v]);
    return added_up(sums);
  }

  static float added_up(const Vector* sums) {
    alignas(64) float total[kSums];
    for (int v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(total + v * kWide) = sums[v];
    for (int i = 0; i < 8; ++i) total[i] += total[i + 8];
    for (int i = 0; i < 4; ++i) total[i] += total[i + 4];
    return (total[0] + total[2]) + (total[1] + total[3]);
  }

  // The same of several at once, total [kCount]: one alone would be a chain of operations with nothing beside it.
  template <int kCount, class Term>
  void sums(Term term, float* total) const {
    Vector sums[kCount][kVectors] = {};
    for (int start = 0; start < size; start += kSums)
      for (int v = 0; v < kVectors; ++v) {
        const Vector x = *reinterpret_cast<const Vector*>(values + start + v * kWide);
        for (int c = 0; c < kCount; ++c) term(c, x, sums[c][v]);
      }
    for (int c = 0; c < kCount; ++c) total[c] = added_up(sums[c]);
  }

  // The extremes, and 0 where all lie on one side of it.
  void extremes(float* low, float* high) const {
    Vector least{}, most{};
    for (int start = 0; start < size; start += kWide) {
      const auto& x = *reinterpret_cast<const Vector*>(values + start);
      least = lesser(x, least);
      most = greater(x, most);
    }
    *low = *high = 0.0f;
    for (int i = 0; i < kWide; ++i) {
      *low = least[i] < *low ? least[i] : *low;
      *high = most[i] > *high ? most[i] : *high;
    }
  }

  alignas(64) float values[kMost];
  int size;
};

// Of candidate scales the one with the least squared error.
struct BestScale {
  float error = __builtin_inff(), scale = 0.0f, zero = 0.0f;

  // The steps are clamped to [low, high] and `zero` stands for 0.
  void consider(const Group& group, float candidate, float zero_point, float low, float high) {
    const float rounded = from_bf16(to_bf16(candidate));
    if (rounded == 0.0f) return;
    const float inverse = 1.0f / rounded;
    const float total = group.sum([&](const Vector& x, Vector& sums) {
      const Vector difference = x - rounded * clamp_to(nearest(x * inverse), low, high);
      sums += difference * difference;
    });
    if (total < error) error = total, scale = rounded, zero = zero_point;
  }

  // Several of them, in their order: none is 0, and 0 stands for 0.
  template <int kCount>
  void consider_all(const Group& group, const float* candidates, float low, float high) {
    float rounded[kCount], inverse[kCount], total[kCount];
    for (int c = 0; c < kCount; ++c) {
      rounded[c] = from_bf16(to_bf16(candidates[c]));
      inverse[c] = rounded[c] == 0.0f ? 0.0f : 1.0f / rounded[c];
    }
    group.sums<kCount>(
        [&](int c, const Vector& x, Vector& sums) {
          const Vector difference = x - rounded[c] * clamp_to(nearest(x * inverse[c]), low, high);
          sums += difference * difference;
        },
        total);
    for (int c = 0; c < kCount; ++c)
      if (rounded[c] != 0.0f && total[c] < error) error = total[c], scale = rounded[c], zero = 0.0f;
  }

  // Given the steps, the scale of least squared error has a closed form.
  void refine(const Group& group, float low, float high) {
    if (scale == 0.0f) return;
    const float inverse = 1.0f / scale;
    const auto step_of = [&](const Vector& x) { return clamp_to(nearest(x * inverse), low, high); };
    const float product = group.sum([&](const Vector& x, Vector& sums) { sums += step_of(x) * x; });
    const float square = group.sum([&](const Vector& x, Vector& sums) {
      const Vector step = step_of(x);
      sums += step * step;
    });
    if (square > 0.0f) consider(group, product / square, zero, low, high);
  }

  // q [k]: the steps, plus `zero`, at least `least`.
  void quantise(const Group& group, int k, float low, float high, int8_t* q) const {
    const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
    alignas(64) float steps[Group::kMost];
    for (int start = 0; start < group.size; start += Group::kWide)
      *reinterpret_cast<Vector*>(steps + start) =
          clamp_to(nearest(*reinterpret_cast<const Vector*>(group.values + start) * inverse), low, high) + zero;
    for (int i = 0; i < k; ++i) q[i] = static_cast<int8_t>(steps[i]);
  }
};

static uint16_t quantise_int4(const float* x, int k, int8_t* q) {
  const Group group(x, k);
  float low, high;
  group.extremes(&low, &high);
  // -8 has no positive twin: the sign of the scale is chosen so that the larger extreme can use it.
  const float extreme = -low > high ? low : high;
  BestScale best;
  // The extreme maps to about -8.8 ... -5.8: clipping it a little often costs less than a coarser grid for everything
  // else.
  if (extreme != 0.0f) {
    constexpr int kSteps = 16, kAtOnce = 4;
    float candidates[kSteps];
    for (int step = 0; step < kSteps; ++step) candidates[step] = extreme / (-8.8f + 0.2f * static_cast<float>(step));
    for (int step = 0; step < kSteps; step += kAtOnce)
      best.consider_all<kAtOnce>(group, candidates + step, -8.0f, 7.0f);
    best.refine(group, -8.0f, 7.0f);
  }
  best.quantise(group, k, -8.0f, 7.0f, q);
  return to_bf16(best.scale);
}

static uint16_t quantise_int4_zero(const float* x, int k, int8_t* q, uint8_t* zero) {
  const Group group(x, k);
  float low, high;  // zero itself always has a code
  group.extremes(&low, &high);
  BestScale best;
  best.zero = 8.0f;
  // The range is narrowed about its middle by up to a third: clipping a little often costs less than a coarser grid.
  for (int step = 0; step < 12; ++step) {
    const float part = 1.0f - 0.03f * static_cast<float>(step), scale = (high - low) * part / 15.0f;
    if (!(scale > 0.0f)) break;
    const float middle = 0.5f * (low + high) / scale;
    const float shift = clamp_to(nearest(7.5f - middle), 0.0f, 15.0f);
    best.consider(group, scale, shift, -shift, 15.0f - shift);
  }
  best.refine(group, -best.zero, 15.0f - best.zero);
  best.quantise(group, k, -best.zero, 15.0f - best.zero, q);
  *zero = static_cast<uint8_t>(best.zero);
  return to_bf16(best.scale);
}

static void quantise_fp8(const float* x, int k, float scale, uint8_t* codes) {
  const float inverse = 1.0f / scale;
  for (int i = 0; i < k; ++i) {
    const float value = x[i] * inverse;
    const u32 sign = (as_bits(value) >> 24) & 0x80u;
    float magnitude = as_float(as_bits(value) & 0x7fffffffu);
    magnitude = magnitude > 448.0f ? 448.0f : magnitude;
    // Below 2^-6 steps are 2^-9 and the adder rounds; above, the mantissa is rounded to 3 bits, and a carry moves on
    // into the exponent as it should. Both to nearest even.
    const u32 bits = as_bits(magnitude);
    const u32 normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    const u32 subnormal = as_bits(magnitude * 512.0f + 12582912.0f) - 0x4b400000u;
    codes[i] = static_cast<uint8_t>(sign | (magnitude < 0.015625f ? subnormal : normal));
  }
}

// Index of the closest e2m1 magnitude, ties to even; magnitude is at most 6.
static inline float e2m1_index(float magnitude) {
  const float fine = nearest(magnitude * 2.0f), middle = nearest(magnitude) + 2.0f,
              coarse = nearest(magnitude * 0.5f) + 4.0f;
  const float upper = magnitude < 4.0f ? middle : coarse;
  return magnitude < 2.0f ? fine : upper;
}

static inline float e2m1_value(float index) {
  const float upper = index < 6.0f ? index - 2.0f : (index - 4.0f) * 2.0f;
  return index < 4.0f ? index * 0.5f : upper;
}

static void quantise_e2m1(const float* x, int k, float inverse, uint8_t* codes) {
  for (int i = 0; i < k; ++i) {
    const float magnitude = as_float(as_bits(x[i]) & 0x7fffffffu) * inverse;
    const int index = static_cast<int>(e2m1_index(magnitude > 6.0f ? 6.0f : magnitude));
    codes[i] = static_cast<uint8_t>(index | static_cast<int>((as_bits(x[i]) >> 28) & 8u));
  }
}

static uint8_t quantise_mxfp4(const float* x, int k, uint8_t* codes) {
  const u32 most = max_bits(x, k);
  const int exponent = static_cast<int>(most >> 23);
  // 4 <= max|x| / 2^(scale - 127) < 8, and half of that.
  const int first = exponent - 2 < 2 ? 2 : exponent - 2 > 251 ? 251 : exponent - 2;
  float best_error = __builtin_inff();
  int best = first;
  for (int scale = first; scale <= first + 1; ++scale) {
    const float inverse = as_float(static_cast<u32>(254 - scale) << 23);
    const float step = static_cast<float>(1 + scale - first);  // errors are counted in units of the smaller scale
    float error[16] = {};
    for (int start = 0; start < k; start += 16) {
      const int width = k - start < 16 ? k - start : 16;
      for (int i = 0; i < width; ++i) {
        const float magnitude = as_float(as_bits(x[start + i]) & 0x7fffffffu) * inverse;
        const float difference = (magnitude - e2m1_value(e2m1_index(magnitude > 6.0f ? 6.0f : magnitude))) * step;
        error[i] += difference * difference;
      }
    }
    float total = 0.0f;
    for (int i = 0; i < 16; ++i) total += error[i];
    if (total < best_error) {
      best_error = total;
      best = scale;
    }
  }
  quantise_e2m1(x, k, as_float(static_cast<u32>(254 - best) << 23), codes);
  return static_cast<uint8_t>(best);
}
