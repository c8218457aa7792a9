// The small kernels of a decode step. Pointers come as integers: DLPack would make streams wait for each other.
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/stream.hpp"
#include "bindings/subjects.hpp"
#include "cuda/decode_choose.hpp"
#include "cuda/decode_linear.hpp"
#include "cuda/decode_ops.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DType dtype_of(int code) { return static_cast<DType>(code); }

}  // namespace

void init_decode_ops(nb::module_& m) {
  m.def(
      "attention",
      [](uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t q_weight, uintptr_t k_weight, uintptr_t cos, uintptr_t sin,
         uintptr_t cache_position, uintptr_t mask, uintptr_t keys, uintptr_t values, uintptr_t out, uintptr_t scratch,
         uintptr_t block_counts, int batch, int q_heads, int kv_heads, int size, int splits, int64_t q_stride,
         int64_t kv_stride, int64_t rotation_stride, int64_t batch_stride, int64_t head_stride, int64_t mask_stride,
         float eps, float scale, int dtype, cuda::Stream stream) {
        cuda::attention({pointer<>(q),
                         pointer<>(k),
                         pointer<>(v),
                         pointer<>(q_weight),
                         pointer<>(k_weight),
                         pointer<>(cos),
                         pointer<>(sin),
                         pointer<const int64_t>(cache_position),
                         pointer<const bool>(mask),
                         pointer<>(keys),
                         pointer<>(values),
                         pointer<>(out),
                         pointer<float>(scratch),
                         pointer<unsigned>(block_counts),
                         batch,
                         q_heads,
                         kv_heads,
                         size,
                         splits,
                         q_stride,
                         kv_stride,
                         rotation_stride,
                         batch_stride,
                         head_stride,
                         mask_stride,
                         eps,
                         scale},
                        dtype_of(dtype), stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("q_weight"), nb::arg("k_weight"), nb::arg("cos"),
      nb::arg("sin"), nb::arg("cache_position"), nb::arg("mask"), nb::arg("keys"), nb::arg("values"), nb::arg("out"),
      nb::arg("scratch"), nb::arg("block_counts"), nb::arg("batch"), nb::arg("q_heads"), nb::arg("kv_heads"),
      nb::arg("size"), nb::arg("splits"), nb::arg("q_stride"), nb::arg("kv_stride"), nb::arg("rotation_stride"),
      nb::arg("batch_stride"), nb::arg("head_stride"), nb::arg("mask_stride"), nb::arg("eps"), nb::arg("scale"),
      nb::arg("dtype"), nb::arg("stream"),
      "Norm and rotate queries and the new key, fill the cache, and attend to it.");
  m.def(
      "latent",
      [](uintptr_t q, uintptr_t kv, uintptr_t norm, uintptr_t cos, uintptr_t sin, uintptr_t cache_position,
         uintptr_t keys, uintptr_t values, int rows, int heads, int nope, int rope, int rank, bool turns_neighbours,
         int64_t q_stride, int64_t kv_stride, int64_t rotation_stride, int64_t keys_stride, int64_t values_stride,
         float eps, int dtype, cuda::Stream stream) {
        cuda::latent({pointer<>(q),
                      pointer<>(kv),
                      pointer<>(norm),
                      pointer<>(cos),
                      pointer<>(sin),
                      pointer<const int64_t>(cache_position),
                      pointer<>(keys),
                      pointer<>(values),
                      rows,
                      heads,
                      nope,
                      rope,
                      rank,
                      turns_neighbours,
                      q_stride,
                      kv_stride,
                      rotation_stride,
                      keys_stride,
                      values_stride,
                      eps},
                     dtype_of(dtype), stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("kv"), nb::arg("norm"), nb::arg("cos"), nb::arg("sin"),
      nb::arg("cache_position"), nb::arg("keys"), nb::arg("values"), nb::arg("rows"), nb::arg("heads"), nb::arg("nope"),
      nb::arg("rope"), nb::arg("rank"), nb::arg("turns_neighbours"), nb::arg("q_stride"), nb::arg("kv_stride"),
      nb::arg("rotation_stride"), nb::arg("keys_stride"), nb::arg("values_stride"), nb::arg("eps"), nb::arg("dtype"),
      nb::arg("stream"), "Rotate queries, norm and rotate what is cached, and fill the cache.");
  m.def("attention_scratch", &cuda::attention_scratch, nb::arg("q_heads"), nb::arg("size"),
        "Values of scratch that `attention` needs a row and split.");
  m.def(
      "decode_linear",
      [](uintptr_t x, uintptr_t norm, float eps, uintptr_t normed, const std::vector<uintptr_t>& weights,
         const std::vector<uintptr_t>& biases, const std::vector<int>& n, uintptr_t residual, uintptr_t out,
         bool is_wide, uintptr_t then, int64_t then_bytes, int rows, int k, int dtype, cuda::Stream stream) {
        if (n.size() > cuda::DecodeLinear::kMatrices || weights.size() != n.size() || biases.size() != n.size())
          throw std::invalid_argument("decode_linear: up to three matrices, each with n and a bias or 0");
        cuda::DecodeLinear input{.x = pointer<>(x),
                                 .norm = pointer<>(norm),
                                 .normed = pointer<>(normed),
                                 .residual = pointer<>(residual),
                                 .out = pointer<>(out),
                                 .is_wide = is_wide,
                                 .then = pointer<>(then),
                                 .then_bytes = then_bytes,
                                 .rows = rows,
                                 .k = k,
                                 .eps = eps};
        for (size_t i = 0; i < n.size(); ++i) {
          input.weights[i] = pointer<>(weights[i]);
          input.biases[i] = pointer<>(biases[i]);
          input.n[i] = n[i];
        }
        cuda::decode_linear(input, dtype_of(dtype), stream);
      },
      nb::kw_only(), nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("normed"), nb::arg("weights"),
      nb::arg("biases"), nb::arg("n"), nb::arg("residual"), nb::arg("out"), nb::arg("is_wide"), nb::arg("then"),
      nb::arg("then_bytes"), nb::arg("rows"), nb::arg("k"), nb::arg("dtype"), nb::arg("stream"),
      "Norm, linear layers, residual; addresses, 0 for what is not there.");
  m.def(
      "choose_on_gpu",
      [](uintptr_t scores, uintptr_t noise, uintptr_t ends, uintptr_t ids, uintptr_t result, uintptr_t seen,
         uintptr_t length, uintptr_t best, uintptr_t block_counts, int64_t pad, int rows, int vocab,
         cuda::Stream stream) {
        cuda::choose({pointer<const float>(scores), pointer<const float>(noise), pointer<const bool>(ends),
                      pointer<int64_t>(ids), pointer<int64_t>(result), pointer<bool>(seen), pointer<int64_t>(length),
                      pointer<uint64_t>(best), pointer<unsigned>(block_counts), pad, rows, vocab},
                     stream);
      },
      nb::kw_only(), nb::arg("scores"), nb::arg("noise"), nb::arg("ends"), nb::arg("ids"), nb::arg("result"),
      nb::arg("seen"), nb::arg("length"), nb::arg("best"), nb::arg("block_counts"), nb::arg("pad"), nb::arg("rows"),
      nb::arg("vocab"), nb::arg("stream"), "The greatest score of each row, or a sample, and what follows from it.");
  m.def(
      "advance",
      [](uintptr_t cache_position, uintptr_t positions, uintptr_t mask, int rows, int64_t mask_stride,
         cuda::Stream stream) {
        cuda::advance(pointer<int64_t>(cache_position), pointer<int64_t>(positions), pointer<bool>(mask), rows,
                      mask_stride, stream);
      },
      nb::arg("cache_position"), nb::arg("positions"), nb::arg("mask"), nb::arg("rows"), nb::arg("mask_stride"),
      nb::arg("stream"), "A token more.");
  m.def(
      "rotation",
      [](uintptr_t positions, uintptr_t frequencies, uintptr_t cos, uintptr_t sin, int rows, int half, float scale,
         int dtype, cuda::Stream stream) {
        cuda::rotation(pointer<const int64_t>(positions), pointer<const float>(frequencies), pointer<>(cos),
                       pointer<>(sin), rows, half, scale, dtype_of(dtype), stream);
      },
      nb::arg("positions"), nb::arg("frequencies"), nb::arg("cos"), nb::arg("sin"), nb::arg("rows"), nb::arg("half"),
      nb::arg("scale"), nb::arg("dtype"), nb::arg("stream"), "cos and sin of positions.");
  m.def(
      "route",
      [](uintptr_t logits, uintptr_t weights, uintptr_t ids, int rows, int experts, int top_k, bool normed, int dtype,
         cuda::Stream stream) {
        cuda::route(pointer<>(logits), pointer<>(weights), pointer<int64_t>(ids), rows, experts, top_k, normed,
                    dtype_of(dtype), stream);
      },
      nb::arg("logits"), nb::arg("weights"), nb::arg("ids"), nb::arg("rows"), nb::arg("experts"), nb::arg("top_k"),
      nb::arg("normed"), nb::arg("dtype"), nb::arg("stream"), "Softmax and the greatest top_k of logits.");
  m.def(
      "route_grouped",
      [](uintptr_t logits, uintptr_t bias, uintptr_t weights, uintptr_t ids, int rows, int experts, int top_k,
         int groups, int kept, bool normed, float scale, int bias_dtype, cuda::Stream stream) {
        cuda::route_grouped({pointer<const float>(logits), pointer<>(bias), pointer<float>(weights),
                             pointer<int64_t>(ids), rows, experts, top_k, groups, kept, normed, scale},
                            dtype_of(bias_dtype), stream);
      },
      nb::kw_only(), nb::arg("logits"), nb::arg("bias"), nb::arg("weights"), nb::arg("ids"), nb::arg("rows"),
      nb::arg("experts"), nb::arg("top_k"), nb::arg("groups"), nb::arg("kept"), nb::arg("normed"), nb::arg("scale"),
      nb::arg("bias_dtype"), nb::arg("stream"), "Sigmoid and the greatest top_k within the best groups of logits.");
}

}  // namespace ktinject
