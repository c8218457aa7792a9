// The small kernels of a decode step. Pointers come as integers: DLPack would make streams wait for each other.
#include <cstdint>

#include "bindings/subjects.hpp"
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
      "attention_input",
      [](uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t q_weight, uintptr_t k_weight, uintptr_t cos, uintptr_t sin,
         uintptr_t place, uintptr_t q_out, uintptr_t keys, uintptr_t values, int batch, int q_heads, int kv_heads,
         int size, int64_t batch_stride, int64_t head_stride, float eps, int dtype, uintptr_t stream) {
        attention_input(
            {pointer<>(q), pointer<>(k), pointer<>(v), pointer<>(q_weight), pointer<>(k_weight), pointer<>(cos),
             pointer<>(sin), pointer<const int64_t>(place), pointer<>(q_out), pointer<>(keys), pointer<>(values), batch,
             q_heads, kv_heads, size, batch_stride, head_stride, eps},
            dtype_of(dtype), stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("q_weight"), nb::arg("k_weight"), nb::arg("cos"),
      nb::arg("sin"), nb::arg("place"), nb::arg("q_out"), nb::arg("keys"), nb::arg("values"), nb::arg("batch"),
      nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("size"), nb::arg("batch_stride"), nb::arg("head_stride"),
      nb::arg("eps"), nb::arg("dtype"), nb::arg("stream"), "Norm and rotate queries and keys; fill the cache.");
  m.def(
      "attention",
      [](uintptr_t q, uintptr_t keys, uintptr_t values, uintptr_t mask, uintptr_t place, uintptr_t out,
         uintptr_t scratch, int batch, int q_heads, int kv_heads, int size, int splits, int64_t batch_stride,
         int64_t head_stride, int64_t mask_stride, float scale, int dtype, uintptr_t stream) {
        attention({pointer<>(q), pointer<>(keys), pointer<>(values), pointer<bool>(mask), pointer<int64_t>(place),
                   pointer<>(out), pointer<float>(scratch), batch, q_heads, kv_heads, size, splits, batch_stride,
                   head_stride, mask_stride, scale},
                  dtype_of(dtype), stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("keys"), nb::arg("values"), nb::arg("mask"), nb::arg("place"),
      nb::arg("out"), nb::arg("scratch"), nb::arg("batch"), nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("size"),
      nb::arg("splits"), nb::arg("batch_stride"), nb::arg("head_stride"), nb::arg("mask_stride"), nb::arg("scale"),
      nb::arg("dtype"), nb::arg("stream"), "Attention of one token a row over a cache.");
  m.def(
      "route",
      [](uintptr_t logits, uintptr_t weights, uintptr_t ids, int rows, int experts, int top_k, bool normed, int dtype,
         uintptr_t stream) {
        route(pointer<>(logits), pointer<>(weights), pointer<int64_t>(ids), rows, experts, top_k, normed,
              dtype_of(dtype), stream);
      },
      nb::arg("logits"), nb::arg("weights"), nb::arg("ids"), nb::arg("rows"), nb::arg("experts"), nb::arg("top_k"),
      nb::arg("normed"), nb::arg("dtype"), nb::arg("stream"), "Softmax and the greatest top_k of logits.");
}

}  // namespace ktinject
