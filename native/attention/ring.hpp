// Caches of layers with a window: rings, in which position p lies at place p % window.
#pragma once

#include "attention/attention.hpp"

namespace ktinject::attention {

// The mask [window] of a row in the order of a ring that is full. mask: null where there is no padding. chunked: what
// is before the row's chunk is not seen, of chunks that begin at its first token.
void mask_of_ring(const uint8_t* mask, int position, int window, bool chunked, uint8_t* out);

// Of a ring that is full, what the consecutive tokens of a step overwrite, and that for those that are not kept. window
// 0: the cache is none.
void remember_ring(const Step& step, const LayerCache& cache, int window);
void restore_ring(const LayerCache& cache, int window, int kept);

}  // namespace ktinject::attention
