// What the bindings of a decoder's parts share.
#pragma once

#include <optional>
#include <vector>

#include "attention/attention.hpp"
#include "attention/projection.hpp"
#include "bindings/arrays.hpp"

namespace ktinject {

using Vector = Array<nb::ro, nb::ndim<1>, nb::c_contig>;
using FloatVector = Array<const float, nb::ndim<1>, nb::c_contig>;
using FloatMatrix = Array<const float, nb::ndim<2>, nb::c_contig>;

// A norm and the tensor that it points to.
struct HeldNorm {
  Vector weight;
  std::optional<Vector> bias;
  attention::Norm norm;

  // Whether it is one of a model of this dtype.
  bool is_of(DType dtype) const { return norm.is_wide || dtype_of(weight.dtype(), "norm") == dtype; }
};

// A plain weight that a projection points to.
struct HeldProjection {
  std::optional<Input> weight;
  std::optional<FloatVector> bias;
  attention::Projection projection;
};

using Kept = Array<nb::c_contig>;

// What all layers keep of the tokens before.
struct HeldCache {
  std::vector<Kept> held;
  std::vector<attention::LayerCache> layers;
  std::vector<attention::Undo> undo;      // of each layer
  std::vector<attention::Choice> choice;  // one, of the last layer with an index
  int rows = 0;                           // of the last step, if they were consecutive
};

inline attention::Norm norm_of(const HeldNorm* held) { return held == nullptr ? attention::Norm() : held->norm; }

// Norms of many rows, and the choice of tokens.
void init_decoder_choice(nb::module_& m);
// The feed-forward parts of layers.
void init_decoder_feed_forward(nb::module_& m);
// Latent attention, behind `DecoderAttention` and `Projection`.
void init_decoder_latent(nb::module_& m);
// A step of one token from its number to its logits, behind `Decoder` and `DecoderCache`.
void init_decoder_token(nb::module_& m);
// Residual streams, and attention with compressed keys.
void init_decoder_streams(nb::module_& m);

}  // namespace ktinject
