// The CUDA devices, what launches depend on of them, and how kernels are launched where they have such limits.
#include "cuda/devices.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/subjects.hpp"
#include "cuda/int4_blocks.hpp"
#include "cuda/launch_shapes.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

// Calls visit(name, member) for each of the limits, so that there is one list of them.
template <class L, class Visit>
void each_limit(L& limits, Visit&& visit) {
  visit("multiprocessors", limits.multiprocessors);
  visit("block_shared_bytes", limits.block_shared_bytes);
  visit("multiprocessor_shared_bytes", limits.multiprocessor_shared_bytes);
  visit("reserved_shared_bytes", limits.reserved_shared_bytes);
  visit("multiprocessor_threads", limits.multiprocessor_threads);
  visit("l2_bytes", limits.l2_bytes);
  visit("has_dependent_launch", limits.has_dependent_launch);
  visit("ends_long_kernels", limits.ends_long_kernels);
}

nb::dict dict_of(const cuda::Limits& limits) {
  nb::dict found;
  each_limit(limits, [&](const char* name, const auto& value) { found[name] = value; });
  return found;
}

cuda::Limits limits_of(const nb::dict& given) {
  cuda::Limits limits;
  size_t names = 0;
  each_limit(limits, [&](const char* name, auto& value) {
    if (!given.contains(name)) throw std::invalid_argument(std::string("limits of a device: no ") + name);
    value = nb::cast<std::decay_t<decltype(value)>>(given[name]);
    ++names;
  });
  if (given.size() != names) throw std::invalid_argument("limits of a device: there are other names among them");
  if (limits.multiprocessors < 1 || limits.multiprocessor_threads < 1 || limits.reserved_shared_bytes < 0 ||
      limits.block_shared_bytes < 1 || limits.multiprocessor_shared_bytes < 1 || limits.l2_bytes < 0)
    throw std::invalid_argument("limits of a device: numbers must be at least 1, and bytes of L2 at least 0");
  return limits;
}

int at_least_one(const char* name, int value) {
  if (value < 1)
    throw std::invalid_argument(std::string(name) + ": found " + std::to_string(value) + "; 1 is the least");
  return value;
}

void def_devices(nb::module_& m) {
  m.def("cuda_built", &cuda::is_built, "Whether the CUDA parts were compiled in.");
  m.def(
      "cuda_devices",
      [] {
        nb::list devices;
        for (const cuda::Device& device : cuda::devices()) {
          nb::dict row;
          row["name"] = device.name;
          row["capability"] = nb::make_tuple(device.major, device.minor);
          row["memory_bytes"] = device.memory_bytes;
          row["limits"] = dict_of(device.limits);
          devices.append(row);
        }
        return devices;
      },
      "CUDA devices as the native core sees them, with the limits that launches depend on. Raises RuntimeError in a "
      "build without CUDA, or without a driver.");
  m.def(
      "device_limits", [](int device) { return dict_of(cuda::device_at(device).limits); }, nb::arg("device"),
      "The limits of one of them; the driver is asked once a process. Raises RuntimeError.");
  m.def(
      "pretend_device",
      [](int device, const std::optional<std::pair<int, int>>& capability, const std::optional<nb::dict>& limits) {
        if (!capability || !limits) return cuda::pretend(device, nullptr);
        const cuda::Device other{"pretended", capability->first, capability->second, 0, limits_of(*limits)};
        cuda::pretend(device, &other);
      },
      nb::arg("device"), nb::arg("capability") = nb::none(), nb::arg("limits") = nb::none(),
      "For tests: from now on launches on this device are those for another one, with smaller limits; None: its own "
      "again. Raises RuntimeError or ValueError.");
}

void def_shapes(nb::module_& m) {
  using cuda::LinearShape;
  using cuda::int4::ShapeSm80;
  m.def(
      "linear_shape",
      [](int outputs, const nb::dict& limits) {
        const LinearShape shape = cuda::linear_shape(at_least_one("outputs", outputs), limits_of(limits));
        nb::dict found;
        found["tiles"] = shape.tiles;
        found["held"] = shape.held;
        found["blocks"] = shape.blocks;
        found["l2_bytes"] = shape.l2_bytes;
        found["shared_bytes"] = LinearShape::shared_bytes(shape.tiles, shape.held);
        return found;
      },
      nb::arg("outputs"), nb::arg("limits"),
      "How decode_linear is launched on a device with such limits; see native/cuda/launch_shapes.hpp. Raises "
      "ValueError.");
  m.def(
      "int4_shape",
      [](int n, int k, int tokens, bool half_groups, const nb::dict& limits) {
        if (k < 64 || k % 64 != 0) throw std::invalid_argument("int4_shape: inputs must be a multiple of 64");
        const ShapeSm80 shape =
            cuda::int4::shape_sm80(at_least_one("n", n), k, at_least_one("m", tokens), half_groups, limits_of(limits));
        nb::dict found;
        found["tokens"] = shape.partition.tokens;
        found["blocks"] = shape.partition.blocks;
        found["share"] = shape.partition.share;
        found["stages"] = shape.stages;
        found["room"] = shape.room;
        found["threads"] = ShapeSm80::kThreads;
        found["shared_bytes"] = ShapeSm80::shared_bytes(shape.partition.tokens, half_groups, shape.stages);
        return found;
      },
      nb::arg("n"), nb::arg("k"), nb::arg("m"), nb::arg("half_groups"), nb::arg("limits"),
      "How int4_linear is launched on a device with such limits that is not Hopper; see native/cuda/int4_blocks.hpp. "
      "Raises ValueError.");
  m.def("attention_shared_bytes", &cuda::attention_shared_bytes, nb::arg("size"),
        "The most shared memory that a block of attention has, for heads of `size` values.");
  m.def(
      "blocks_at_once",
      [](int shared_bytes, int threads, const nb::dict& limits) {
        return cuda::blocks_at_once(limits_of(limits), shared_bytes, at_least_one("threads", threads));
      },
      nb::arg("shared_bytes"), nb::arg("threads"), nb::arg("limits"),
      "Blocks of so much shared memory and so many threads that a multiprocessor runs at a time. Raises ValueError.");
}

}  // namespace

void init_devices(nb::module_& m) {
  def_devices(m);
  def_shapes(m);
}

}  // namespace ktinject
