#include "attention/recurrent.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "attention/tasks.hpp"
#include "runtime/scratch.hpp"

namespace ktinject::attention {
namespace {

// Of a task of the convolution.
constexpr int kChannels = 512;

size_t bytes_of(const Cached& cached) {
  size_t bytes = dtype_bytes(cached.dtype);
  for (const int size : cached.shape) bytes *= static_cast<size_t>(size);
  return bytes;
}

}  // namespace

void expect(const Cached& cached, DType dtype, const std::vector<int>& shape, const char* name) {
  if (cached.dtype == dtype && cached.shape == shape) return;
  std::string wanted;
  for (const int size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  throw std::invalid_argument(std::string("cache: expected ") + name + " [" + wanted + "]");
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void ChannelConvolution::advance(runtime::ThreadPool& workers, float* mixed, int rows, const Cached& inputs) const {
  each(workers, product(rows, channels, taps) < kSerialProducts / 4, tasks(rows),
       [&](int index, int) { run(index, mixed, inputs); });
}

int ChannelConvolution::tasks(int rows) const { return rows * ((channels + kChannels - 1) / kChannels); }

void ChannelConvolution::run(int task, float* mixed, const Cached& inputs) const {
  const size_t width = dtype_bytes(inputs.dtype);
  const int blocks = tasks(1), row = task / blocks, first = task % blocks * kChannels,
            count = std::min(kChannels, channels - first);
  const size_t at = product(first, taps), state = product(row, channels, taps) + at;
  if (is_wide && inputs.dtype != DType::f32)
    return advance_wide(mixed + product(row, channels) + first, static_cast<std::byte*>(inputs.data) + state * width,
                        first, count, inputs.dtype);
  const auto* biases = static_cast<const std::byte*>(bias);
  gemm::step_ops().convolve(
      mixed + product(row, channels) + first, static_cast<std::byte*>(inputs.data) + state * width,
      static_cast<const std::byte*>(weight) + at * width,
      biases == nullptr ? nullptr : biases + static_cast<size_t>(first) * width, count, taps, has_silu, inputs.dtype);
}

void ChannelConvolution::advance_wide(float* mixed, std::byte* held, int first, int count, DType dtype) const {
  const gemm::StepOps& ops = gemm::step_ops();
  const size_t width = dtype_bytes(dtype), tokens = static_cast<size_t>(taps);
  const auto *weights = static_cast<const float*>(weight) + product(first, taps),
             *biases = static_cast<const float*>(bias);
  const runtime::Scratch memory(product(count, taps) + static_cast<size_t>(count));
  float *inputs = memory, *gates = memory + product(count, taps);
  for (int c = 0; c < count; ++c) {
    std::byte* own = held + static_cast<size_t>(c) * tokens * width;
    std::memmove(own, own + width, (tokens - 1) * width);
    ops.store(mixed + c, 1, dtype, own + (tokens - 1) * width);
  }
  ops.widen(held, count * taps, dtype, inputs);
  for (int c = 0; c < count; ++c) {
    float sum = biases == nullptr ? 0.0f : biases[first + c];
    for (int t = 0; t < taps; ++t) sum += weights[c * taps + t] * inputs[c * taps + t];
    mixed[c] = gates[c] = sum;
  }
  if (has_silu) {
    ops.sigmoid(gates, count);
    for (int c = 0; c < count; ++c) mixed[c] *= gates[c];
  }
  ops.round(mixed, count, dtype);
}

void remember(const LayerCache& cache, int tokens, std::initializer_list<std::pair<const float*, int>> arrays) {
  Undo& undo = *cache.undo;
  undo.rows = tokens;
  undo.inputs.clear();
  for (const auto& [values, count] : arrays)
    undo.inputs.insert(undo.inputs.end(), values, values + product(tokens, count));
  undo.first.resize(bytes_of(cache.first));
  std::memcpy(undo.first.data(), cache.first.data, undo.first.size());
  undo.second.clear();
  if (cache.second.data == cache.first.data) return;  // inputs of a convolution alone
  undo.second.resize(bytes_of(cache.second));
  const int heads = cache.second.shape[1];
  const size_t size = undo.second.size() / static_cast<size_t>(heads);
  const runtime::Session session;
  each(*session, undo.second.size() < kSerialProducts, heads, [&](int h, int) {
    const size_t begin = static_cast<size_t>(h) * size;
    std::memcpy(undo.second.data() + begin, static_cast<std::byte*>(cache.second.data) + begin, size);
  });
}

void restore(const LayerCache& cache) {
  const Undo& undo = *cache.undo;
  std::memcpy(cache.first.data, undo.first.data(), undo.first.size());
  if (!undo.second.empty()) std::memcpy(cache.second.data, undo.second.data(), undo.second.size());
}

}  // namespace ktinject::attention
