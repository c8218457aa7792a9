// Python's (device, handle) as a Stream.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <utility>

#include "cuda/stream.hpp"

namespace nanobind::detail {

template <>
struct type_caster<ktinject::cuda::Stream> {
  using Both = make_caster<std::pair<int, uintptr_t>>;
  NB_TYPE_CASTER(ktinject::cuda::Stream, Both::Name)

  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    Both both;
    if (!both.from_python(source, flags, cleanup)) return false;
    const auto [device, handle] = static_cast<std::pair<int, uintptr_t>>(both);
    value = {device, handle};
    return true;
  }
};

}  // namespace nanobind::detail
