// Where packed weights lie, for what reads and writes them as files.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ktinject {

// Bytes of a tensor in a file that lie together in memory.
struct PackedBytes {
  size_t start = 0;
  size_t bytes = 0;
  const std::byte* data = nullptr;
};

// (name, whether it is fp32, shape, [(start, bytes, address)]); bytes are uint8.
inline nanobind::tuple packed_tensor(const char* name, bool is_float, std::span<const int64_t> shape,
                                     std::span<const PackedBytes> runs) {
  nanobind::list sizes, parts;
  for (const int64_t size : shape) sizes.append(size);
  for (const PackedBytes& run : runs)
    parts.append(nanobind::make_tuple(run.start, run.bytes, reinterpret_cast<uintptr_t>(run.data)));
  return nanobind::make_tuple(name, is_float, sizes, parts);
}

}  // namespace ktinject
