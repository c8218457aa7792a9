// What layers share whose tokens leave states of fixed size: a convolution over the last tokens, and states that a step
// of several tokens may take back.
#pragma once

#include <initializer_list>
#include <utility>
#include <vector>

#include "attention/attention.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// Throws std::invalid_argument for another tensor than one of this dtype and shape.
void expect(const Cached& cached, DType dtype, const std::vector<int>& shape, const char* name);

float softplus(float x);

// Of each channel with its own last inputs.
struct ChannelConvolution {
  const void* weight = nullptr;  // [channels, taps] of the model's dtype
  const void* bias = nullptr;    // [channels], or null
  int channels = 0, taps = 0;
  bool has_silu = true;
  bool is_wide = false;  // weight and bias are of fp32, and what comes out is rounded once, behind silu

  // Of rows beside each other: mixed [rows, channels] becomes what comes out, rounded, and the cache's inputs [rows,
  // channels, taps] move on by it.
  void advance(runtime::ThreadPool& workers, float* mixed, int rows, const Cached& inputs) const;
  // The same as tasks of some channels of a row, in any order.
  int tasks(int rows) const;
  void run(int task, float* mixed, const Cached& inputs) const;
  // Of one row, behind begin().
  template <class Begin>
  auto stage(float* mixed, const Cached& inputs, Begin begin) const {
    return runtime::Stage{tasks(1), begin, [this, mixed, &inputs](int task, int) { run(task, mixed, inputs); },
                          runtime::kReadsNothing};
  }

 private:
  // The same for some channels from `first` on, whose last inputs are `held`; of a wide one.
  void advance_wide(float* mixed, std::byte* held, int first, int count, DType dtype) const;
};

// Before a step of consecutive tokens: what it writes over, and what follows from its tokens, as arrays [tokens,
// count].
void remember(const LayerCache& cache, int tokens, std::initializer_list<std::pair<const float*, int>> arrays);
// What the cache was before that step.
void restore(const LayerCache& cache);

}  // namespace ktinject::attention
