// The stages of moe/stages.inl for the avx512 level.
#include "moe/stages.hpp"

#include "moe/layout.hpp"
#include "runtime/cpu_features.hpp"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
namespace ktinject {
namespace avx512 {
#include "moe/stages.inl"
}  // namespace avx512

const Stages kAvx512Stages = {"avx512",
                              kAvx512f | kAvx512bw | kAvx512vl | kAvx512dq | kAvx2 | kFma,
                              avx512::round_row,
                              avx512::quantise_row,
                              avx512::activate,
                              avx512::combine,
                              avx512::widen,
                              avx512::max_abs,
                              avx512::quantise_int8,
                              avx512::quantise_int4,
                              avx512::quantise_int4_zero,
                              avx512::quantise_fp8,
                              avx512::quantise_mxfp4};

}  // namespace ktinject
#pragma GCC pop_options
