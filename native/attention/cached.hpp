// What kinds of attention with a cache of tokens share.
#pragma once

#include "attention/attention.hpp"

namespace ktinject::attention {

// An element of a tensor of the model's dtype.
inline void* at(void* base, size_t element, const Step& step) {
  return static_cast<std::byte*>(base) + element * step.width();
}

// Throws std::invalid_argument for a layer that is missing or has another number of outputs.
void expect(const gemm::Linear* linear, int out, const char* name);

// Places of the rows of a step that are computed with this one. prompt: the tokens before a ring; 0: there are none.
Places places_of(const LayerCache& cache, const Step& step, int row, int heads, int key_size, int value_size,
                 int window, int prompt = 0);

// sum [batch, heads, value] times what a gate [batch, gates] says, of a head or of each of its values.
void multiply_by_gate(float* sum, int values, float* gate, int gates, bool has_softplus, const Step& step);

}  // namespace ktinject::attention
