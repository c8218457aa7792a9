// Numbers of the served dtypes and functions of them; included like stages.inl, and under the same rules.

using u16 = uint16_t;
using u32 = uint32_t;

static inline float as_float(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

static inline u32 as_bits(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Round to nearest even; NaN stays NaN.
static inline u16 to_bf16(float value) {
  const u32 bits = as_bits(value);
  const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32 quiet = (bits >> 16) | 0x40u;
  return static_cast<u16>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

static inline float from_bf16(u16 bits) { return as_float(static_cast<u32>(bits) << 16); }

// Exact for every half: subnormals are scaled up by the multiplication, infinities and NaNs keep an all-ones exponent.
static inline float from_f16(u16 half) {
  const u32 magnitude = (half & 0x7fffu) << 13;
  const float finite = as_float(magnitude) * as_float(0x77800000u);  // 2^112
  const u32 special = magnitude | 0x7f800000u;
  const u32 bits = magnitude >= 0x0f800000u ? special : as_bits(finite);
  return as_float(bits | (static_cast<u32>(half & 0x8000u) << 16));
}

// Round to nearest even, overflow to infinity.
static inline u16 to_f16(float value) {
  const u32 bits = as_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  u32 result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal half: let the adder round at bit 2^-24
    result = as_bits(as_float(magnitude) + as_float(0x3f000000u)) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<u16>(result | sign);
}

static inline float load_value(const float* x) { return *x; }
struct Bf16 {
  u16 bits;
};
struct F16 {
  u16 bits;
};
static inline float load_value(const Bf16* x) { return from_bf16(x->bits); }
static inline float load_value(const F16* x) { return from_f16(x->bits); }

// exp(x), relative error below 2e-7, no branches. Powers of two by exponent bits, the rest by a degree 6 polynomial.
// NaN stays NaN: the last sum is with 0 for all else, and what NaN has in its low bits might have become an exponent.
static inline float exp_of(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float shifted =
      x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low mantissa bits
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860682030941723e-6f;
  float p = 1.388888888888889e-3f;
  p = p * r + 8.333333333333333e-3f;
  p = p * r + 4.166666666666666e-2f;
  p = p * r + 1.666666666666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return as_float(as_bits(p) + ((as_bits(shifted) - 0x4b400000u) << 23)) + (x - x);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }
