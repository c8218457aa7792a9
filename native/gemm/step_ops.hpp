// The arithmetic between the matrix products of a decode step: norms, rotation, attention, activation. Plain loops,
// compiled once for each level of vector unit like gemm/vector_ops.hpp.
//
// Values are fp32, but rounded to the model's dtype wherever transformers rounds them, so that a step gives what the
// model's own modules give: the choice of experts would turn over else.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/vector_ops.hpp"

namespace ktinject::gemm {

// Attention of some heads to some positions of the cache. A key may lie in two parts: of latent attention, latent and
// rotary key; the latent is the value, too.
struct Attend {
  const float* q = nullptr;  // [heads, d1 + d2]
  float scale = 1;           // of scores
  int heads = 0;
  const void* k1 = nullptr;  // [positions, d1] of `dtype`
  const void* k2 = nullptr;  // [positions, d2]
  const void* v = nullptr;   // [positions, dv]
  int d1 = 0, d2 = 0, dv = 0;
  DType dtype = DType::bf16;
  const uint8_t* mask = nullptr;  // [positions], 0: not attended to; null: all are
  int first = 0, last = 0;        // of the positions
  float* scratch = nullptr;       // StepOps::attend_scratch, 64-byte aligned
  float* out = nullptr;           // [heads, 2 + dv]: greatest score, sum of weights, weighted values
};

// Attention of some tokens of a prompt, by heads that share keys and values. Numbers lie together within a head.
struct AttendPrompt {
  const void *q = nullptr, *k = nullptr, *v = nullptr;  // [tokens, heads, d], [keys, d], [keys, dv] of dtype
  ptrdiff_t q_stride = 0, q_head_stride = 0;            // values from a token, from a head to the next
  ptrdiff_t k_stride = 0, v_stride = 0;                 // and from a key
  int tokens = 0, heads = 0, keys = 0, d = 0, dv = 0;
  float scale = 1;  // of scores
  DType dtype = DType::bf16;
  int seen = 0;  // without a mask: keys before the first token, which sees these and its own
  // [tokens, keys], its rows `mask_stride` apart: bool, or values of dtype that are added to scores, of which those up
  // to `lowest` hide a key.
  const void* mask = nullptr;
  ptrdiff_t mask_stride = 0;
  bool mask_is_bool = true;
  float lowest = 0;
  const float* sinks = nullptr;  // [heads]: scores that take part in the softmax and have no value; or none
  float* scratch = nullptr;      // StepOps::attend_prompt_scratch, 64-byte aligned
  void* out = nullptr;           // [tokens, heads, dv], its tokens `out_stride` values apart; 0 where nothing is seen
  ptrdiff_t out_stride = 0;
};

// An RMS norm, or with `centred` a layer norm, which takes the mean off first. Its weight is of the model's dtype; null
// where there is no norm.
struct Norm {
  const void* weight = nullptr;
  int size = 0;
  float epsilon = 0;
  bool unit_offset = false;    // the weight is stored without the 1 that it is around; then nothing is rounded before
  bool rounds_first = true;    // the normed values are rounded before they are multiplied with the weight
  bool centred = false;        // then nothing is rounded but what comes out
  const void* bias = nullptr;  // of a centred norm, or none
  bool is_wide = false;        // its weight is fp32 whatever the model's dtype; only what comes out is rounded
};

// A head's step by the gated delta rule: S = decay * S; S += k (beta (v - k S)); out = q S. All in fp32. With `decays`,
// each row of S has its own.
struct DeltaRule {
  const float* q = nullptr;  // [keys]
  const float* k = nullptr;  // [keys]
  const float* v = nullptr;  // [values]
  float decay = 1, beta = 1;
  const float* decays = nullptr;  // [keys], or null
  float* state = nullptr;         // [keys, values], its rows `stride` apart
  int keys = 0, values = 0, stride = 0;
  float* out = nullptr;  // [values]
};

// A head's step of a state space: S = decay * S + x b; out = S c. x b, what S is multiplied with and out are rounded to
// dtype, S itself is not.
struct StateSpace {
  const float* x = nullptr;                // [values]
  const float *b = nullptr, *c = nullptr;  // [size]
  float decay = 1;
  float* state = nullptr;  // [values, size]
  int values = 0, size = 0;
  DType dtype = DType::bf16;
  float* out = nullptr;  // [values]
};

// A step of states that channels have of their own: S = exp(-exp(a_log) dt) S + dt x b; out = S c. What S is multiplied
// with and out are rounded to dtype, all else is not.
struct ChannelStates {
  const float *x = nullptr, *dt = nullptr;  // [channels]
  const float* a_log = nullptr;             // [channels, size]
  const float *b = nullptr, *c = nullptr;   // [size]
  float* state = nullptr;                   // [channels, size]
  int channels = 0, size = 0;
  DType dtype = DType::bf16;
  float* out = nullptr;  // [channels]
};

// A token of a short convolution: out [channels] = the sum over i < taps of weight [-i] · newest [-i], and bias,
// rounded; then silu of it, rounded.
struct Convolution {
  const void* newest = nullptr;  // [channels] of dtype; the token before it lies `stride` values before
  ptrdiff_t stride = 0;
  const float* weight = nullptr;  // [channels] of the newest; those before lie `channels` before
  const float* bias = nullptr;    // [channels], or none
  bool has_silu = false;
  int channels = 0, taps = 0;
  DType dtype = DType::f32;
  void* out = nullptr;  // [channels] of dtype
};

// Positions that are widened at once.
inline constexpr int kAttendPositions = 32;

inline constexpr int kMersenneWords = 624;

struct StepOps {
  // x [n] rounded to dtype.
  void (*round)(float* x, int n, DType dtype);
  // x [n] += y [n], rounded.
  void (*add)(float* x, const float* y, int n, DType dtype);
  // out [n] = x [n] of dtype.
  void (*widen)(const void* x, int n, DType dtype, float* out);
  // out [n] of dtype = x [n].
  void (*store)(const float* x, int n, DType dtype, void* out);
  // out = weight * x / sqrt(mean(x²) + epsilon), rounded; of as many values as the norm is of.
  void (*rms_norm)(const float* x, const Norm& norm, DType dtype, float* out);
  // out [n] = x [n] with pairs of values turned; cos and sin [n] of dtype. The pairs are (i, i + n/2), or with
  // `neighbours` (2i, 2i + 1), and come out as (i, i + n/2).
  void (*rotate)(const float* x, const void* cos, const void* sin, int n, bool neighbours, DType dtype, float* out);
  void (*attend)(const Attend& task);
  // Floats that a task needs for itself; of its memory and positions nothing need be known.
  size_t (*attend_scratch)(const Attend& task);
  int attend_heads;  // that a task over a long cache should have, at most
  // Whether every row saw a key or has a sink.
  bool (*attend_prompt)(const AttendPrompt& task);
  size_t (*attend_prompt_scratch)(const AttendPrompt& task);
  // out [n] = the splits of one head put together, rounded; parts [splits, stride], each as Attend::out has it. `sink`:
  // the score of a place without a value, or null.
  void (*merge)(const float* parts, int splits, size_t stride, int n, const float* sink, DType dtype, float* out);
  // gate [n] = activation(gate) * up, both factors and the product rounded; silu or gelu_tanh.
  void (*gate_up)(float* gate, const float* up, int n, ActivationKind activation, DType dtype);
  // x [n] = x * sigmoid(gate), the factor and the product rounded.
  void (*gate_by_sigmoid)(float* x, const float* gate, int n, DType dtype);
  // x [n] = x * silu(gate), the product rounded.
  void (*gate_by_silu)(float* x, const float* gate, int n, DType dtype);
  // x [channels] = each channel's last inputs times its taps, and bias, rounded, and with `silu` that of it, rounded;
  // state and weight [channels, taps] and bias [channels], or null, of dtype. The inputs in the state move on by one,
  // and x is the last one.
  void (*convolve)(float* x, void* state, const void* weight, const void* bias, int channels, int taps, bool silu,
                   DType dtype);
  void (*convolve_token)(const Convolution& token);
  void (*delta_rule)(const DeltaRule& rule);
  void (*state_space)(const StateSpace& task);
  void (*channel_states)(const ChannelStates& task);
  // x [n] = exp(x - max(x)) / sum
  void (*softmax)(float* x, int n);
  void (*sigmoid)(float* x, int n);
  // out [n] = a [rows] times w [rows, n] of dtype, rounded.
  void (*times_rows)(const float* a, const void* w, int rows, int n, DType dtype, float* out);
  // out [rows] = w [rows, n] of dtype times a [n], rounded.
  void (*rows_times)(const void* w, const float* a, int rows, int n, DType dtype, float* out);

  // The greatest of x [n]; NaN if there is one.
  float (*greatest)(const float* x, int n);
  // The next state of a Mersenne twister, and what it gives of `count` words of a state.
  void (*mersenne_next)(uint32_t* state);
  void (*mersenne_temper)(const uint32_t* state, int count, uint32_t* out);
  // The greatest exp(scores - most) / -log(1 - u) of n, and where; u from words [n, 2].
  float (*race)(const float* scores, const uint32_t* words, int n, float most, int* index);
};

extern const StepOps kBaselineStepOps;
extern const StepOps kAvx2StepOps;
extern const StepOps kAvx512StepOps;
extern const StepOps kAmxStepOps;          // attention on tiles
extern const StepOps kModelledAmxStepOps;  // on a software model of them

}  // namespace ktinject::gemm
