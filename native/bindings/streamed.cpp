// Packed experts on their way to a GPU.
#include "cuda/streamed.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings/addresses.hpp"
#include "bindings/stream.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"

namespace nb = nanobind;

namespace ktinject {

void init_streamed(nb::module_& m) {
  using HeldStreamed = EndsWithoutGil<cuda::Streamed>;
  nb::class_<HeldStreamed>(m, "Streamed", "A layer's packed experts, page-locked, to be copied to GPUs.")
      .def(nb::init<const moe::Experts&, int>(), nb::arg("experts"), nb::arg("first") = 0, nb::keep_alive<1, 2>(),
           nb::call_guard<nb::gil_scoped_release>(),
           "Of the experts from `first` on. Raises RuntimeError where memory cannot be page-locked.")
      .def("packed_bytes", &cuda::Streamed::packed_bytes, nb::arg("count"), "What copy() moves for `count` experts.")
      .def(
          "copy",
          [](const HeldStreamed& self, const std::vector<int>& experts, Address<> slot, cuda::Stream stream) {
            self.copy(experts, slot, stream);
          },
          nb::arg("experts"), nb::arg("slot"), nb::arg("stream"),
          "Put a copy of these experts to device memory into the stream.")
      .def(
          "unpack",
          [](const HeldStreamed& self, Address<> slot, int count, Address<> gate_up, Address<> down,
             cuda::Stream stream) { self.unpack(slot, count, gate_up, down, stream); },
          nb::arg("slot"), nb::arg("count"), nb::arg("gate_up"), nb::arg("down"), nb::arg("stream"),
          "Put the unpacking of what copy() moved into the stream: gate_up [count, n, hidden] with the gate above up, "
          "down [count, hidden, intermediate], bf16.")
      .def(
          "unpack_resident",
          [](const HeldStreamed& self, const cuda::Resident& shapes, Address<> memory, const std::vector<int>& places,
             Address<> gate_up, Address<> down,
             cuda::Stream stream) { self.unpack_resident(shapes, memory.pointer, places, gate_up, down, stream); },
          nb::arg("shapes"), nb::arg("memory"), nb::arg("places"), nb::arg("gate_up"), nb::arg("down"),
          nb::arg("stream"), "The same of experts that lie at these places of `memory` on the device.")
      .def(
          "activate",
          [](const HeldStreamed& self, Address<> gate_up, DType dtype, size_t rows, Address<> out,
             cuda::Stream stream) { self.activate(gate_up, dtype, rows, out, stream); },
          nb::arg("gate_up"), nb::arg("dtype"), nb::arg("rows"), nb::arg("out"), nb::arg("stream"),
          "Put the activation into the stream: gate_up [rows, n] float32 or bfloat16 → out [rows, intermediate] bf16.")
      .def(
          "sum",
          [](const HeldStreamed& self, Address<> values, int64_t known, Address<const int64_t> rows, Address<> weights,
             DType weights_dtype, int tokens, int slots, Address<> out, DType dtype, cuda::Stream stream) {
            self.sum({values, known, rows, weights, weights_dtype, tokens, slots}, out, dtype, stream);
          },
          nb::arg("values"), nb::arg("known"), nb::arg("rows"), nb::arg("weights"), nb::arg("weights_dtype"),
          nb::arg("tokens"), nb::arg("slots"), nb::arg("out"), nb::arg("dtype"), nb::arg("stream"),
          "Put out [tokens, hidden] = the sum of values [known, hidden] bf16, of the rows [tokens, slots] below known, "
          "times weights [tokens, slots], into the stream.");
  m.def(
      "add_from_host",
      [](Address<> host, Address<const float> addend, Address<> out, size_t count, DType dtype, cuda::Stream stream) {
        cuda::add_from_host(host, addend, out, count, dtype, stream);
      },
      nb::arg("host"), nb::arg("addend"), nb::arg("out"), nb::arg("count"), nb::arg("dtype"), nb::arg("stream"),
      "Put out = host + addend into the stream: host page-locked, addend fp32, host and out of `dtype`.");
}

}  // namespace ktinject
