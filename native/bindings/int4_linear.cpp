// Linear layers with int4 weights on the GPU, and what fp8 ones need.
//
// Pointers come as integers: taking a CUDA tensor through DLPack would make streams wait for each other.
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "bindings/subjects.hpp"
#include "cuda/fp8_quantise.hpp"
#include "cuda/int4_linear.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

struct Int4Linear {
  cuda::Int4Matrix weight;
  const float* bias;
  int device;
};

}  // namespace

void init_int4_linear(nb::module_& m) {
  nb::class_<Int4Linear>(m, "Int4Linear", "A packed int4 weight on a CUDA device; it owns no memory.")
      .def(
          "__init__",
          [](Int4Linear* self, uintptr_t words, uintptr_t scales, uintptr_t bias, int n, int k, int group_size,
             bool has_zeros, bool fp16_scales, bool sm80_only, bool every_lane, int device) {
            new (self) Int4Linear{
                {pointer<>(words), pointer<>(scales), n, k, group_size, has_zeros, fp16_scales, sm80_only, every_lane},
                pointer<const float>(bias),
                device};
          },
          nb::kw_only(), nb::arg("words"), nb::arg("scales"), nb::arg("bias"), nb::arg("n"), nb::arg("k"),
          nb::arg("group_size"), nb::arg("has_zeros"), nb::arg("fp16_scales"), nb::arg("sm80_only"),
          nb::arg("every_lane"), nb::arg("device"),
          "Addresses of words, scales and bias (0: none), laid out as native/cuda/int4_linear.hpp says.")
      .def(
          "scratch",
          [](const Int4Linear& self, int m) {
            const cuda::Int4Scratch scratch = cuda::int4_scratch(self.weight, m, self.device);
            return std::make_tuple(scratch.partials_bytes, scratch.counters);
          },
          nb::arg("m"), "Scratch of a call with m tokens: bytes of partials, number of int32 counters.")
      .def(
          "forward",
          [](const Int4Linear& self, uintptr_t x, bool fp16, int m, uintptr_t y, uintptr_t partials, uintptr_t counters,
             uintptr_t stream) {
            nb::gil_scoped_release release;
            cuda::int4_linear(self.weight, self.bias, pointer<>(x), fp16, m, pointer<>(y), pointer<>(partials),
                              pointer<int>(counters), self.device, pointer<>(stream));
          },
          nb::arg("x"), nb::arg("fp16"), nb::arg("m"), nb::arg("y"), nb::arg("partials"), nb::arg("counters"),
          nb::arg("stream"), "y [m, n] = x [m, k] times the weight, plus bias, on a stream.")
      .def(
          "dequantise",
          [](const Int4Linear& self, int first_row, int rows, bool fp16, uintptr_t out, uintptr_t stream) {
            nb::gil_scoped_release release;
            cuda::int4_dequantise(self.weight, first_row, rows, fp16, pointer<>(out), self.device, pointer<>(stream));
          },
          nb::arg("first_row"), nb::arg("rows"), nb::arg("fp16"), nb::arg("out"), nb::arg("stream"),
          "out [rows, k] = the rows of the weight from first_row (a multiple of 64), rounded once.");
  m.def(
      "fp8_quantise",
      [](uintptr_t x, bool fp16, int rows, int padded, int k, uintptr_t values, uintptr_t scales, int device,
         uintptr_t stream) {
        nb::gil_scoped_release release;
        cuda::fp8_quantise(pointer<>(x), fp16, rows, padded, k, pointer<>(values), pointer<float>(scales), device,
                           pointer<>(stream));
      },
      nb::arg("x"), nb::arg("fp16"), nb::arg("m"), nb::arg("padded"), nb::arg("k"), nb::arg("values"),
      nb::arg("scales"), nb::arg("device"), nb::arg("stream"),
      "values [padded, k] e4m3 and scales [k / 128, padded] fp32 of x [m, k] bf16 or fp16.");
}

}  // namespace ktinject
