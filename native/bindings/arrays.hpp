// Tensors and words as they come from Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "gemm/k_quants.hpp"
#include "gemm/layout.hpp"
#include "gemm/pack.hpp"
#include "gemm/vector_ops.hpp"

namespace ktinject {

namespace nb = nanobind;

// A tensor in host memory as it is. One of another dtype, rank or order, on another device, or read-only where it is
// written to, is a TypeError. nanobind would hand over a converted copy: what is written there is lost, and what points
// there outlives it. Bindings without the GIL take it by reference: a value would end before they have the GIL again,
// and each one asks for it.
template <class... Args>
struct Array : nb::ndarray<nb::pytorch, Args..., nb::device::cpu> {
  using Base = nb::ndarray<nb::pytorch, Args..., nb::device::cpu>;
  using Base::Base;
  explicit Array(Base base) : Base(std::move(base)) {}
};

// What nanobind is to look at: of a tensor the capsule that torch makes of it, nothing where torch refuses, and any
// other object itself. All in C: Tensor.__dlpack__ is Python, where a Ctrl-C may be raised, and nanobind drops what is
// raised there.
nb::object exported(nb::handle source) noexcept;

using Weight = Array<nb::ro, nb::ndim<2>>;
using Bias = Array<nb::ro, nb::ndim<1>>;
using Blocks = Array<const uint8_t, nb::ndim<2>>;
using Codes = Array<const uint8_t, nb::ndim<2>>;
using Scales = Array<const float, nb::ndim<2>, nb::c_contig>;
template <class T>
using Rows = Array<const T, nb::ndim<2>>;
using Input = Array<nb::ro, nb::ndim<2>, nb::c_contig>;
using Output = Array<nb::ndim<2>, nb::c_contig>;
using Float2d = Array<float, nb::ndim<2>, nb::c_contig>;
using Float1d = Array<float, nb::ndim<1>, nb::c_contig>;

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

inline gemm::Format format_of(const std::string& weights) {
  std::string allowed;
  for (const gemm::FormatName& format : gemm::kFormatNames) {
    if (weights == format.name) return format.format;
    allowed += (allowed.empty() ? "" : ", ") + std::string(format.name);
  }
  throw std::invalid_argument("weights: found '" + weights + "'; allowed: " + allowed);
}

// The native core counts rows, positions and features in int.
inline int size_of(size_t size, const char* what) {
  constexpr size_t kMost = std::numeric_limits<int>::max();
  if (size > kMost)
    throw std::invalid_argument(std::string(what) + ": found " + std::to_string(size) + "; allowed: up to " +
                                std::to_string(kMost) + "; split the tensor");
  return static_cast<int>(size);
}

inline gemm::Source source_of(const Weight& weight) {
  return {weight.data(),
          dtype_of(weight.dtype(), "weight"),
          size_of(weight.shape(0), "weight"),
          size_of(weight.shape(1), "weight"),
          weight.stride(0),
          weight.stride(1)};
}

inline gemm::KSource source_of(const Blocks& rows) {
  if (rows.shape(1) > 1 && rows.stride(1) != 1)
    throw std::invalid_argument("rows: the bytes of a row must be contiguous");
  return {rows.data(), size_of(rows.shape(0), "rows"), rows.shape(1), rows.stride(0)};
}

// Codes of a checkpoint with what belongs to them: of fp8, of NVFP4, and of integers.
inline gemm::Fp8Source source_of(const Codes& codes, const Scales& scales) {
  return {codes.data(),
          size_of(codes.shape(0), "codes"),
          size_of(codes.shape(1), "codes"),
          codes.stride(0),
          codes.stride(1),
          scales.data(),
          size_of(scales.shape(0), "scales"),
          size_of(scales.shape(1), "scales")};
}

inline gemm::Nvfp4Source source_of(const Codes& codes, const Codes& scales, float factor) {
  if (codes.shape(0) != scales.shape(0)) throw std::invalid_argument("scales: found another number of rows than codes");
  return {codes.data(),
          size_of(codes.shape(0), "codes"),
          size_of(codes.shape(1) * 2, "codes"),
          codes.stride(0),
          codes.stride(1),
          scales.data(),
          size_of(scales.shape(1), "scales"),
          scales.stride(0),
          scales.stride(1),
          factor};
}

inline gemm::IntegerSource source_of(const Codes& codes, const Rows<float>& scales,
                                     const std::optional<Rows<uint8_t>>& zeros) {
  if (scales.shape(0) != codes.shape(0)) throw std::invalid_argument("scales: found another number of rows than codes");
  if (scales.stride(1) != 1 && scales.shape(1) > 1) throw std::invalid_argument("scales: rows must be contiguous");
  if (zeros && (zeros->shape(0) != scales.shape(0) || zeros->shape(1) != scales.shape(1) ||
                zeros->stride(0) != scales.stride(0) || (zeros->stride(1) != 1 && zeros->shape(1) > 1)))
    throw std::invalid_argument("zeros: found another layout than that of scales");
  return {codes.data(),
          size_of(codes.shape(0), "codes"),
          size_of(codes.shape(1), "codes"),
          codes.stride(0),
          codes.stride(1),
          scales.data(),
          zeros ? zeros->data() : nullptr,
          size_of(scales.shape(1), "scales"),
          scales.stride(0)};
}

inline gemm::Source source_of(const Bias& bias) {
  return {bias.data(), dtype_of(bias.dtype(), "bias"), size_of(bias.shape(0), "bias"), 1, bias.stride(0), 1};
}

}  // namespace ktinject

namespace nanobind::detail {

template <class... Args>
struct type_caster<ktinject::Array<Args...>> {
  using Given = make_caster<typename ktinject::Array<Args...>::Base>;
  NB_TYPE_CASTER(ktinject::Array<Args...>, Given::Name)

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    const object array = ktinject::exported(source);
    Given given;
    if (!array.is_valid() || !given.from_python(array, flags & ~uint32_t{cast_flags::convert}, cleanup)) return false;
    value = ktinject::Array<Args...>(std::move(given.value));
    return true;
  }
};

}  // namespace nanobind::detail
