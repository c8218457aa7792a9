// Caches of layers with a window: rings, in which position p lies at place p % window.
#pragma once

#include "attention/attention.hpp"

namespace ktinject::attention {

// The mask [window] of a row in the order of a ring that is full. mask: null where there is no padding. chunked: what
// is before the row's chunk is not seen, of chunks that begin at its first token.
void mask_of_ring(const uint8_t* mask, int position, int window, bool chunked, uint8_t* out);

// The same of a ring behind the tokens of a prompt, [prompt + window].
void mask_behind_prompt(const uint8_t* mask, int position, int window, int prompt, uint8_t* out);

// Of a ring that is full, what the consecutive tokens of a step overwrite, and that for those that are not kept. window
// 0: the cache is none. prompt: tokens that lie before the ring.
void remember_ring(const Step& step, const LayerCache& cache, int window, int prompt = 0);
void restore_ring(const LayerCache& cache, int window, int kept);

}  // namespace ktinject::attention
