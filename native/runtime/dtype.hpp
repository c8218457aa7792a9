// The element types of tensors. All rooms use them, so they are in none of the rooms' namespaces.
#pragma once

#include <cstddef>

namespace ktinject {

enum class DType { f32, bf16, f16 };
inline size_t dtype_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace ktinject
