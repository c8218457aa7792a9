// What the bindings of a decoder's parts share.
#pragma once

#include <optional>

#include "attention/attention.hpp"
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
};

inline attention::Norm norm_of(const HeldNorm* held) { return held == nullptr ? attention::Norm() : held->norm; }

// The feed-forward parts of layers.
void init_decoder_feed_forward(nb::module_& m);

}  // namespace ktinject
