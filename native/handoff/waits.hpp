// How long kernels wait for the CPU, and how.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/host_device.hpp"

namespace ktinject::handoff {

// Of a kernel on a device whose driver ends those that run for long, with all that the process has there: after two
// seconds on Windows, some more elsewhere.
constexpr double kLongestKernelSeconds = 1.5;

constexpr double kernel_wait_seconds(double answer_timeout, bool ends_long_kernels) {
  return ends_long_kernels ? std::min(answer_timeout, kLongestKernelSeconds) : answer_timeout;
}

// A wait begins with a quiet part, in which it reads one word of the host over the bus and not the whole answer. An
// answer that comes in this part costs one more way over the bus, so the part should end before: it is at most three
// quarters of the last wait, becomes longer in small steps, and after an answer that came in it half of that wait.
constexpr uint32_t kMostQuietNs = 100'000'000;

KTINJECT_HOST_DEVICE constexpr uint32_t next_quiet_ns(uint32_t quiet, uint64_t waited, bool came_in_it) {
  const uint64_t most = waited / 4 * 3;
  const uint64_t next = came_in_it ? waited / 2 : quiet < most ? quiet + (most - quiet + 15) / 16 : most;
  return next < kMostQuietNs ? static_cast<uint32_t>(next) : kMostQuietNs;
}

}  // namespace ktinject::handoff
