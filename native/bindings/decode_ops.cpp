// The small kernels of a decode step.
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/addresses.hpp"
#include "bindings/sequences.hpp"
#include "bindings/stream.hpp"
#include "bindings/subjects.hpp"
#include "cuda/decode_choose.hpp"
#include "cuda/decode_compress.hpp"
#include "cuda/decode_delta.hpp"
#include "cuda/decode_linear.hpp"
#include "cuda/decode_ops.hpp"
#include "cuda/decode_recurrent.hpp"
#include "cuda/decode_streams.hpp"
#include "cuda/rms_norm.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

using Part = std::tuple<Address<>, int64_t, int64_t>;

void def_attention(nb::module_& m) {
  m.def(
      "attention",
      [](Address<> q, Address<> k, Address<> v, Address<> q_weight, Address<> k_weight, Address<> sinks, Address<> cos,
         Address<> sin, Address<const int64_t> cache_position, Address<const bool> mask, Address<> keys,
         Address<> values, Address<> out, Address<float> scratch, Address<unsigned> block_counts, int batch,
         int q_heads, int kv_heads, int size, int rotary, int angles, int window, bool has_gates, int splits,
         int64_t q_stride, int64_t kv_stride, int64_t q_head_stride, int64_t rotation_stride, int64_t batch_stride,
         int64_t head_stride, int64_t mask_stride, float eps, float norm_offset, bool rounds_first, float scale,
         bool is_consecutive, DType dtype, cuda::Stream stream) {
        cuda::attention({.q = q,
                         .k = k,
                         .v = v,
                         .q_weight = q_weight,
                         .k_weight = k_weight,
                         .sinks = sinks,
                         .cos = cos,
                         .sin = sin,
                         .cache_position = cache_position,
                         .mask = mask,
                         .keys = keys,
                         .values = values,
                         .out = out,
                         .scratch = scratch,
                         .block_counts = block_counts,
                         .batch = batch,
                         .q_heads = q_heads,
                         .kv_heads = kv_heads,
                         .size = size,
                         .rotary = rotary,
                         .angles = angles,
                         .window = window,
                         .has_gates = has_gates,
                         .is_consecutive = is_consecutive,
                         .splits = splits,
                         .q_stride = q_stride,
                         .kv_stride = kv_stride,
                         .q_head_stride = q_head_stride,
                         .rotation_stride = rotation_stride,
                         .batch_stride = batch_stride,
                         .head_stride = head_stride,
                         .mask_stride = mask_stride,
                         .eps = eps,
                         .norm_offset = norm_offset,
                         .rounds_first = rounds_first,
                         .scale = scale},
                        dtype, stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("q_weight"), nb::arg("k_weight"),
      nb::arg("sinks"), nb::arg("cos"), nb::arg("sin"), nb::arg("cache_position"), nb::arg("mask"), nb::arg("keys"),
      nb::arg("values"), nb::arg("out"), nb::arg("scratch"), nb::arg("block_counts"), nb::arg("batch"),
      nb::arg("q_heads"), nb::arg("kv_heads"), nb::arg("size"), nb::arg("rotary"), nb::arg("angles"), nb::arg("window"),
      nb::arg("has_gates"), nb::arg("splits"), nb::arg("q_stride"), nb::arg("kv_stride"), nb::arg("q_head_stride"),
      nb::arg("rotation_stride"), nb::arg("batch_stride"), nb::arg("head_stride"), nb::arg("mask_stride"),
      nb::arg("eps"), nb::arg("norm_offset"), nb::arg("rounds_first"), nb::arg("scale"), nb::arg("is_consecutive"),
      nb::arg("dtype"), nb::arg("stream"),
      "Norm and rotate queries and the new key, fill the cache, and attend to it.");
  m.def(
      "latent",
      [](Address<> q, Address<> kv, Address<> norm, Address<> cos, Address<> sin, Address<const int64_t> cache_position,
         Address<> keys, Address<> values, int rows, int heads, int nope, int rope, int rank, bool turns_neighbours,
         int64_t q_stride, int64_t kv_stride, int64_t rotation_stride, int64_t keys_stride, int64_t values_stride,
         float eps, bool is_consecutive, DType dtype, cuda::Stream stream) {
        cuda::latent({q,
                      kv,
                      norm,
                      cos,
                      sin,
                      cache_position,
                      keys,
                      values,
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
                      eps,
                      is_consecutive},
                     dtype, stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("kv"), nb::arg("norm"), nb::arg("cos"), nb::arg("sin"),
      nb::arg("cache_position"), nb::arg("keys"), nb::arg("values"), nb::arg("rows"), nb::arg("heads"), nb::arg("nope"),
      nb::arg("rope"), nb::arg("rank"), nb::arg("turns_neighbours"), nb::arg("q_stride"), nb::arg("kv_stride"),
      nb::arg("rotation_stride"), nb::arg("keys_stride"), nb::arg("values_stride"), nb::arg("eps"),
      nb::arg("is_consecutive"), nb::arg("dtype"), nb::arg("stream"),
      "Rotate queries, norm and rotate what is cached, and fill the cache.");
  m.def("attention_scratch", &cuda::attention_scratch, nb::arg("q_heads"), nb::arg("size"),
        "Values of scratch that `attention` needs a row and split.");
}

void def_linear(nb::module_& m) {
  m.def(
      "rms_norm",
      [](Address<> x, Address<> weight, Address<> out, DType dtype, int64_t rows, int n, float epsilon,
         cuda::Stream stream, float offset, bool rounds_first, bool is_wide_weight) {
        cuda::rms_norm({x, weight, out, rows, n, epsilon, offset, rounds_first, is_wide_weight}, dtype, stream);
      },
      nb::arg("x"), nb::arg("weight"), nb::arg("out"), nb::arg("dtype"), nb::arg("rows"), nb::arg("n"),
      nb::arg("epsilon"), nb::arg("stream"), nb::arg("offset") = 0.0f, nb::arg("rounds_first") = true,
      nb::arg("is_wide_weight") = false, "Put the normalisation of rows into the stream; addresses on the device.");
  m.def(
      "decode_linear",
      [](Address<> x, Address<> norm, float eps, float norm_offset, bool rounds_first, Address<> normed,
         const Sequence<Address<>>& given_weights, const Sequence<Address<>>& given_biases,
         const Sequence<int>& given_n, Address<> residual, Address<> out, bool is_wide, Address<> then,
         int64_t then_bytes, int rows, int k, DType dtype, cuda::Stream stream) {
        const std::vector<Address<>> weights = vector_of(given_weights, "weights"),
                                     biases = vector_of(given_biases, "biases");
        const std::vector<int> n = vector_of(given_n, "n");
        if (n.size() > cuda::DecodeLinear::kMatrices || weights.size() != n.size() || biases.size() != n.size())
          throw std::invalid_argument("decode_linear: up to four matrices, each with n and a bias or 0");
        cuda::DecodeLinear input{.x = x,
                                 .norm = norm,
                                 .normed = normed,
                                 .residual = residual,
                                 .out = out,
                                 .is_wide = is_wide,
                                 .then = then,
                                 .then_bytes = then_bytes,
                                 .rows = rows,
                                 .k = k,
                                 .eps = eps,
                                 .norm_offset = norm_offset,
                                 .rounds_first = rounds_first};
        for (size_t i = 0; i < n.size(); ++i) {
          input.weights[i] = weights[i];
          input.biases[i] = biases[i];
          input.n[i] = n[i];
        }
        cuda::decode_linear(input, dtype, stream);
      },
      nb::kw_only(), nb::arg("x"), nb::arg("norm"), nb::arg("eps"), nb::arg("norm_offset"), nb::arg("rounds_first"),
      nb::arg("normed"), nb::arg("weights"), nb::arg("biases"), nb::arg("n"), nb::arg("residual"), nb::arg("out"),
      nb::arg("is_wide"), nb::arg("then"), nb::arg("then_bytes"), nb::arg("rows"), nb::arg("k"), nb::arg("dtype"),
      nb::arg("stream"), "Norm, linear layers, residual; addresses, 0 for what is not there.");
}

cuda::DeltaInput delta_input(const Part& part) {
  const auto& [data, row_stride, head_stride] = part;
  return {data, row_stride, head_stride};
}

void def_linear_attention(nb::module_& m) {
  m.def(
      "gated_delta",
      [](const Part& q, const Part& k, const Part& v, const Part& z, const Part& b, const Part& a, Address<> inputs,
         Address<float> states, Address<> taps_weight, Address<> a_log, Address<> dt_bias, Address<> norm,
         bool is_wide_a_log, bool is_wide_dt_bias, bool is_wide_norm, float eps, Address<float> scratch,
         Address<unsigned> block_counts, Address<> out, Address<> then, int64_t then_bytes, int rows, int key_heads,
         int value_heads, int key_size, int value_size, int taps, DType dtype, cuda::Stream stream) {
        cuda::gated_delta({delta_input(q),
                           delta_input(k),
                           delta_input(v),
                           delta_input(z),
                           delta_input(b),
                           delta_input(a),
                           inputs,
                           states,
                           taps_weight,
                           a_log,
                           dt_bias,
                           norm,
                           is_wide_a_log,
                           is_wide_dt_bias,
                           is_wide_norm,
                           eps,
                           scratch,
                           block_counts,
                           out,
                           then,
                           then_bytes,
                           rows,
                           key_heads,
                           value_heads,
                           key_size,
                           value_size,
                           taps},
                          dtype, stream);
      },
      nb::kw_only(), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("z"), nb::arg("b"), nb::arg("a"),
      nb::arg("inputs"), nb::arg("states"), nb::arg("taps_weight"), nb::arg("a_log"), nb::arg("dt_bias"),
      nb::arg("norm"), nb::arg("is_wide_a_log"), nb::arg("is_wide_dt_bias"), nb::arg("is_wide_norm"), nb::arg("eps"),
      nb::arg("scratch"), nb::arg("block_counts"), nb::arg("out"), nb::arg("then"), nb::arg("then_bytes"),
      nb::arg("rows"), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_size"), nb::arg("value_size"),
      nb::arg("taps"), nb::arg("dtype"), nb::arg("stream"),
      "A token of the gated delta rule between its projections; q to a as (address, strides of a row and a head).");
}

void def_recurrent(nb::module_& m) {
  m.def(
      "mamba2",
      [](Address<> z, Address<> mixed, Address<> dt, Address<> inputs, Address<float> states, Address<> taps_weight,
         Address<> taps_bias, Address<> a_log, Address<> dt_bias, Address<> d, Address<> norm, bool is_wide_a_log,
         bool is_wide_dt_bias, bool is_wide_d, bool is_wide_norm, float eps, Address<float> scratch,
         Address<unsigned> block_counts, Address<> out, Address<> then, int64_t then_bytes, int64_t row_stride,
         int rows, int heads, int groups, int head_size, int state_size, int taps, DType dtype, cuda::Stream stream) {
        cuda::mamba2({z,
                      mixed,
                      dt,
                      inputs,
                      states,
                      taps_weight,
                      taps_bias,
                      a_log,
                      dt_bias,
                      d,
                      norm,
                      is_wide_a_log,
                      is_wide_dt_bias,
                      is_wide_d,
                      is_wide_norm,
                      eps,
                      scratch,
                      block_counts,
                      out,
                      then,
                      then_bytes,
                      row_stride,
                      rows,
                      heads,
                      groups,
                      head_size,
                      state_size,
                      taps},
                     dtype, stream);
      },
      nb::kw_only(), nb::arg("z"), nb::arg("mixed"), nb::arg("dt"), nb::arg("inputs"), nb::arg("states"),
      nb::arg("taps_weight"), nb::arg("taps_bias"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("d"), nb::arg("norm"),
      nb::arg("is_wide_a_log"), nb::arg("is_wide_dt_bias"), nb::arg("is_wide_d"), nb::arg("is_wide_norm"),
      nb::arg("eps"), nb::arg("scratch"), nb::arg("block_counts"), nb::arg("out"), nb::arg("then"),
      nb::arg("then_bytes"), nb::arg("row_stride"), nb::arg("rows"), nb::arg("heads"), nb::arg("groups"),
      nb::arg("head_size"), nb::arg("state_size"), nb::arg("taps"), nb::arg("dtype"), nb::arg("stream"),
      "A token of Mamba-2 between its projections.");
  m.def(
      "short_convolution",
      [](Address<> projected, Address<> inputs, Address<> taps_weight, Address<> taps_bias, Address<> out,
         int64_t row_stride, int rows, int n, int taps, DType dtype, cuda::Stream stream) {
        cuda::short_convolution({projected, inputs, taps_weight, taps_bias, out, row_stride, rows, n, taps}, dtype,
                                stream);
      },
      nb::kw_only(), nb::arg("projected"), nb::arg("inputs"), nb::arg("taps_weight"), nb::arg("taps_bias"),
      nb::arg("out"), nb::arg("row_stride"), nb::arg("rows"), nb::arg("n"), nb::arg("taps"), nb::arg("dtype"),
      nb::arg("stream"), "A token of a gated short convolution between its projections.");
}

void def_next_token(nb::module_& m) {
  m.def(
      "choose_on_gpu",
      [](Address<const float> scores, Address<const float> noise, Address<const bool> ends, Address<int64_t> ids,
         Address<int64_t> result, Address<bool> seen, Address<int64_t> length, Address<uint64_t> best,
         Address<unsigned> block_counts, int64_t pad, int rows, int vocab, cuda::Stream stream) {
        cuda::choose({scores, noise, ends, ids, result, seen, length, best, block_counts, pad, rows, vocab}, stream);
      },
      nb::kw_only(), nb::arg("scores"), nb::arg("noise"), nb::arg("ends"), nb::arg("ids"), nb::arg("result"),
      nb::arg("seen"), nb::arg("length"), nb::arg("best"), nb::arg("block_counts"), nb::arg("pad"), nb::arg("rows"),
      nb::arg("vocab"), nb::arg("stream"), "The greatest score of each row, or a sample, and what follows from it.");
  m.def(
      "advance",
      [](Address<int64_t> cache_position, Address<int64_t> positions, Address<bool> mask, int rows, int64_t mask_stride,
         cuda::Stream stream) { cuda::advance(cache_position, positions, mask, rows, mask_stride, stream); },
      nb::arg("cache_position"), nb::arg("positions"), nb::arg("mask"), nb::arg("rows"), nb::arg("mask_stride"),
      nb::arg("stream"), "A token more.");
  m.def(
      "rotation",
      [](Address<const int64_t> positions, Address<const float> frequencies, Address<> cos, Address<> sin, int rows,
         int half, float scale, DType dtype,
         cuda::Stream stream) { cuda::rotation(positions, frequencies, cos, sin, rows, half, scale, dtype, stream); },
      nb::arg("positions"), nb::arg("frequencies"), nb::arg("cos"), nb::arg("sin"), nb::arg("rows"), nb::arg("half"),
      nb::arg("scale"), nb::arg("dtype"), nb::arg("stream"), "cos and sin of positions.");
}

void def_routing(nb::module_& m) {
  m.def(
      "route",
      [](Address<> logits, Address<> weights, Address<int64_t> ids, int rows, int experts, int top_k, bool normed,
         DType dtype,
         cuda::Stream stream) { cuda::route(logits, weights, ids, rows, experts, top_k, normed, dtype, stream); },
      nb::arg("logits"), nb::arg("weights"), nb::arg("ids"), nb::arg("rows"), nb::arg("experts"), nb::arg("top_k"),
      nb::arg("normed"), nb::arg("dtype"), nb::arg("stream"), "Softmax and the greatest top_k of logits.");
  m.def(
      "route_grouped",
      [](Address<const float> logits, Address<> bias, Address<float> weights, Address<int64_t> ids, int rows,
         int experts, int top_k, int groups, int kept, bool normed, float scale, DType bias_dtype,
         cuda::Stream stream) {
        cuda::route_grouped({logits, bias, weights, ids, rows, experts, top_k, groups, kept, normed, scale}, bias_dtype,
                            stream);
      },
      nb::kw_only(), nb::arg("logits"), nb::arg("bias"), nb::arg("weights"), nb::arg("ids"), nb::arg("rows"),
      nb::arg("experts"), nb::arg("top_k"), nb::arg("groups"), nb::arg("kept"), nb::arg("normed"), nb::arg("scale"),
      nb::arg("bias_dtype"), nb::arg("stream"), "Sigmoid and the greatest top_k within the best groups of logits.");
}

void def_streams(nb::module_& m) {
  m.attr("HYPER_CONNECTION_STREAMS") = cuda::HyperConnection::kStreams;
  m.attr("HYPER_CONNECTION_COLUMNS") = cuda::HyperConnection::kColumns;
  m.def(
      "hyper_connection",
      [](Address<> streams, Address<const float> fn, Address<const float> base, Address<const float> scale,
         float norm_eps, float eps, Address<float> scratch, Address<unsigned> block_counts, Address<float> post,
         Address<float> comb, Address<> collapsed, int rows, int n, int iterations, DType dtype, cuda::Stream stream) {
        cuda::hyper_connection({streams, fn, base, scale, norm_eps, eps, scratch, block_counts, post, comb, collapsed,
                                rows, n, iterations},
                               dtype, stream);
      },
      nb::kw_only(), nb::arg("streams"), nb::arg("fn"), nb::arg("base"), nb::arg("scale"), nb::arg("norm_eps"),
      nb::arg("eps"), nb::arg("scratch"), nb::arg("block_counts"), nb::arg("post"), nb::arg("comb"),
      nb::arg("collapsed"), nb::arg("rows"), nb::arg("n"), nb::arg("iterations"), nb::arg("dtype"), nb::arg("stream"),
      "The weights of residual streams, and these streams collapsed.");
  m.def(
      "mix_streams",
      [](Address<> streams, Address<> y, Address<const float> post, Address<const float> comb, Address<> out, int rows,
         int n, DType dtype,
         cuda::Stream stream) { cuda::mix_streams({streams, y, post, comb, out, rows, n}, dtype, stream); },
      nb::kw_only(), nb::arg("streams"), nb::arg("y"), nb::arg("post"), nb::arg("comb"), nb::arg("out"),
      nb::arg("rows"), nb::arg("n"), nb::arg("dtype"), nb::arg("stream"),
      "Residual streams mixed, and a layer's part added.");
}

void def_compressed(nb::module_& m) {
  m.def(
      "compress",
      [](Address<> kv, Address<> gate, int64_t kv_stride, int64_t gate_stride, Address<> held_kv, Address<> held_gate,
         Address<const float> bias, Address<> overlap_kv, Address<float> overlap_gate, Address<const float> norm,
         float eps, Address<const float> angles, float scale, Address<const int64_t> cache_position,
         Address<const int64_t> positions, int64_t positions_stride, Address<> keys, int64_t keys_stride,
         Address<> added, bool always, int rows, int rate, int d, int windows, int turned, DType dtype,
         cuda::Stream stream) {
        cuda::compress({.kv = kv,
                        .gate = gate,
                        .kv_stride = kv_stride,
                        .gate_stride = gate_stride,
                        .held_kv = held_kv,
                        .held_gate = held_gate,
                        .bias = bias,
                        .overlap_kv = overlap_kv,
                        .overlap_gate = overlap_gate,
                        .norm = norm,
                        .angles = angles,
                        .eps = eps,
                        .scale = scale,
                        .cache_position = cache_position,
                        .positions = positions,
                        .positions_stride = positions_stride,
                        .keys = keys,
                        .keys_stride = keys_stride,
                        .added = added,
                        .always = always,
                        .rows = rows,
                        .rate = rate,
                        .d = d,
                        .windows = windows,
                        .turned = turned},
                       dtype, stream);
      },
      nb::kw_only(), nb::arg("kv"), nb::arg("gate"), nb::arg("kv_stride"), nb::arg("gate_stride"), nb::arg("held_kv"),
      nb::arg("held_gate"), nb::arg("bias"), nb::arg("overlap_kv"), nb::arg("overlap_gate"), nb::arg("norm"),
      nb::arg("eps"), nb::arg("angles"), nb::arg("scale"), nb::arg("cache_position"), nb::arg("positions"),
      nb::arg("positions_stride"), nb::arg("keys"), nb::arg("keys_stride"), nb::arg("added"), nb::arg("always"),
      nb::arg("rows"), nb::arg("rate"), nb::arg("d"), nb::arg("windows"), nb::arg("turned"), nb::arg("dtype"),
      nb::arg("stream"), "A token more of a window of compressed keys, and its key.");
  m.def(
      "turn_heads",
      [](Address<> x, Address<> cos, Address<> sin, Address<> out, int64_t x_stride, int64_t angle_stride, float eps,
         bool is_back, int rows, int heads, int size, int angles, DType dtype, cuda::Stream stream) {
        cuda::turn_heads({x, cos, sin, out, x_stride, angle_stride, eps, is_back, rows, heads, size, angles}, dtype,
                         stream);
      },
      nb::kw_only(), nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("out"), nb::arg("x_stride"),
      nb::arg("angle_stride"), nb::arg("eps"), nb::arg("is_back"), nb::arg("rows"), nb::arg("heads"), nb::arg("size"),
      nb::arg("angles"), nb::arg("dtype"), nb::arg("stream"), "Heads whose last values turn in pairs.");
  m.def(
      "sink_softmax",
      [](Address<> scores, Address<> first, Address<> rest, Address<const float> sinks, Address<> out,
         int64_t first_stride, float scale, int rows, int heads, int n, int of_first, DType dtype,
         cuda::Stream stream) {
        cuda::sink_softmax({scores, first, rest, sinks, out, first_stride, scale, rows, heads, n, of_first}, dtype,
                           stream);
      },
      nb::kw_only(), nb::arg("scores"), nb::arg("first"), nb::arg("rest"), nb::arg("sinks"), nb::arg("out"),
      nb::arg("first_stride"), nb::arg("scale"), nb::arg("rows"), nb::arg("heads"), nb::arg("n"), nb::arg("of_first"),
      nb::arg("dtype"), nb::arg("stream"), "Weights of attention with sinks, of scores.");
}

}  // namespace

void init_decode_ops(nb::module_& m) {
  def_attention(m);
  def_linear(m);
  def_linear_attention(m);
  m.attr("GATED_DELTA_MOST_PARTS") = cuda::GatedDelta::kMostParts;
  def_recurrent(m);
  def_next_token(m);
  def_routing(m);
  def_streams(m);
  def_compressed(m);
}

}  // namespace ktinject
