// Linear layers with int4 weights on the GPU, and what fp8 ones need.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "bindings/addresses.hpp"
#include "bindings/subjects.hpp"
#include "cuda/fp8_quantise.hpp"
#include "cuda/int4_linear.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

// Tokens, split and outputs of cuda::int4::Blocks.
using Blocks = std::tuple<int, int, int>;

struct Int4Linear {
  cuda::Int4Matrix weight;
  const float* bias;
  int device;
};

// How a product is cut on Hopper.
cuda::int4::Partition partition_of(int n, int k, int tokens, int multiprocessors) {
  if (n < 1 || k < 64 || k % 64 != 0 || tokens < 1 || multiprocessors < 1)
    throw std::invalid_argument("int4_blocks: found " + std::to_string(n) + " outputs, " + std::to_string(k) +
                                " inputs, " + std::to_string(tokens) + " tokens and " +
                                std::to_string(multiprocessors) +
                                " multiprocessors; inputs must be a multiple of 64, and outputs, tokens and "
                                "multiprocessors must be at least 1.");
  return cuda::int4::partition_sm90(n, k, tokens, multiprocessors);
}

}  // namespace

void init_int4_linear(nb::module_& m) {
  nb::class_<Int4Linear>(m, "Int4Linear", "A packed int4 weight on a CUDA device; it owns no memory.")
      .def(
          "__init__",
          [](Int4Linear* self, Address<> words, Address<> scales, Address<const float> bias, int n, int k,
             int group_size, bool has_zeros, bool fp16_scales, bool sm80_only, bool every_lane,
             const std::optional<Blocks>& blocks, int device) {
            const auto [tokens, split, outputs] = blocks.value_or(Blocks{0, 0, 0});
            const cuda::int4::Blocks wanted{tokens, split, outputs};
            if (const char* reason = blocks ? cuda::int4::why_not(wanted, k) : nullptr; reason != nullptr)
              throw std::invalid_argument(std::string("int4_linear: there are no such blocks; ") + reason + ".");
            new (self) Int4Linear{
                {words, scales, n, k, group_size, has_zeros, fp16_scales, sm80_only, every_lane, wanted}, bias, device};
          },
          nb::kw_only(), nb::arg("words"), nb::arg("scales"), nb::arg("bias"), nb::arg("n"), nb::arg("k"),
          nb::arg("group_size"), nb::arg("has_zeros"), nb::arg("fp16_scales"), nb::arg("sm80_only"),
          nb::arg("every_lane"), nb::arg("blocks") = nb::none(), nb::arg("device"),
          "Addresses of words, scales and bias (0: none), laid out as native/cuda/int4_linear.hpp says. Blocks, to "
          "test and measure each kind: tokens, split and outputs of native/cuda/int4_blocks.hpp.")
      .def(
          "scratch",
          [](const Int4Linear& self, int m) {
            const cuda::Int4Scratch scratch = cuda::int4_scratch(self.weight, m, self.device);
            return std::make_tuple(scratch.partials_bytes, scratch.counters);
          },
          nb::arg("m"), "Scratch of a call with m tokens: bytes of partials, number of int32 counters.")
      .def(
          "forward",
          [](const Int4Linear& self, Address<> x, bool fp16, int m, Address<> y, Address<> partials,
             Address<int> counters, Address<> stream) {
            nb::gil_scoped_release release;
            cuda::int4_linear(self.weight, self.bias, x, fp16, m, y, partials, counters, self.device, stream);
          },
          nb::arg("x"), nb::arg("fp16"), nb::arg("m"), nb::arg("y"), nb::arg("partials"), nb::arg("counters"),
          nb::arg("stream"), "y [m, n] = x [m, k] times the weight, plus bias, on a stream.")
      .def(
          "dequantise",
          [](const Int4Linear& self, int first_row, int rows, bool fp16, Address<> out, Address<> stream) {
            nb::gil_scoped_release release;
            cuda::int4_dequantise(self.weight, first_row, rows, fp16, out, self.device, stream);
          },
          nb::arg("first_row"), nb::arg("rows"), nb::arg("fp16"), nb::arg("out"), nb::arg("stream"),
          "out [rows, k] = the rows of the weight from first_row (a multiple of 64), rounded once.");
  m.def(
      "int4_blocks",
      [](int n, int k, int tokens, int multiprocessors) {
        const cuda::int4::Partition p = partition_of(n, k, tokens, multiprocessors);
        return std::make_tuple(p.tokens, p.outputs, p.sharers, p.whole, p.share, p.blocks);
      },
      nb::arg("n"), nb::arg("k"), nb::arg("m"), nb::arg("multiprocessors"),
      "How a product of a weight [n, k] with m tokens is cut on Hopper: tokens and outputs of a block, blocks of a "
      "cluster that share a strip (0: none), whether their sums are whole, stages a block, blocks.");
  m.def(
      "int4_is_measured",
      [](int n, int k, int tokens, int multiprocessors) {
        const cuda::int4::Partition p = partition_of(n, k, tokens, multiprocessors);
        return p.whole || cuda::int4::is_narrow(p);
      },
      nb::arg("n"), nb::arg("k"), nb::arg("m"), nb::arg("multiprocessors"),
      "Whether int4_blocks gives blocks that were measured to be faster than all else.");
  m.def(
      "fp8_quantise",
      [](Address<> x, bool fp16, int rows, int padded, int k, Address<> values, Address<float> scales, int device,
         Address<> stream) {
        nb::gil_scoped_release release;
        cuda::fp8_quantise(x, fp16, rows, padded, k, values, scales, device, stream);
      },
      nb::arg("x"), nb::arg("fp16"), nb::arg("m"), nb::arg("padded"), nb::arg("k"), nb::arg("values"),
      nb::arg("scales"), nb::arg("device"), nb::arg("stream"),
      "values [padded, k] e4m3 and scales [k / 128, padded] fp32 of x [m, k] bf16 or fp16.");
}

}  // namespace ktinject
