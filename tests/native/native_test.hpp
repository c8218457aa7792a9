// What the files of native_test share.
#pragma once

#include <stdexcept>
#include <string>

#include "runtime/thread_pool.hpp"

// Counts a check, and prints `what` where it does not hold.
bool check(bool holds, const std::string& what);

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call on the shared pool, as `layer` and `forward` make them.
template <class Task>
void call(int tasks, Task&& task) {
  const ktinject::runtime::Session workers;
  workers->parallel_for(tasks, task);
}

template <class Error, class Call>
bool throws(Call&& call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void test_arrivals();
void test_dispatcher();
void test_plan();
void test_outlier_rows();
void test_room();
void test_fetch();
void test_stages();
void test_turns(bool forks);
