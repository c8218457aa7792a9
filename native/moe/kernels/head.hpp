// Reading a packed panel's head; see moe/layout.hpp.
#pragma once

#include "moe/kernels/table.hpp"

namespace ktinject {

struct Int8Head {
  float scale[kPanel];
  int32_t offset[kPanel];
};

inline const Int8Head& int8_head(const std::byte* panel) { return *reinterpret_cast<const Int8Head*>(panel); }
inline const float* int4_levels(const std::byte* panel) { return reinterpret_cast<const float*>(panel); }
inline const uint16_t* int4_scales(const std::byte* panel) {
  return reinterpret_cast<const uint16_t*>(panel + kPanel * sizeof(float));
}

}  // namespace ktinject
