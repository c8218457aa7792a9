// Tensors and words as they come from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "moe/layout.hpp"
#include "moe/pack.hpp"
#include "moe/stages.hpp"

namespace ktinject {

namespace nb = nanobind;

using Weight = nb::ndarray<nb::pytorch, nb::ro, nb::ndim<2>, nb::device::cpu>;
using Bias = nb::ndarray<nb::pytorch, nb::ro, nb::ndim<1>, nb::device::cpu>;
using Input = nb::ndarray<nb::pytorch, nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::pytorch, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Float2d = nb::ndarray<nb::pytorch, float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Float1d = nb::ndarray<nb::pytorch, float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline DType dtype_of(nb::dlpack::dtype dtype, const char* what) {
  if (dtype.lanes == 1) {
    if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) {
      if (dtype.bits == 32) return DType::f32;
      if (dtype.bits == 16) return DType::f16;
    }
    if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16) return DType::bf16;
  }
  throw std::invalid_argument(std::string(what) + ": dtype not served; allowed: float32, bfloat16, float16");
}

template <class T>
T one_of(const std::string& value, const char* what, std::initializer_list<std::pair<const char*, T>> choices) {
  std::string allowed;
  for (const auto& [name, choice] : choices) {
    if (value == name) return choice;
    allowed += (allowed.empty() ? "" : ", ") + std::string(name);
  }
  throw std::invalid_argument(std::string(what) + ": found '" + value + "'; allowed: " + allowed);
}

inline Format format_of(const std::string& weights) {
  std::string allowed;
  for (const FormatName& format : kFormatNames) {
    if (weights == format.name) return format.format;
    allowed += (allowed.empty() ? "" : ", ") + std::string(format.name);
  }
  throw std::invalid_argument("weights: found '" + weights + "'; allowed: " + allowed);
}

inline Source source_of(const Weight& weight) {
  return {weight.data(),
          dtype_of(weight.dtype(), "weight"),
          static_cast<int>(weight.shape(0)),
          static_cast<int>(weight.shape(1)),
          weight.stride(0),
          weight.stride(1)};
}

inline Source source_of(const Bias& bias) {
  return {bias.data(), dtype_of(bias.dtype(), "bias"), static_cast<int>(bias.shape(0)), 1, bias.stride(0), 1};
}

}  // namespace ktinject
