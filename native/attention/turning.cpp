#include "attention/turning.hpp"

#include <algorithm>

namespace ktinject::attention {

void turn(const gemm::StepOps& ops, const float* q, int n, const Step& step, int row, bool neighbours, float* out) {
  const DType dtype = step.has_wide_rotation ? DType::f32 : step.dtype;
  ops.rotate(q, step.rotation(step.cos, row), step.rotation(step.sin, row), step.rotary, neighbours, dtype, out);
  std::copy(q + step.rotary, q + n, out + step.rotary);
}

void turn_in_place(const gemm::StepOps& ops, const float* q, int n, const Step& step, int row, bool neighbours,
                   float* tables, float* out) {
  const int rotary = step.rotary, half = rotary / 2;
  float *cos = tables, *sin = tables + rotary;
  const DType dtype = step.has_wide_rotation ? DType::f32 : step.dtype;
  ops.widen(step.rotation(step.cos, row), rotary, dtype, cos);
  ops.widen(step.rotation(step.sin, row), rotary, dtype, sin);
  float *turned = tables + 2 * rotary, *across = turned + rotary;
  for (int i = 0; i < half; ++i) {
    const int a = neighbours ? 2 * i : i, b = neighbours ? 2 * i + 1 : half + i;
    const int other = neighbours ? i : half + i;  // where the table has what the second of a pair takes
    turned[a] = q[a] * cos[i];
    turned[b] = q[b] * cos[other];
    across[a] = -q[b] * sin[i];
    across[b] = q[a] * sin[other];
  }
  ops.round(turned, rotary, dtype);
  ops.round(across, rotary, dtype);
  for (int i = 0; i < rotary; ++i) out[i] = turned[i] + across[i];
  ops.round(out, rotary, step.dtype);
  std::copy(q + rotary, q + n, out + rotary);
}

}  // namespace ktinject::attention
