#include "attention/cached.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/recurrent.hpp"
#include "attention/tasks.hpp"

namespace ktinject::attention {
namespace {

std::string shown(const std::vector<int>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

}  // namespace

void expect(const gemm::Linear* linear, int out, const char* name) {
  if (linear == nullptr || linear->config().out_features != out)
    throw std::invalid_argument(std::string(name) + ": expected " + std::to_string(out) + " outputs");
}

Places places_of(const LayerCache& cache, const Step& step, int row, int heads, int key_size, int value_size,
                 int window, int prompt) {
  auto refuse = [](const std::string& what) { throw std::invalid_argument("cache: " + what); };
  auto is = [&](const Cached& one, int width) {
    return one.dtype == step.dtype && one.shape.size() == 4 && one.shape[0] == step.together() &&
           one.shape[1] == heads && one.shape[2] == cache.first.shape[2] && one.shape[3] == width;
  };
  if (!is(cache.first, key_size) || !is(cache.second, value_size)) {
    const std::string rows = "[" + std::to_string(step.together()) + ", " + std::to_string(heads) + ", n, ";
    refuse("found " + shown(cache.first.shape) + " and " + shown(cache.second.shape) + "; expected " + rows +
           std::to_string(key_size) + "] and " + rows + std::to_string(value_size) + "] of the model's dtype");
  }
  const int capacity = cache.first.shape[2];
  if (window > 0 && prompt == 0 && capacity > window)
    refuse("found " + std::to_string(capacity) + " places for a window of " + std::to_string(window));
  const int position = step.position_of(row);
  if (position >= capacity && (window == 0 || capacity < prompt + window))
    refuse("position " + std::to_string(position) + " of a cache of " + std::to_string(capacity));
  if (window == 0 || position < prompt) return {capacity, position, position + 1};
  return {capacity, prompt + (position - prompt) % window, std::min(position + 1, prompt + window)};
}

void multiply_by_gate(float* sum, int values, float* gate, int gates, bool has_softplus, const Step& step) {
  const gemm::StepOps& ops = gemm::step_ops();
  const int all = step.batch * gates, share = values / gates, count = all * share;  // values that a gate is of
  ops.round(gate, all, step.dtype);
  if (has_softplus) {
    for (int i = 0; i < all; ++i) gate[i] = softplus(gate[i]);
  } else {
    ops.sigmoid(gate, all);
  }
  ops.round(gate, all, step.dtype);
  for (int i = 0; i < count; ++i) sum[i] *= gate[i / share];
  ops.round(sum, count, step.dtype);
}

}  // namespace ktinject::attention
