#include "attention/ring.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

#include "attention/tasks.hpp"

namespace ktinject::attention {
namespace {

// Keys and values of the last step's tokens from `first` on, between the ring and what is remembered of it.
void copy_ring(const LayerCache& cache, int window, int first, bool to_undo) {
  Undo& undo = *cache.undo;
  const int groups = cache.first.shape[1], capacity = cache.first.shape[2], begin = undo.position - undo.prompt;
  for (auto [cached, kept] : {std::tuple{&cache.first, &undo.first}, std::tuple{&cache.second, &undo.second}}) {
    const size_t bytes = static_cast<size_t>(cached->shape[3]) * dtype_bytes(cached->dtype);
    kept->resize(product(undo.rows, groups) * bytes);
    for (int row = first; row < undo.rows; ++row)
      for (int g = 0; g < groups; ++g) {
        auto* here = static_cast<std::byte*>(cached->data) +
                     (product(g, capacity) + static_cast<size_t>(undo.prompt + (begin + row) % window)) * bytes;
        std::byte* there = kept->data() + product(row * groups + g, 1) * bytes;
        if (to_undo) std::copy(here, here + bytes, there);
        else std::copy(there, there + bytes, here);
      }
  }
}

}  // namespace

void mask_of_ring(const uint8_t* mask, int position, int window, bool chunked, uint8_t* out) {
  const int later = position % window + 1;  // places from the first on hold the latest positions
  if (mask == nullptr) {
    std::fill(out, out + window, uint8_t{1});
  } else {
    const uint8_t* latest = mask + position + 1 - later;
    std::copy(latest, latest + later, out);
    std::copy(latest - (window - later), latest, out + later);
  }
  if (!chunked) return;
  int first = 0;
  while (mask != nullptr && first < position && mask[first] == 0) ++first;
  const int seen = (position - first) % window + 1;  // the latest positions
  for (int back = seen; back < window; ++back) out[(position - back) % window] = 0;
}

void mask_behind_prompt(const uint8_t* mask, int position, int window, int prompt, uint8_t* out) {
  std::copy(mask, mask + prompt, out);
  mask_of_ring(mask + prompt, position - prompt, window, false, out + prompt);
}

void remember_ring(const Step& step, const LayerCache& cache, int window, int prompt) {
  Undo& undo = *cache.undo;
  undo.position = step.position;
  undo.prompt = prompt;
  undo.rows = 0;
  if (window == 0 || step.position - prompt + step.batch <= window) return;
  if (step.batch > window)
    throw std::invalid_argument("attention: a step of " + std::to_string(step.batch) + " tokens in a window of " +
                                std::to_string(window));
  undo.rows = step.batch;
  copy_ring(cache, window, 0, true);
}

void restore_ring(const LayerCache& cache, int window, int kept) {
  if (cache.undo->rows > 0) copy_ring(cache, window, kept, false);
}

}  // namespace ktinject::attention
