// A token's attention with the products around it as one call of the pool.
#pragma once

#include <span>

#include "attention/attend_all.hpp"
#include "attention/tasks.hpp"
#include "gemm/linear.hpp"
#include "runtime/stages.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::attention {

// Of one row: in = W x, all in fp32, and what is made of attention's results.
struct Around {
  std::span<const gemm::Linear::Product> in;
  const float* x;
  gemm::Linear::Product out;
};

// The products of x; begin(), then before(index) for index < items; attention, whose results are `sum`; end(), and the
// product of that: one after the other, begin() and end() on any one thread. See attend_all() for the rest. In one
// call if nothing of that is too small for the pool.
template <class Of, class Before, class Begin, class End>
void attend_in_one_call(const Around& around, const gemm::StepOps& ops, const Over& over, DType dtype, float* sum,
                        Of&& of, int items, Before&& before, Begin&& begin, End&& end) {
  using gemm::Linear;
  const bool are_alike = Linear::together(around.in) == around.in.size();
  if (!are_alike) Linear::forward(around.in, around.x, DType::f32, 1);
  bool is_done = false;
  {
    const runtime::Session session;
    runtime::ThreadPool& workers = *session;
    AttendTasks tasks(workers, ops, over, dtype, sum, of);
    const Linear::Tasks out(workers, std::span(&around.out, 1), DType::f32, 1, 1);
    is_done = workers.threads() > 1 && !tasks.is_small() && tasks.tasks_merge() && !out.is_small();
    if (is_done) {
      auto prepare = in_parts(workers, items, before, begin);
      auto multiply = out.stage([&] {
        end();
        out.convert(sum, 0, 0);
      });
      if (are_alike) {
        const Linear::Tasks in(workers, around.in, DType::f32, 1);
        runtime::run_stages(workers, in.stage([&] { in.convert(around.x, 0, 0); }), prepare, tasks.stage(), multiply);
      } else {
        runtime::run_stages(workers, prepare, tasks.stage(), multiply);
      }
    }
  }
  if (is_done) return;
  if (are_alike) Linear::forward(around.in, around.x, DType::f32, 1);
  begin();
  attend_all(ops, over, dtype, sum, of, items, before);
  end();
  Linear::forward(std::span(&around.out, 1), sum, DType::f32, 1);
}

}  // namespace ktinject::attention
