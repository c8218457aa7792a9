// A token's attention, or what takes its place, with the products around it as one call of the pool.
#pragma once

#include <optional>
#include <span>

#include "attention/attend_all.hpp"
#include "attention/attention.hpp"
#include "attention/tasks.hpp"
#include "gemm/linear.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// What a layer ends with, of one row: the product `out` of `sum`, rounded; and what follows.
struct Ending {
  const float* sum;
  gemm::Linear::Product out;
  DType dtype;
  Following* following;
};

// Its products of x in fp32, and its end.
struct Around {
  std::span<const gemm::Linear::Product> in;
  const float* x;
  Ending ending;
};

// The place that the product at a layer's end has, see gemm::Linear::Tasks; those before it have the places before.
inline constexpr int kPlace = 3;

// The last stage of a layer's call: its output is rounded; and what follows, if anything does. Within a Session.
class Closing {
 public:
  Closing(runtime::ThreadPool& workers, Following* following, float* results, int count, DType dtype)
      : following_(following), results_(results), count_(count), dtype_(dtype) {
    if (following == nullptr || following->linear == nullptr) return;
    const gemm::Linear::Product product{following->linear, following->y};
    product_.emplace(workers, std::span(&product, 1), DType::f32, 1, kPlace + 1);
  }

  auto stage() {
    const int tasks = following_ == nullptr ? 1 : product_ ? product_->count() : following_->count;
    return runtime::Stage{tasks, [this] { begin(); }, [this](int index, int worker) { run(index, worker); },
                          [this](int index) { return reads(index); }};
  }

 private:
  void begin() {
    gemm::step_ops().round(results_, count_, dtype_);
    if (following_ == nullptr) return;
    const float* x = following_->begin();
    if (product_) product_->convert(x, 0, 0);
    following_->is_done = true;  // if the call throws, so does the layer
  }
  void run(int index, int worker) {
    if (product_) product_->run(index, worker);
    else if (following_ != nullptr) following_->run(index);
  }
  std::span<const std::byte> reads(int index) {
    if (product_) return product_->reads(index);
    return following_ == nullptr ? std::span<const std::byte>() : following_->reads(index);
  }

  Following* const following_;
  float* const results_;
  const int count_;
  const DType dtype_;
  std::optional<gemm::Linear::Tasks> product_;
};

// `stages`, then end(), which makes ending.sum of what they leave, on any one thread, and the layer's end, as one call
// of the pool. False, and nothing is done, where waking workers would cost more. Within a Session.
template <class End, class... Stages>
bool run_in_one_call(runtime::ThreadPool& workers, const Ending& ending, End&& end, Stages&&... stages) {
  const gemm::Linear::Tasks out(workers, std::span(&ending.out, 1), DType::f32, 1, kPlace);
  if (workers.threads() == 1 || out.is_small()) return false;
  auto multiply = out.stage([&] {
    end();
    out.convert(ending.sum, 0, 0);
  });
  Closing closing(workers, ending.following, static_cast<float*>(ending.out.y),
                  ending.out.linear->config().out_features, ending.dtype);
  runtime::run_stages(workers, std::forward<Stages>(stages)..., multiply, closing.stage());
  return true;
}

// The products of x; begin(), then before(index) for index < items; attention, whose results are `sum`; end(), and the
// product of that: one after the other, begin() and end() on any one thread. See attend_all() for the rest. In one
// call, with what follows, if nothing of that is too small for the pool.
template <class Of, class Before, class Begin, class End>
void attend_in_one_call(const Around& around, const gemm::StepOps& ops, const Over& over, float* sum, Of&& of,
                        int items, Before&& before, Begin&& begin, End&& end) {
  using gemm::Linear;
  const auto& [in, x, ending] = around;
  bool is_done = false;
  {
    const runtime::Session session;
    runtime::ThreadPool& workers = *session;
    AttendTasks tasks(workers, ops, over, ending.dtype, sum, of);
    const Linear::Tasks products(workers, in, DType::f32, 1);
    if (!tasks.is_small() && tasks.tasks_merge() && !products.is_small())
      is_done = run_in_one_call(workers, ending, end, products.stage([&] { products.convert(around.x, 0, 0); }),
                                in_parts(workers, items, before, begin), tasks.stage());
  }
  if (is_done) return;
  Linear::forward(in, x, DType::f32, 1);
  begin();
  attend_all(ops, over, ending.dtype, sum, of, items, before);
  end();
  Linear::forward(std::span(&ending.out, 1), ending.sum, DType::f32, 1);
  ops.round(static_cast<float*>(ending.out.y), ending.out.linear->config().out_features, ending.dtype);
}

}  // namespace ktinject::attention
