#include "runtime/trace.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace ktinject::runtime {
namespace {

constexpr size_t kSpans = 1 << 16;

std::atomic<bool> recording{false};
std::atomic<size_t> recorded{0};

// Never freed: a span may end while another thread stops.
Span* spans() {
  static Span* const memory = new Span[kSpans];
  return memory;
}

int64_t now_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

void trace_start() {
  std::fill_n(spans(), kSpans, Span{});
  recorded.store(0);
  recording.store(true);
}

std::vector<Span> trace_stop() {
  recording.store(false);
  const Span* first = spans();
  std::vector<Span> found(first, first + std::min(recorded.load(), kSpans));
  std::erase_if(found, [](const Span& span) { return span.end_ns == 0; });
  return found;
}

TraceSpan::TraceSpan(const void* owner, int tokens) {
  if (recording.load(std::memory_order_relaxed)) span_ = {now_ns(), 0, owner, tokens};
}

TraceSpan::~TraceSpan() {
  if (span_.begin_ns == 0 || !recording.load(std::memory_order_relaxed)) return;
  const size_t index = recorded.fetch_add(1);
  if (index >= kSpans) return;
  span_.end_ns = now_ns();
  spans()[index] = span_;
}

}  // namespace ktinject::runtime
