// A token's attention with the products around it as one call of the pool.
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

// Of one row: in = W x, all in fp32, and what is made of attention's results, which is rounded; and what follows.
struct Around {
  std::span<const gemm::Linear::Product> in;
  const float* x;
  gemm::Linear::Product out;
  Following* following;
};

// The last stage of a layer's call: its output is rounded; and what follows, if anything does. Within a Session.
class Closing {
 public:
  Closing(runtime::ThreadPool& workers, Following* following, float* results, int count, DType dtype)
      : following_(following), results_(results), count_(count), dtype_(dtype) {
    if (following == nullptr || following->linear == nullptr) return;
    const gemm::Linear::Product product{following->linear, following->y};
    product_.emplace(workers, std::span(&product, 1), DType::f32, 1, 2);
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

// The products of x; begin(), then before(index) for index < items; attention, whose results are `sum`; end(), and the
// product of that: one after the other, begin() and end() on any one thread. See attend_all() for the rest. In one
// call, with what follows, if nothing of that is too small for the pool.
template <class Of, class Before, class Begin, class End>
void attend_in_one_call(const Around& around, const gemm::StepOps& ops, const Over& over, DType dtype, float* sum,
                        Of&& of, int items, Before&& before, Begin&& begin, End&& end) {
  using gemm::Linear;
  auto* const results = static_cast<float*>(around.out.y);
  const int count = around.out.linear->config().out_features;
  bool is_done = false;
  {
    const runtime::Session session;
    runtime::ThreadPool& workers = *session;
    AttendTasks tasks(workers, ops, over, dtype, sum, of);
    const Linear::Tasks in(workers, around.in, DType::f32, 1),
        out(workers, std::span(&around.out, 1), DType::f32, 1, 1);
    is_done = workers.threads() > 1 && !tasks.is_small() && tasks.tasks_merge() && !in.is_small() && !out.is_small();
    if (is_done) {
      Closing closing(workers, around.following, results, count, dtype);
      runtime::run_stages(workers, in.stage([&] { in.convert(around.x, 0, 0); }),
                          in_parts(workers, items, before, begin), tasks.stage(), out.stage([&] {
                            end();
                            out.convert(sum, 0, 0);
                          }),
                          closing.stage());
    }
  }
  if (is_done) return;
  Linear::forward(around.in, around.x, DType::f32, 1);
  begin();
  attend_all(ops, over, dtype, sum, of, items, before);
  end();
  Linear::forward(std::span(&around.out, 1), sum, DType::f32, 1);
  ops.round(results, count, dtype);
}

}  // namespace ktinject::attention
