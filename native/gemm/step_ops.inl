// Included by step_ops_<level>.cpp inside its target region and namespace, under the rules of gemm/vector_ops.inl.
#include "gemm/values.inl"

// Nothing here is called from elsewhere than this file, so how lanes are passed does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

// Sixteen sums side by side: an order that does not depend on the width of the vector unit.
typedef float Lanes __attribute__((vector_size(64)));
constexpr int kLanes = 16;

static inline Lanes lanes_of(const float* x) {
  Lanes lanes;
  __builtin_memcpy(&lanes, x, sizeof lanes);
  return lanes;
}
static inline void put_lanes(float* x, const Lanes& lanes) { __builtin_memcpy(x, &lanes, sizeof lanes); }
static inline float sum_of(const Lanes& lanes) {
  float sum[kLanes];
  put_lanes(sum, lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
  return sum[0];
}

struct Exact {
  static inline float round(float x) { return x; }
};
struct ToBf16 {
  static inline float round(float x) { return from_bf16(to_bf16(x)); }
};
struct ToF16 {
  static inline float round(float x) { return from_f16(to_f16(x)); }
};

// task(value of the dtype's storage type, value of its rounding)
template <class Task>
static inline void of_dtype(DType dtype, const Task& task) {
  if (dtype == DType::f32) task(static_cast<const float*>(nullptr), Exact());
  else if (dtype == DType::bf16) task(static_cast<const Bf16*>(nullptr), ToBf16());
  else task(static_cast<const F16*>(nullptr), ToF16());
}

static inline size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

template <class T>
static inline void widen_row(const T* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = load_value(x + i);
}

static void widen_any(const void* x, DType dtype, size_t at, int n, float* out) {
  of_dtype(dtype, [&](auto* kind, auto) { widen_row(static_cast<decltype(kind)>(x) + at, n, out); });
}

static void widen_all(const void* x, int n, DType dtype, float* out) { widen_any(x, dtype, 0, n, out); }

static void round_all(float* x, int n, DType dtype) {
  of_dtype(dtype, [&](auto*, auto to) {
    for (int i = 0; i < n; ++i) x[i] = to.round(x[i]);
  });
}

static void add(float* x, const float* y, int n, DType dtype) {
  of_dtype(dtype, [&](auto*, auto to) {
    for (int i = 0; i < n; ++i) x[i] = to.round(x[i] + y[i]);
  });
}

static void store(const float* x, int n, DType dtype, void* out) {
  if (dtype == DType::f32) __builtin_memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
  else if (dtype == DType::bf16)
    for (int i = 0; i < n; ++i) static_cast<u16*>(out)[i] = to_bf16(x[i]);
  else
    for (int i = 0; i < n; ++i) static_cast<u16*>(out)[i] = to_f16(x[i]);
}

static float dot(const float* a, const float* b, int n) {
  Lanes sums = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sums += lanes_of(a + i) * lanes_of(b + i);
  float sum = sum_of(sums);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

static void layer_norm(const float* x, const Norm& norm, DType dtype, float* out) {
  const int n = norm.size;
  Lanes sums = {};
  int at = 0;
  for (; at + kLanes <= n; at += kLanes) sums += lanes_of(x + at);
  float mean = sum_of(sums);
  for (; at < n; ++at) mean += x[at];
  mean /= static_cast<float>(n);
  for (int i = 0; i < n; ++i) out[i] = x[i] - mean;
  const float inverse = 1.0f / __builtin_sqrtf(dot(out, out, n) / static_cast<float>(n) + norm.epsilon);
  of_dtype(dtype, [&](auto* kind, auto to) {
    auto *w = static_cast<decltype(kind)>(norm.weight), *b = static_cast<decltype(kind)>(norm.bias);
    for (int i = 0; i < n; ++i) {
      const float normed = load_value(w + i) * (out[i] * inverse);
      out[i] = to.round(b == nullptr ? normed : normed + load_value(b + i));
    }
  });
}

static void rms_norm(const float* x, const Norm& norm, DType dtype, float* out) {
  if (norm.centred) return layer_norm(x, norm, dtype, out);
  const int n = norm.size;
  if (norm.is_wide && dtype != DType::f32) {
    rms_norm(x, norm, DType::f32, out);
    return round_all(out, n, dtype);
  }
  const float inverse = 1.0f / __builtin_sqrtf(dot(x, x, n) / static_cast<float>(n) + norm.epsilon);
  const float offset = norm.unit_offset ? 1.0f : 0.0f;
  of_dtype(dtype, [&](auto* kind, auto to) {
    auto* w = static_cast<decltype(kind)>(norm.weight);
    if (norm.rounds_first)
      for (int i = 0; i < n; ++i) out[i] = to.round(load_value(w + i) * to.round(x[i] * inverse));
    else
      for (int i = 0; i < n; ++i) out[i] = to.round((load_value(w + i) + offset) * (x[i] * inverse));
  });
}

static void rotate(const float* x, const void* cos, const void* sin, int n, bool neighbours, DType dtype, float* out) {
  const int half = n / 2, step = neighbours ? 2 : 1, other = neighbours ? 1 : half;
  of_dtype(dtype, [&](auto* kind, auto to) {
    auto *c = static_cast<decltype(kind)>(cos), *s = static_cast<decltype(kind)>(sin);
    for (int i = 0; i < half; ++i) {
      const float a = x[i * step], b = x[i * step + other];
      out[i] = to.round(to.round(a * load_value(c + i)) - to.round(b * load_value(s + i)));
      out[i + half] = to.round(to.round(b * load_value(c + half + i)) + to.round(a * load_value(s + half + i)));
    }
  });
}

static float greatest(const float* x, int n) {
  float most = x[0];
  for (int i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

#include "gemm/attend.inl"
#include "gemm/attend_prompt.inl"

static void merge(const float* parts, int splits, size_t stride, int n, const float* sink, DType dtype, float* out) {
  float most = parts[0], sum = 0.0f;
  for (int s = 1; s < splits; ++s)
    most = parts[static_cast<size_t>(s) * stride] > most ? parts[static_cast<size_t>(s) * stride] : most;
  if (sink != nullptr) {
    most = *sink > most ? *sink : most;
    sum = exp_of(*sink - most);
  }
  for (int i = 0; i < n; ++i) out[i] = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const float* part = parts + static_cast<size_t>(s) * stride;
    if (part[1] == 0.0f) continue;
    const float weight = exp_of(part[0] - most);
    sum += weight * part[1];
    for (int i = 0; i < n; ++i) out[i] += weight * part[2 + i];
  }
  const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
  for (int i = 0; i < n; ++i) out[i] *= inverse;
  round_all(out, n, dtype);
}

static void gate_up(float* gate, const float* up, int n, ActivationKind activation, DType dtype) {
  of_dtype(dtype, [&](auto*, auto to) {
    if (activation == ActivationKind::gelu_tanh) {
      for (int i = 0; i < n; ++i) {
        const float x = gate[i];  // 0.5 (1 + tanh(u)) is sigmoid(2u)
        gate[i] = to.round(to.round(x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x))) * up[i]);
      }
      return;
    }
    for (int i = 0; i < n; ++i) gate[i] = to.round(to.round(gate[i] * sigmoid(gate[i])) * up[i]);
  });
}

static void gate_by_sigmoid(float* x, const float* gate, int n, DType dtype) {
  of_dtype(dtype, [&](auto*, auto to) {
    for (int i = 0; i < n; ++i) x[i] = to.round(x[i] * to.round(sigmoid(gate[i])));
  });
}

static void gate_by_silu(float* x, const float* gate, int n, DType dtype) {
  of_dtype(dtype, [&](auto*, auto to) {
    for (int i = 0; i < n; ++i) x[i] = to.round(x[i] * (gate[i] * sigmoid(gate[i])));
  });
}

template <class T, class Rounding>
static inline void convolve_as(float* x, T* held, const void* weights, const void* biases, int channels, int taps,
                               bool silu, DType dtype, Rounding to) {
  auto *weight = static_cast<const T*>(weights), *bias = static_cast<const T*>(biases);
  for (int c = 0; c < channels; ++c, held += taps, weight += taps) {
    for (int t = 0; t + 1 < taps; ++t) held[t] = held[t + 1];
    store(x + c, 1, dtype, held + taps - 1);
    float sum = 0.0f;
    for (int t = 0; t < taps; ++t) sum += load_value(weight + t) * load_value(held + t);
    if (bias != nullptr) sum += load_value(bias + c);
    x[c] = to.round(sum);
  }
  if (!silu) return;
  for (int c = 0; c < channels; ++c) x[c] = to.round(x[c] * sigmoid(x[c]));
}

static void convolve(float* x, void* state, const void* weight, const void* bias, int channels, int taps, bool silu,
                     DType dtype) {
  if (dtype == DType::f32)
    convolve_as(x, static_cast<float*>(state), weight, bias, channels, taps, silu, dtype, Exact());
  else if (dtype == DType::bf16)
    convolve_as(x, static_cast<Bf16*>(state), weight, bias, channels, taps, silu, dtype, ToBf16());
  else convolve_as(x, static_cast<F16*>(state), weight, bias, channels, taps, silu, dtype, ToF16());
}

// Channels of which sums are held at a time.
constexpr int kChannelsTogether = 256;

template <class T, class Rounding>
static inline void convolve_token_as(const Convolution& token, const T* newest, Rounding to) {
  float sum[kChannelsTogether];
  for (int first = 0; first < token.channels; first += kChannelsTogether) {
    const int count = token.channels - first < kChannelsTogether ? token.channels - first : kChannelsTogether;
    for (int c = 0; c < count; ++c) sum[c] = token.bias == nullptr ? 0.0f : token.bias[first + c];
    // The oldest first, as in `convolve`.
    for (int i = token.taps - 1; i >= 0; --i) {
      const T* x = newest + first - i * token.stride;
      const float* weight = token.weight + first - static_cast<ptrdiff_t>(i) * token.channels;
      for (int c = 0; c < count; ++c) sum[c] += weight[c] * load_value(x + c);
    }
    for (int c = 0; c < count; ++c) sum[c] = to.round(sum[c]);
    if (token.has_silu)
      for (int c = 0; c < count; ++c) sum[c] = to.round(sum[c] * sigmoid(sum[c]));
    const size_t width = size_of(token.dtype);
    store(sum, count, token.dtype, static_cast<char*>(token.out) + static_cast<size_t>(first) * width);
  }
}

static void convolve_token(const Convolution& token) {
  of_dtype(token.dtype,
           [&](auto* kind, auto to) { convolve_token_as(token, static_cast<decltype(kind)>(token.newest), to); });
}

// Columns of a state are independent of each other, so how many are taken at a time changes no sum. They are as many as
// stay in registers; a vector wider than a register, multiplied with one number, passes through memory.
static void delta_rule(const DeltaRule& rule) {
  constexpr int kVectors = 4, kTogether = kVectors * kVector;
  const int n = rule.values;
  const size_t stride = static_cast<size_t>(rule.stride);
  auto decay = [&](int row) { return rule.decays == nullptr ? rule.decay : rule.decays[row]; };
  int first = 0;
  for (; first + kTogether <= n; first += kTogether) {
    float* column = rule.state + first;
    Vector found[kVectors] = {}, sums[kVectors] = {};
    for (int i = 0; i < rule.keys; ++i)
      for (int t = 0; t < kVectors; ++t)
        found[t] += vector_of(column + static_cast<size_t>(i) * stride + t * kVector) * decay(i) * rule.k[i];
    for (int t = 0; t < kVectors; ++t) found[t] = (vector_of(rule.v + first + t * kVector) - found[t]) * rule.beta;
    for (int i = 0; i < rule.keys; ++i)
      for (int t = 0; t < kVectors; ++t) {
        float* values = column + static_cast<size_t>(i) * stride + t * kVector;
        const Vector state = vector_of(values) * decay(i) + found[t] * rule.k[i];
        put_vector(values, state);
        sums[t] += state * rule.q[i];
      }
    for (int t = 0; t < kVectors; ++t) put_vector(rule.out + first + t * kVector, sums[t]);
  }
  for (; first < n; ++first) {
    float found = 0.0f, sum = 0.0f;
    float* column = rule.state + first;
    for (int i = 0; i < rule.keys; ++i) found += column[static_cast<size_t>(i) * stride] * decay(i) * rule.k[i];
    found = (rule.v[first] - found) * rule.beta;
    for (int i = 0; i < rule.keys; ++i) {
      column[static_cast<size_t>(i) * stride] = column[static_cast<size_t>(i) * stride] * decay(i) + found * rule.k[i];
      sum += column[static_cast<size_t>(i) * stride] * rule.q[i];
    }
    rule.out[first] = sum;
  }
}

static void state_space(const StateSpace& task) {
  of_dtype(task.dtype, [&](auto*, auto to) {
    const int n = task.size;
    float* row = task.state;
    for (int v = 0; v < task.values; ++v, row += n) {
      const float x = task.x[v];
      Lanes sums = {};
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        float part[kLanes];
        for (int l = 0; l < kLanes; ++l) {
          row[i + l] = row[i + l] * task.decay + to.round(x * task.b[i + l]);
          part[l] = to.round(row[i + l]);
        }
        sums += lanes_of(part) * lanes_of(task.c + i);
      }
      float sum = sum_of(sums);
      for (; i < n; ++i) {
        row[i] = row[i] * task.decay + to.round(x * task.b[i]);
        sum += to.round(row[i]) * task.c[i];
      }
      task.out[v] = to.round(sum);
    }
  });
}

static void channel_states(const ChannelStates& task) {
  of_dtype(task.dtype, [&](auto*, auto to) {
    const int n = task.size;
    float* row = task.state;
    const float* rate = task.a_log;
    for (int v = 0; v < task.channels; ++v, row += n, rate += n) {
      const float dt = task.dt[v], x = task.x[v];
      Lanes sums = {};
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        float part[kLanes];
        for (int l = 0; l < kLanes; ++l) {
          row[i + l] = row[i + l] * exp_of(-exp_of(rate[i + l]) * dt) + dt * task.b[i + l] * x;
          part[l] = to.round(row[i + l]);
        }
        sums += lanes_of(part) * lanes_of(task.c + i);
      }
      float sum = sum_of(sums);
      for (; i < n; ++i) {
        row[i] = row[i] * exp_of(-exp_of(rate[i]) * dt) + dt * task.b[i] * x;
        sum += to.round(row[i]) * task.c[i];
      }
      task.out[v] = to.round(sum);
    }
  });
}

static void softmax(float* x, int n) {
  const float most = greatest(x, n);
  for (int i = 0; i < n; ++i) x[i] = exp_of(x[i] - most);
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += x[i];
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

static void sigmoid_all(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = sigmoid(x[i]);
}

static void times_rows(const float* a, const void* w, int rows, int n, DType dtype, float* out) {
  for (int i = 0; i < n; ++i) out[i] = 0.0f;
  of_dtype(dtype, [&](auto* kind, auto to) {
    auto* row = static_cast<decltype(kind)>(w);
    for (int r = 0; r < rows; ++r, row += n)
      for (int i = 0; i < n; ++i) out[i] += a[r] * load_value(row + i);
    for (int i = 0; i < n; ++i) out[i] = to.round(out[i]);
  });
}

static void rows_times(const void* w, const float* a, int rows, int n, DType dtype, float* out) {
  of_dtype(dtype, [&](auto* kind, auto to) {
    auto* row = static_cast<decltype(kind)>(w);
    for (int r = 0; r < rows; ++r, row += n) {
      Lanes sums = {};
      int i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        float part[kLanes];
        for (int l = 0; l < kLanes; ++l) part[l] = load_value(row + i + l);
        sums += lanes_of(part) * lanes_of(a + i);
      }
      float sum = sum_of(sums);
      for (; i < n; ++i) sum += load_value(row + i) * a[i];
      out[r] = to.round(sum);
    }
  });
}

// As ordered integers, because a maximum of floats is not a reduction the compiler may reorder. NaN is beyond all.
static float greatest_of(const float* x, int n) {
  auto ordered = [](int32_t bits) { return bits >= 0 ? bits : static_cast<int32_t>(0x80000000u) - bits; };
  int32_t most = INT32_MIN;
  for (int i = 0; i < n; ++i) {
    const u32 bits = as_bits(x[i]), absolute = bits & 0x7fffffffu;
    const int32_t value = ordered(static_cast<int32_t>(absolute > 0x7f800000u ? absolute : bits));
    most = value > most ? value : most;
  }
  return as_float(static_cast<u32>(ordered(most)));
}

static void mersenne_next(uint32_t* state) {
  constexpr int kPeriod = 397;
  auto mixed = [](u32 a, u32 b) {
    return (((a & 0x80000000u) | (b & 0x7fffffffu)) >> 1) ^
           (static_cast<u32>(-static_cast<int32_t>(b & 1u)) & 0x9908b0dfu);
  };
  // Words are made from ones 397 places on, or 227 back: runs of that length depend on nothing in themselves.
  constexpr int kBack = kMersenneWords - kPeriod;
  for (int i = 0; i < kBack; ++i) state[i] = state[i + kPeriod] ^ mixed(state[i], state[i + 1]);
  for (int first = kBack; first < kMersenneWords - 1; first += kBack) {
    const int last = first + kBack < kMersenneWords - 1 ? first + kBack : kMersenneWords - 1;
#pragma GCC ivdep
    for (int i = first; i < last; ++i) state[i] = state[i - kBack] ^ mixed(state[i], state[i + 1]);
  }
  state[kMersenneWords - 1] = state[kPeriod - 1] ^ mixed(state[kMersenneWords - 1], state[0]);
}

static void mersenne_temper(const uint32_t* state, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) {
    u32 word = state[i];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    out[i] = word ^ (word >> 18);
  }
}

static float race(const float* scores, const uint32_t* words, int n, float most, int* index) {
  // The 53 bits that torch takes of two words.
  auto uniform = [&](int i) {
    const uint64_t bits = (static_cast<uint64_t>(words[2 * i] & 0x1fffffu) << 32) | words[2 * i + 1];
    return static_cast<double>(bits) * 0x1p-53;
  };
  float best = -1.0f;
  *index = 0;
  for (int first = 0; first < n; first += kLanes) {
    const int count = n - first < kLanes ? n - first : kLanes;
    float weight[kLanes] = {}, above[kLanes] = {};
    for (int l = 0; l < count; ++l) {
      const float x = scores[first + l] - most;
      const float rough = static_cast<float>(static_cast<int32_t>(words[2 * (first + l)] & 0x1fffffu)) * 0x1p-21f;
      weight[l] = x < -87.0f ? 0.0f : exp_of(x);
      above[l] = weight[l] - best * rough;  // not below what it is with all bits of u
    }
    bool may_win = false;
    for (int l = 0; l < count; ++l) may_win |= above[l] > 0.0f;
    if (!may_win) continue;
    for (int l = 0; l < count; ++l) {
      if (!(above[l] > 0.0f)) continue;
      const float quotient = weight[l] / static_cast<float>(-__builtin_log1p(-uniform(first + l)));
      if (quotient > best) {
        best = quotient;
        *index = first + l;
      }
    }
  }
  return best;
}

constexpr StepOps kStepOps = {round_all,
                              add,
                              widen_all,
                              store,
                              rms_norm,
                              rotate,
                              attend,
                              attend_scratch,
                              kPlainHeads,
                              attend_prompt,
                              attend_prompt_scratch,
                              merge,
                              gate_up,
                              gate_by_sigmoid,
                              gate_by_silu,
                              convolve,
                              convolve_token,
                              delta_rule,
                              state_space,
                              channel_states,
                              softmax,
                              sigmoid_all,
                              times_rows,
                              rows_times,
                              greatest_of,
                              mersenne_next,
                              mersenne_temper,
                              race};
