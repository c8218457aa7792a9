// Attention of some tokens of a prompt; included by step_ops.inl. Both products, queries by keys and weights by values,
// are strips of rows by panels of columns: sums stay in registers, a panel in the first cache, and the rows of all
// heads that share keys pass by it. Everything is fp32, so nothing is rounded but the result.

// Keys at a time, and the size of a strip of sums.
constexpr int kPromptKeys = 64, kTall = kVector == 16 ? 12 : 6, kWide = 2 * kVector;
static_assert(kPromptKeys % kWide == 0);

// c [kTall, kWide] (rows `c_stride` apart) = factor [row] · c + a [kTall, depth] times the panel b [depth, kWide];
// without factors, the product alone.
static inline void multiply_strip(const float* a, int a_stride, const float* b, int depth, const float* factor,
                                  float* c, int c_stride) {
  Vector first[kTall], second[kTall];
#pragma GCC unroll 12
  for (int r = 0; r < kTall; ++r) first[r] = second[r] = Vector{};
  for (int i = 0; i < depth; ++i) {
    const Vector left = vector_of(b + i * kWide), right = vector_of(b + i * kWide + kVector);
#pragma GCC unroll 12
    for (int r = 0; r < kTall; ++r) {
      first[r] += left * a[r * a_stride + i];
      second[r] += right * a[r * a_stride + i];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kTall; ++r) {
    float* to = c + r * c_stride;
    if (factor != nullptr) {
      first[r] += vector_of(to) * factor[r];
      second[r] += vector_of(to + kVector) * factor[r];
    }
    put_vector(to, first[r]);
    put_vector(to + kVector, second[r]);
  }
}

// c [rows, width] = factor · c + a [rows, depth] times `width / kWide` panels.
static void multiply_panels(const float* a, int a_stride, int rows, const float* panels, int depth, int width,
                            const float* factor, float* c) {
  for (int column = 0; column < width; column += kWide, panels += depth * kWide)
    for (int row = 0; row < rows; row += kTall)
      multiply_strip(a + row * a_stride, a_stride, panels, depth, factor == nullptr ? nullptr : factor + row,
                     c + row * width + column, width);
}

// How the scratch of a task is laid out; in floats.
struct PromptSpace {
  int rows, width;  // padded: tokens times heads, and values of one
  size_t q, out, top, sum, factor, scores, panels, row, added, count;

  explicit PromptSpace(const AttendPrompt& task)
      : rows((task.tokens * task.heads + kTall - 1) / kTall * kTall), width((task.dv + kWide - 1) / kWide * kWide) {
    size_t at = 0;
    const auto take = [&](int height, int wide) {
      const size_t begin = at;
      at += (static_cast<size_t>(height) * static_cast<size_t>(wide) + 15) / 16 * 16;
      return begin;
    };
    q = take(rows, task.d);
    out = take(rows, width);
    top = take(rows, 1);
    sum = take(rows, 1);
    factor = take(rows, 1);
    scores = take(rows, kPromptKeys);
    panels = take(kPromptKeys, task.d > width ? task.d : width);
    row = take(kWide, task.d > task.dv ? task.d : task.dv);
    added = take(task.tokens, kPromptKeys);
    count = at;
  }
};

static size_t attend_prompt_scratch(const AttendPrompt& task) { return PromptSpace(task).count; }

// Of `count` keys from `first` on to [panels, d, kWide]; those past the last are zeros.
static void pack_prompt_keys(const AttendPrompt& task, int first, int count, float* row, float* to) {
  for (int j = 0; j < kPromptKeys; j += kWide, to += kWide * task.d) {
    for (int l = 0; l < kWide; ++l) {
      float* one = row + l * task.d;
      if (j + l < count)
        widen_any(task.k, task.dtype, static_cast<size_t>((first + j + l) * task.k_stride), task.d, one);
      else
        for (int i = 0; i < task.d; ++i) one[i] = 0.0f;
    }
    for (int i = 0; i < task.d; ++i)
      for (int l = 0; l < kWide; ++l) to[i * kWide + l] = row[l * task.d + i];
  }
}

// Of `count` values from `first` on to [width / kWide, count, kWide].
static void pack_prompt_values(const AttendPrompt& task, int first, int count, int width, float* row, float* to) {
  for (int j = 0; j < count; ++j) {
    widen_any(task.v, task.dtype, static_cast<size_t>((first + j) * task.v_stride), task.dv, row);
    for (int i = 0; i < width; i += kWide)
      for (int l = 0; l < kWide; ++l) to[(i * count) + j * kWide + l] = i + l < task.dv ? row[i + l] : 0.0f;
  }
}

enum class Seen { none, some, all };

// How many of `count` keys from `first` on a token sees; where a mask says which, all of them.
static inline int prompt_seen(const AttendPrompt& task, int token, int first, int count) {
  if (task.mask != nullptr) return count;
  const int seen = task.seen + token + 1 - first;
  return seen < 0 ? 0 : seen < count ? seen : count;
}

// What a mask lets tokens see of `count` keys from `first` on; where that is a part, `added` [tokens, kPromptKeys] is
// what is added to their scores: minus infinity for what is hidden.
static Seen prompt_mask(const AttendPrompt& task, int first, int count, float* added) {
  const float never = -__builtin_inff();
  if (task.mask == nullptr) return first > task.seen + task.tokens - 1 ? Seen::none : Seen::all;
  int hidden = 0, plain = 0;
  for (int t = 0; t < task.tokens; ++t) {
    float* to = added + t * kPromptKeys;
    if (task.mask_is_bool) {
      const auto* from = static_cast<const uint8_t*>(task.mask) + t * task.mask_stride + first;
      for (int j = 0; j < count; ++j) to[j] = from[j] != 0 ? 0.0f : never;
    } else {
      widen_any(task.mask, task.dtype, static_cast<size_t>(t * task.mask_stride + first), count, to);
      for (int j = 0; j < count; ++j) to[j] = to[j] <= task.lowest ? never : to[j];
    }
    for (int j = 0; j < count; ++j) hidden += to[j] == never;
    for (int j = 0; j < count; ++j) plain += to[j] == 0.0f;
  }
  if (hidden == task.tokens * count) return Seen::none;
  return plain == task.tokens * count ? Seen::all : Seen::some;
}

// exp_of each, of what is not above 0; minus infinity gives 0, NaN itself. In vectors, since the compiler makes
// branches of comparisons of floats in a loop.
static inline Vector weights_of(const Vector& x) {
  const Vector low = x > -87.0f ? x : Vector{} - 87.0f, shifted = low * 1.44269504088896341f + 12582912.0f;
  const Vector n = shifted - 12582912.0f;
  const Vector r = (low - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  Vector p = r * 1.388888888888889e-3f + 8.333333333333333e-3f;
  p = p * r + 4.166666666666666e-2f;
  p = p * r + 1.666666666666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Order bits, exponent;
  __builtin_memcpy(&bits, &p, sizeof p);
  __builtin_memcpy(&exponent, &shifted, sizeof p);
  bits += (exponent - 0x4b400000) << 23;
  __builtin_memcpy(&p, &bits, sizeof p);
  return x > -__builtin_inff() ? p : (x < 0.0f ? Vector{} : x);
}

// Scores of a row, the first `count` of which count, become weights, whose sum and greatest score are kept. Gives the
// factor by which what was added up before shrinks. A score that is NaN makes the sum NaN, and so all that comes of it.
static float weigh_row(float* score, const float* added, int count, float* top, float* sum) {
  const float never = -__builtin_inff();
  for (int j = count; j < kPromptKeys; ++j) score[j] = never;
  if (added != nullptr)
    for (int j = 0; j < count; ++j) score[j] += added[j];
  Vector most = vector_of(score);
  for (int j = kVector; j < kPromptKeys; j += kVector) {
    const Vector next = vector_of(score + j);
    most = most > next ? most : next;
  }
  float lanes[kVector], greatest_score = *top;
  put_vector(lanes, most);
  for (int l = 0; l < kVector; ++l) greatest_score = lanes[l] > greatest_score ? lanes[l] : greatest_score;
  if (greatest_score == never) {  // nothing was seen yet, or nothing but NaN, which no comparison finds
    bool is_nan = false;
    for (int j = 0; j < count; ++j) is_nan |= score[j] != score[j];
    for (int j = 0; j < kPromptKeys; ++j) score[j] = 0.0f;
    if (!is_nan) return 0.0f;
    *sum = *top = score[0] = __builtin_nanf("");
    return *sum;
  }
  Vector all = {};
  for (int j = 0; j < kPromptKeys; j += kVector) {
    const Vector weight = weights_of(vector_of(score + j) - greatest_score);
    put_vector(score + j, weight);
    all += weight;
  }
  put_vector(lanes, all);
  float added_up = 0.0f;
  for (int l = 0; l < kVector; ++l) added_up += lanes[l];
  const float factor = *top == never ? 0.0f : exp_of(*top - greatest_score);
  *sum = *sum * factor + added_up;
  *top = greatest_score;
  return factor;
}

// Rows are [tokens, heads]. Gives whether every one saw a key or has a sink; what that one holds may be NaN.
static bool attend_prompt(const AttendPrompt& task) {
  const PromptSpace space(task);
  const int rows = task.tokens * task.heads;
  float *q = task.scratch + space.q, *out = task.scratch + space.out, *top = task.scratch + space.top;
  float *sum = task.scratch + space.sum, *factor = task.scratch + space.factor, *scores = task.scratch + space.scores;
  float *panels = task.scratch + space.panels, *row = task.scratch + space.row, *added = task.scratch + space.added;
  const float never = -__builtin_inff();
  const size_t width = size_of(task.dtype);
  for (int r = 0; r < space.rows; ++r) {
    top[r] = never;
    sum[r] = factor[r] = 0.0f;
    float* one = q + r * task.d;
    if (r < rows) {
      const ptrdiff_t at = r / task.heads * task.q_stride + r % task.heads * task.q_head_stride;
      widen_any(task.q, task.dtype, static_cast<size_t>(at), task.d, one);
      for (int i = 0; i < task.d; ++i) one[i] *= task.scale;
    } else {
      for (int i = 0; i < task.d; ++i) one[i] = 0.0f;
    }
  }
  for (int i = 0; i < space.rows * space.width; ++i) out[i] = 0.0f;
  for (int first = 0; first < task.keys; first += kPromptKeys) {
    const int count = task.keys - first < kPromptKeys ? task.keys - first : kPromptKeys;
    const Seen seen = prompt_mask(task, first, count, added);
    if (seen == Seen::none) continue;
    pack_prompt_keys(task, first, count, row, panels);
    multiply_panels(q, task.d, space.rows, panels, task.d, kPromptKeys, nullptr, scores);
    for (int r = 0; r < rows; ++r)
      factor[r] =
          weigh_row(scores + r * kPromptKeys, seen == Seen::all ? nullptr : added + r / task.heads * kPromptKeys,
                    prompt_seen(task, r / task.heads, first, count), top + r, sum + r);
    pack_prompt_values(task, first, count, space.width, row, panels);
    multiply_panels(scores, kPromptKeys, space.rows, panels, count, space.width, factor, out);
  }
  bool is_whole = true;
  for (int r = 0; r < rows; ++r) {
    const int token = r / task.heads, head = r % task.heads;
    float part = 1.0f, all = sum[r];
    if (task.sinks != nullptr) {
      const float sink = task.sinks[head], most = sink > top[r] ? sink : top[r];
      part = top[r] == never ? 0.0f : exp_of(top[r] - most);
      all = all * part + exp_of(sink - most);
    }
    is_whole &= all != 0.0f;
    const float inverse = all != 0.0f ? part / all : 0.0f;
    float* one = out + r * space.width;
    for (int i = 0; i < task.dv; ++i) one[i] *= inverse;
    store(one, task.dv, task.dtype,
          static_cast<char*>(task.out) + (token * task.out_stride + head * task.dv) * static_cast<ptrdiff_t>(width));
  }
  return is_whole;
}
