// One dense layer.
#include "gemm/linear.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "bindings/arrays.hpp"
#include "bindings/packed.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"

namespace ktinject {
namespace {

void forward(const gemm::Linear& self, const Input& x, const Output& out) {
  const DType dtype = dtype_of(x.dtype(), "input");
  const auto in = static_cast<size_t>(self.config().in_features), n = static_cast<size_t>(self.config().out_features);
  auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (x.shape(1) != in)
    refuse("input: found " + std::to_string(x.shape(1)) + " features; expected " + std::to_string(in));
  if (out.shape(0) != x.shape(0) || out.shape(1) != n || out.dtype() != x.dtype())
    refuse("output: must be [" + std::to_string(x.shape(0)) + ", " + std::to_string(n) + "] of the input's dtype");
  const int rows = size_of(x.shape(0), "rows");
  self.forward(x.data(), dtype, rows, out.data());
}

nb::list packed(const gemm::Linear& self) {
  const gemm::Matrix& matrix = self.matrix();
  if (self.packed() == nullptr) throw std::invalid_argument("packed: allocate() was not called");
  nb::list tensors;
  const int64_t shape[] = {matrix.panels, static_cast<int64_t>(matrix.panel_bytes())};
  const PackedBytes weight[] = {{0, matrix.bytes(), self.packed()}};
  tensors.append(packed_tensor("weight", false, shape, weight));
  if (self.packed_bias() == nullptr) return tensors;
  const int64_t outputs[] = {static_cast<int64_t>(matrix.panels) * gemm::kPanel};
  const PackedBytes bias[] = {{0, static_cast<size_t>(outputs[0]) * sizeof(float), self.packed_bias()}};
  tensors.append(packed_tensor("bias", true, outputs, bias));
  return tensors;
}

}  // namespace

void init_linear(nb::module_& m) {
  nb::class_<gemm::Linear>(m, "Linear", "One packed dense layer.")
      .def(
          "__init__",
          [](gemm::Linear* self, int out_features, int in_features, const std::string& weights, int group_size,
             bool symmetric, bool has_bias, const std::string& kernel) {
            new (self)
                gemm::Linear({out_features, in_features, format_of(weights), group_size, symmetric, has_bias, kernel});
          },
          nb::kw_only(), nb::arg("out_features"), nb::arg("in_features"), nb::arg("weights"), nb::arg("group_size"),
          nb::arg("symmetric") = true, nb::arg("has_bias"), nb::arg("kernel"),
          "Nothing is allocated before allocate().")
      .def_prop_ro("bytes", &gemm::Linear::bytes, "Bytes of packed weight and bias, known before allocation.")
      .def_prop_ro(
          "kernels",
          [](const gemm::Linear& self) {
            return std::make_tuple(std::string(self.kernels().many->name), std::string(self.kernels().few->name));
          },
          "(kernel for many rows, kernel for few).")
      .def_prop_ro("has_weight", &gemm::Linear::has_weight, nb::call_guard<WithoutGil>(), "Whether load() was called.")
      .def_prop_ro("has_bias", &gemm::Linear::has_bias, nb::call_guard<WithoutGil>(), "Whether load_bias() was called.")
      .def("allocate", &gemm::Linear::allocate, nb::call_guard<WithoutGil>(),
           "Reserve the packed weight, zeroed; once. Raises MemoryError.")
      .def("packed", &packed, "As Experts.packed().")
      .def("mark_loaded", &gemm::Linear::mark_loaded, nb::call_guard<WithoutGil>(),
           "What was written to packed() is the weight and the bias.")
      .def(
          "load", [](gemm::Linear& self, const Weight& weight) { self.load(source_of(weight)); }, nb::arg("weight"),
          nb::call_guard<WithoutGil>(), "Pack weight [out, in], any strides.")
      .def(
          "load_fp8",
          [](gemm::Linear& self, const Codes& codes, const Scales& scales) { self.load_fp8(source_of(codes, scales)); },
          nb::arg("codes"), nb::arg("scales"), nb::call_guard<WithoutGil>(), "As Experts.load_fp8, codes [out, in].")
      .def(
          "load_nvfp4",
          [](gemm::Linear& self, const Codes& codes, const Codes& scales, float factor) {
            self.load_nvfp4(source_of(codes, scales, factor));
          },
          nb::arg("codes"), nb::arg("scales"), nb::arg("factor"), nb::call_guard<WithoutGil>(),
          "As Experts.load_nvfp4, codes [out, in / 2].")
      .def(
          "load_integers",
          [](gemm::Linear& self, const Codes& codes, const Rows<float>& scales,
             const std::optional<Rows<uint8_t>>& zeros) { self.load_integers(source_of(codes, scales, zeros)); },
          nb::arg("codes"), nb::arg("scales"), nb::arg("zeros").none() = nb::none(), nb::call_guard<WithoutGil>(),
          "As Experts.load_integers, codes [out, in].")
      .def(
          "load_blocks", [](gemm::Linear& self, const Blocks& rows) { self.load_blocks(source_of(rows)); },
          nb::arg("rows"), nb::call_guard<WithoutGil>(),
          "Keep rows of a GGUF file's blocks, uint8 [out, bytes], bytes of a row contiguous; for K-quants.")
      .def(
          "load_bias", [](gemm::Linear& self, const Bias& bias) { self.load_bias(source_of(bias)); }, nb::arg("bias"),
          nb::call_guard<WithoutGil>(), "Take bias [out].")
      .def(
          "unpack",
          [](const gemm::Linear& self, const Float2d& out) {
            if (out.shape(0) != static_cast<size_t>(self.config().out_features) ||
                out.shape(1) != static_cast<size_t>(self.config().in_features))
              throw std::invalid_argument("unpack: the output has the wrong shape");
            self.unpack(out.data());
          },
          nb::arg("out"), nb::call_guard<WithoutGil>(), "Write the dequantised weight to out [out, in] fp32.")
      .def(
          "unpack_bias",
          [](const gemm::Linear& self, const Float1d& out) {
            if (out.shape(0) != static_cast<size_t>(self.config().out_features))
              throw std::invalid_argument("unpack_bias: the output has the wrong shape");
            self.unpack_bias(out.data());
          },
          nb::arg("out"), nb::call_guard<WithoutGil>(), "Write the bias to out [out] fp32.")
      .def("forward", &forward, nb::arg("x"), nb::arg("out"), nb::call_guard<WithoutGil>(),
           "out [m, out] = x [m, in] Wᵀ + bias, of x's dtype.");
}

}  // namespace ktinject
