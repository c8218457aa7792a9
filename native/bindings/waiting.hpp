// Calls that wait: for their turn at the pool, for the dispatcher, for a GPU. All of them let go of the GIL. Another
// thread's computation may be what they wait for, and that needs the GIL now and then, to look for Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include "runtime/denormals.hpp"
#include "runtime/waiting.hpp"

namespace ktinject {

// Python's handlers run, and what they raise ends the computation.
void raise_pending_signal();

// The call guard of whatever computes or waits for those who do.
class WithoutGil {
  nanobind::gil_scoped_release release_;
  runtime::Interruptible interruptible_{raise_pending_signal};
  runtime::Denormals denormals_{runtime::Denormals::kZero};
};

// T, whose destructor waits. Bound functions that are lambdas take this as `self`: Python does not know T.
class GilLetGo {
 protected:
  ~GilLetGo() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  PyThreadState* state_ = nullptr;
};
template <class T>
class EndsWithoutGil : GilLetGo, public T {
 public:
  using T::T;
  ~EndsWithoutGil() { state_ = PyEval_SaveThread(); }
};

}  // namespace ktinject
