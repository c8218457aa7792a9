// The routed experts of one layer.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "bindings/arrays.hpp"
#include "bindings/packed.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"
#include "moe/experts.hpp"

namespace ktinject {
namespace {

using RoutingWeights = Array<const float, nb::ndim<2>, nb::c_contig>;

moe::Projection projection_of(const std::string& name) {
  return one_of<moe::Projection>(
      name, "projection",
      {{"gate", moe::Projection::gate}, {"up", moe::Projection::up}, {"down", moe::Projection::down}});
}

moe::ExpertsConfig make_config(int experts, int hidden_size, int intermediate_size, const std::string& weights,
                               const std::string& down_weights, int group_size, bool symmetric, bool has_gate,
                               bool has_bias, const std::string& activation, float alpha, float gate_max,
                               float up_limit, float up_offset, const std::string& kernel, int nodes) {
  moe::ExpertsConfig config;
  config.experts = experts;
  config.hidden_size = hidden_size;
  config.intermediate_size = intermediate_size;
  config.format = format_of(weights);
  config.down_format = down_weights.empty() ? config.format : format_of(down_weights);
  config.group_size = group_size;
  config.symmetric = symmetric;
  config.has_bias = has_bias;
  config.activation.kind = one_of<gemm::ActivationKind>(activation, "activation",
                                                        {{"silu", gemm::ActivationKind::silu},
                                                         {"gelu", gemm::ActivationKind::gelu},
                                                         {"gelu_tanh", gemm::ActivationKind::gelu_tanh},
                                                         {"relu", gemm::ActivationKind::relu},
                                                         {"relu2", gemm::ActivationKind::relu2},
                                                         {"identity", gemm::ActivationKind::identity}});
  config.activation.has_gate = has_gate;
  config.activation.alpha = alpha;
  config.activation.gate_max = gate_max;
  config.activation.up_limit = up_limit;
  config.activation.up_offset = up_offset;
  config.kernel = kernel;
  config.nodes = nodes;
  return config;
}

void load(moe::Experts& self, const std::string& projection, int expert, const Weight& weight) {
  self.load(projection_of(projection), expert, source_of(weight));
}

void load_integers(moe::Experts& self, const std::string& projection, int expert, const Codes& codes,
                   const Rows<float>& scales, const std::optional<Rows<uint8_t>>& zeros) {
  self.load_integers(projection_of(projection), expert, source_of(codes, scales, zeros));
}

void load_fp8(moe::Experts& self, const std::string& projection, int expert, const Codes& codes, const Scales& scales) {
  self.load_fp8(projection_of(projection), expert, source_of(codes, scales));
}

void load_nvfp4(moe::Experts& self, const std::string& projection, int expert, const Codes& codes, const Codes& scales,
                float factor) {
  self.load_nvfp4(projection_of(projection), expert, source_of(codes, scales, factor));
}

void load_blocks(moe::Experts& self, const std::string& projection, int expert, const Blocks& rows) {
  self.load_blocks(projection_of(projection), expert, source_of(rows));
}

void load_bias(moe::Experts& self, const std::string& projection, int expert, const Bias& bias) {
  self.load_bias(projection_of(projection), expert, source_of(bias));
}

void forward(const moe::Experts& self, const Input& x, const Input& ids, const RoutingWeights& weights,
             const Output& out) {
  const DType dtype = dtype_of(x.dtype(), "hidden states");
  const auto hidden = static_cast<size_t>(self.config().hidden_size);
  auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (x.shape(1) != hidden)
    refuse("hidden states: found " + std::to_string(x.shape(1)) + " features; expected " + std::to_string(hidden));
  if (ids.shape(0) != x.shape(0) || weights.shape(0) != x.shape(0) || weights.shape(1) != ids.shape(1))
    refuse("top_k_index [" + std::to_string(ids.shape(0)) + ", " + std::to_string(ids.shape(1)) +
           "] and top_k_weights [" + std::to_string(weights.shape(0)) + ", " + std::to_string(weights.shape(1)) +
           "] must both be [" + std::to_string(x.shape(0)) + ", top_k]");
  if (out.shape(0) != x.shape(0) || out.shape(1) != hidden || out.dtype() != x.dtype())
    refuse("output: shape and dtype must be those of the hidden states");
  const bool is_int = ids.dtype().code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int) && ids.dtype().lanes == 1;
  if (!is_int || (ids.dtype().bits != 64 && ids.dtype().bits != 32))
    refuse("top_k_index: dtype must be int64 or int32");
  const int tokens = size_of(x.shape(0), "tokens"), top_k = size_of(ids.shape(1), "top_k_index");
  if (ids.dtype().bits == 64)
    self.forward(x.data(), dtype, static_cast<const int64_t*>(ids.data()), weights.data(), tokens, top_k, out.data());
  else
    self.forward(x.data(), dtype, static_cast<const int32_t*>(ids.data()), weights.data(), tokens, top_k, out.data());
}

void unpack(const moe::Experts& self, const std::string& projection, int expert, const Float2d& out) {
  const bool down = projection_of(projection) == moe::Projection::down;
  const auto n = static_cast<size_t>(down ? self.config().hidden_size : self.config().intermediate_size);
  const auto k = static_cast<size_t>(down ? self.config().intermediate_size : self.config().hidden_size);
  if (out.shape(0) != n || out.shape(1) != k) throw std::invalid_argument("unpack: the output has the wrong shape");
  self.unpack(projection_of(projection), expert, out.data());
}

void unpack_bias(const moe::Experts& self, const std::string& projection, int expert, const Float1d& out) {
  const bool down = projection_of(projection) == moe::Projection::down;
  if (out.shape(0) != static_cast<size_t>(down ? self.config().hidden_size : self.config().intermediate_size))
    throw std::invalid_argument("unpack_bias: the output has the wrong shape");
  self.unpack_bias(projection_of(projection), expert, out.data());
}

// In the file all panels of an expert follow each other; in memory, those of a shard.
nb::list packed(const moe::Experts& self) {
  const auto experts = static_cast<size_t>(self.config().experts);
  const std::vector<moe::PackedRun> runs = self.packed();
  nb::list tensors;
  for (const bool down : {false, true}) {
    std::vector<PackedBytes> parts;
    int64_t shape[] = {static_cast<int64_t>(experts), 0, 0};
    for (const moe::PackedRun& run : runs) {
      if (run.is_down != down) continue;
      if (run.data == nullptr) throw std::invalid_argument("packed: allocate() was not called");
      const size_t panel = run.matrix.panel_bytes(), own = static_cast<size_t>(run.panels) * panel;
      shape[1] = run.matrix.panels;
      shape[2] = static_cast<int64_t>(panel);
      if (run.panels == run.matrix.panels) {
        parts.push_back({0, experts * own, run.data});
        continue;
      }
      for (size_t e = 0; e < experts && own > 0; ++e)
        parts.push_back(
            {e * run.matrix.bytes() + static_cast<size_t>(run.first_panel) * panel, own, run.data + e * own});
    }
    tensors.append(packed_tensor(down ? "down" : "gate_up", false, shape, parts));
    if (!self.config().has_bias) continue;
    const int64_t biases[] = {shape[0], shape[1] * gemm::kPanel};
    const PackedBytes whole[] = {{0, static_cast<size_t>(biases[0] * biases[1]) * sizeof(float),
                                  reinterpret_cast<const std::byte*>(self.packed_bias(down))}};
    tensors.append(packed_tensor(down ? "down_bias" : "gate_up_bias", true, biases, whole));
  }
  return tensors;
}

}  // namespace

void init_experts(nb::module_& m) {
  m.def(
      "packed_version", [] { return gemm::kPackedVersion; },
      "Of packed bytes: another number where the same weights are packed to other bytes.");
  m.def("allow_workspace", &moe::allow_workspace, nb::arg("bytes"),
        "Long prompts may take so much working memory, if that is more than before; 512 MiB at first.");
  nb::class_<moe::Experts>(m, "Experts", "Packed routed experts of one layer.")
      .def(
          "__init__",
          [](moe::Experts* self, int experts, int hidden_size, int intermediate_size, const std::string& weights,
             const std::string& down_weights, int group_size, bool symmetric, bool has_gate, bool has_bias,
             const std::string& activation, float alpha, float gate_max, float up_limit, float up_offset,
             const std::string& kernel, int nodes) {
            new (self) moe::Experts(make_config(experts, hidden_size, intermediate_size, weights, down_weights,
                                                group_size, symmetric, has_gate, has_bias, activation, alpha, gate_max,
                                                up_limit, up_offset, kernel, nodes));
          },
          nb::kw_only(), nb::arg("experts"), nb::arg("hidden_size"), nb::arg("intermediate_size"), nb::arg("weights"),
          nb::arg("down_weights") = "", nb::arg("group_size"), nb::arg("symmetric") = true, nb::arg("has_gate"),
          nb::arg("has_bias"), nb::arg("activation"), nb::arg("alpha"), nb::arg("gate_max"), nb::arg("up_limit"),
          nb::arg("up_offset"), nb::arg("kernel"), nb::arg("nodes") = 0,
          "Nothing is allocated before allocate(). down_weights: of the down projection, where it has another K-quant.")
      .def_prop_ro(
          "hidden_size", [](const moe::Experts& self) { return self.config().hidden_size; }, "Inputs and outputs.")
      .def_prop_ro(
          "count", [](const moe::Experts& self) { return self.config().experts; }, "How many experts.")
      .def_prop_ro(
          "id", [](const moe::Experts& self) { return reinterpret_cast<uintptr_t>(&self); },
          "Tells these experts from others in what trace_stop() gives.")
      .def_prop_ro("bytes", &moe::Experts::bytes, "Bytes of packed weights and biases, known before allocation.")
      .def("workspace_bytes", &moe::Experts::workspace_bytes, nb::arg("tokens"), nb::arg("top_k"),
           "Working memory of a pass over so many tokens, about. See allow_workspace.")
      .def_prop_ro(
          "kernels",
          [](const moe::Experts& self) {
            return std::make_tuple(std::string(self.kernels().many->name), std::string(self.kernels().few->name));
          },
          "(kernel for experts with many rows, kernel for few).")
      .def_prop_ro(
          "down_kernels",
          [](const moe::Experts& self) {
            return std::make_tuple(std::string(self.down_kernels().many->name),
                                   std::string(self.down_kernels().few->name));
          },
          "The same for the down projection.")
      .def(
          "kernel_for", [](const moe::Experts& self, int rows) { return std::string(self.kernels()(rows).name); },
          nb::arg("rows"), "The kernel for an expert with so many rows.")
      .def_prop_ro(
          "shards",
          [](const moe::Experts& self) {
            std::vector<std::tuple<int, int>> panels;
            for (const moe::Shard& shard : self.shards()) panels.emplace_back(shard.gate_up.panels, shard.down.panels);
            return panels;
          },
          "Of each node: (panels of gate and up, panels of down) of an expert.")
      .def_prop_ro("not_placed", &moe::Experts::not_placed, nb::call_guard<WithoutGil>(),
                   "After allocate(): why the system would not place the shards on their nodes; empty if it did.")
      .def("allocate", &moe::Experts::allocate, nb::call_guard<WithoutGil>(),
           "Reserve the packed weights, zeroed; once. Raises MemoryError.")
      .def("load", &load, nb::arg("projection"), nb::arg("expert"), nb::arg("weight"), nb::call_guard<WithoutGil>(),
           "Pack weight [n, k], any strides, of projection 'gate', 'up' or 'down'.")
      .def("load_integers", &load_integers, nb::arg("projection"), nb::arg("expert"), nb::arg("codes"),
           nb::arg("scales"), nb::arg("zeros").none() = nb::none(), nb::call_guard<WithoutGil>(),
           "Keep codes uint8 [n, k], any strides, with scales fp32 [n, groups] and zero points uint8 of the same "
           "strides; for int4, whose scales are rounded to bf16, and for int8 weights, whose codes are 128 above.")
      .def("load_fp8", &load_fp8, nb::arg("projection"), nb::arg("expert"), nb::arg("codes"), nb::arg("scales"),
           nb::call_guard<WithoutGil>(),
           "Keep e4m3 codes uint8 [n, k], any strides, with scales fp32 [ceil(n / 128), ceil(k / 128)], for fp8 "
           "weights; or [n, 1], for fp8_channel; or [n, ceil(k / 32)], powers of two, for mxfp8.")
      .def("load_nvfp4", &load_nvfp4, nb::arg("projection"), nb::arg("expert"), nb::arg("codes"), nb::arg("scales"),
           nb::arg("factor"), nb::call_guard<WithoutGil>(),
           "Keep e2m1 codes uint8 [n, k / 2], an even input in the lower half of a byte, with e4m3 scales uint8 "
           "[n, k / 16], both of any strides, and what multiplies them all; for nvfp4 weights.")
      .def("load_blocks", &load_blocks, nb::arg("projection"), nb::arg("expert"), nb::arg("rows"),
           nb::call_guard<WithoutGil>(),
           "Keep rows of a GGUF file's blocks, uint8 [n, bytes], bytes of a row contiguous; for K-quants.")
      .def("load_bias", &load_bias, nb::arg("projection"), nb::arg("expert"), nb::arg("bias"),
           nb::call_guard<WithoutGil>(), "Take bias [n].")
      .def("packed", &packed,
           "After allocate(), where the packed weights and biases lie: (name, whether it is fp32, shape in a file,\n"
           "[(start in it, bytes, address)]). The file is the same for any number of nodes.")
      .def("touch", &moe::Experts::touch, nb::call_guard<WithoutGil>(),
           "Before anything is written to packed(): puts the memory on its nodes where the system would not.")
      .def("mark_loaded", &moe::Experts::mark_loaded, nb::call_guard<WithoutGil>(),
           "What was written to packed() is all of the weights.")
      .def("repeat", &moe::Experts::repeat, nb::arg("expert"), nb::call_guard<WithoutGil>(),
           "Make every expert a copy of this one, for benchmarks.")
      .def("release", &moe::Experts::release, nb::arg("expert"), nb::call_guard<WithoutGil>(),
           "An expert that is wholly loaded leaves RAM, but for its biases; forward() and unpack() then refuse it. Not "
           "while a call uses it, nor after it was page-locked.")
      .def_prop_ro("released_bytes", &moe::Experts::released_bytes,
                   "What release() of one expert gives back, at least.")
      .def("absent", &moe::Experts::absent, nb::arg("limit"), nb::call_guard<WithoutGil>(),
           "Up to `limit` weights and biases that were not loaded.")
      .def("unpack", &unpack, nb::arg("projection"), nb::arg("expert"), nb::arg("out"), nb::call_guard<WithoutGil>(),
           "Write the dequantised weight to out [n, k] fp32.")
      .def("unpack_bias", &unpack_bias, nb::arg("projection"), nb::arg("expert"), nb::arg("out"),
           nb::call_guard<WithoutGil>(), "Write the bias to out [n] fp32.")
      .def(
          "fetch_ahead",
          [](const moe::Experts& self, const std::vector<int32_t>& ids) {
            self.fetch_ahead(ids.data(), static_cast<int>(ids.size()));
          },
          nb::arg("ids"), nb::call_guard<WithoutGil>(),
          "Guess that the next forward of this thread is of one token and these experts: idle workers bring their "
          "weights\n"
          "into caches until then. Results do not depend on it.")
      .def_prop_ro(
          "guesses",
          [](const moe::Experts& self) { return std::tuple(self.guesses().right(), self.guesses().asked()); },
          "(right, asked): of passes whose guess was followed so far, how many experts it had named, and how many "
          "there "
          "were.")
      .def("forward", &forward, nb::arg("hidden_states"), nb::arg("top_k_index"), nb::arg("top_k_weights"),
           nb::arg("out"), nb::call_guard<WithoutGil>(),
           "out [m, hidden] = weighted sum of the experts of hidden_states [m, hidden]; top_k_index [m, t] int64 or "
           "int32,\n"
           "top_k_weights [m, t]. Raises IndexError for an id that is no expert.");
}

}  // namespace ktinject
