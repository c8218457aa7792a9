// Tensors on a GPU come from Python as numbers, since DLPack would make CUDA streams wait for each other. Nothing can
// be checked behind a number, so ktinject/addresses.py checks device, dtype, shape and layout before it hands one out,
// and no other file hands out any.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "bindings/stream.hpp"
#include "runtime/dtype.hpp"

namespace ktinject {

// 0 in Python: null.
template <class T = void>
struct Address {
  T* pointer = nullptr;
  operator T*() const { return pointer; }
};

}  // namespace ktinject

namespace nanobind::detail {

template <class T>
struct type_caster<ktinject::Address<T>> {
  using Number = make_caster<uintptr_t>;
  NB_TYPE_CASTER(ktinject::Address<T>, Number::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    Number number;
    if (!number.from_python(source, flags, cleanup)) return false;
    value = {reinterpret_cast<T*>(number.value)};
    return true;
  }
};

// As operators/offload/handoff.py numbers them.
template <>
struct type_caster<ktinject::DType> {
  using Code = make_caster<int>;
  NB_TYPE_CASTER(ktinject::DType, Code::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    Code code;
    if (!code.from_python(source, flags, cleanup)) return false;
    value = static_cast<ktinject::DType>(code.value);
    return value == ktinject::DType::f32 || value == ktinject::DType::bf16 || value == ktinject::DType::f16;
  }
};

}  // namespace nanobind::detail
