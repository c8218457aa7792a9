#include "runtime/trace.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>

namespace ktinject::runtime {
namespace {

constexpr size_t kSpans = 1 << 16;

std::atomic<bool> recording{false};

// A lock, since a span may end while another thread starts or stops: it is taken once a layer, and only where something
// is recorded. Neither is ever freed, for spans may end while the process does.
std::mutex& mutex() {
  static auto* const made = new std::mutex;
  return *made;
}
std::vector<Span>& spans() {
  static auto* const made = new std::vector<Span>;
  return *made;
}

int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

void trace_start() {
  const std::lock_guard lock(mutex());
  spans().clear();
  spans().reserve(kSpans);
  recording.store(true);
}

std::vector<Span> trace_stop() {
  const std::lock_guard lock(mutex());
  recording.store(false);
  return std::exchange(spans(), {});
}

TraceSpan::TraceSpan(const void* owner, int tokens) {
  if (recording.load(std::memory_order_relaxed)) span_ = {now_ns(), 0, owner, tokens};
}

TraceSpan::~TraceSpan() {
  if (span_.begin_ns == 0 || !recording.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(mutex());
  if (!recording.load(std::memory_order_relaxed) || spans().size() == kSpans) return;
  span_.end_ns = now_ns();
  spans().push_back(span_);
}

}  // namespace ktinject::runtime
