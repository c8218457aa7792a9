// The rotation of queries and keys by their positions.
#pragma once

#include "attention/attention.hpp"

namespace ktinject::attention {

// q [n] with its first `rotary` values turned, the rest as it is. The pairs are (i, i + rotary/2), or with `neighbours`
// (2i, 2i + 1), and come out as (i, i + rotary/2). Tables in
// fp32 leave it unrounded.
void turn(const gemm::StepOps& ops, const float* q, int n, const Step& step, int row, bool neighbours, float* out);

// The same for pairs (2i, 2i + 1) that stay where they are, and for tables in fp32. tables: scratch for 4 * rotary
void turn_in_place(const gemm::StepOps& ops, const float* q, int n, const Step& step, int row, bool neighbours,
                   float* tables, float* out);

}  // namespace ktinject::attention
