// What the files of native_test share.
#pragma once

#include <atomic>
#include <stdexcept>
#include <string>

#include "runtime/thread_pool.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool is_sanitized = true;
#else
inline constexpr bool is_sanitized = false;
#endif

// Counts a check, and prints `what` where it does not hold.
bool check(bool holds, const std::string& what);
bool has_failed();
// Prints how many checks failed; gives the exit status.
int report(const std::string& mode);

// Allocations until one fails, by `new` or as pages; none fails while it is negative.
extern std::atomic<int> allocations_left;

// Memory that is watched, and whether it was freed.
extern std::atomic<const void*> must_stay;
extern std::atomic<bool> was_freed;

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
void test_pool_without_memory();
void test_last_news();
void test_teardown(int rounds);
void test_writes();
void test_kernels_at_the_edge(int rounds, unsigned seed);
void test_scratch();
void test_denormals();
void test_cores();
void test_memory();
void test_trace();
