// When the CPU's experts computed, for `ktinject bench`: spans in fixed memory, recorded only between start and stop.
#pragma once

#include <cstdint>
#include <vector>

namespace ktinject::runtime {

struct Span {
  int64_t begin_ns = 0;  // of the system clock, which torch's profiler uses, too
  int64_t end_ns = 0;
  const void* owner = nullptr;
  int tokens = 0;
};

// Forgets what was recorded and records from now on; the first 65,536 spans are kept.
void trace_start();
// Stops and gives the spans, in the order in which they ended.
std::vector<Span> trace_stop();

// Records its own lifetime. Costs one load where nothing is recorded.
class TraceSpan {
 public:
  TraceSpan(const void* owner, int tokens);
  ~TraceSpan();
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Span span_;
};

}  // namespace ktinject::runtime
