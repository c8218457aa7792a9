// The tests of native/runtime alone, which take seconds to build: pool_test [rounds of short-lived pools]
#include <cstdlib>
#include <exception>

#include "native_test.hpp"

using namespace ktinject::runtime;

int main(int argc, char** argv) {
  const bool forks = std::getenv("KTINJECT_TEST_NO_FORKS") == nullptr;
  try {
    test_pool_without_memory(), test_scratch(), test_denormals(), test_room(), test_fetch(), test_stages();
    test_turns(forks), test_cores(), test_memory(), test_last_news(), test_trace();
    test_teardown(argc > 1 ? std::atoi(argv[1]) : 5000);
  } catch (const std::exception& error) {
    check(false, error.what());
  }
  set_threads(1);
  return report("pool");
}
