// Floats below the least normal one, with which a CPU computes some forty times more slowly than with others. States
// that fade come to them.
#pragma once

#include <immintrin.h>

namespace ktinject::runtime {

// While one lives, results of its thread that would be denormal are zero, or count as numbers. Whatever computes for a
// layer has them as zero: workers always, a caller for the length of its call. So a result is the same whichever thread
// computes it. Denormal operands are taken as they are: small halves are widened by way of them.
class Denormals {
 public:
  static constexpr unsigned kFlushToZero = 0x8000;  // of MXCSR

  enum Kind { kZero, kCount };
  explicit Denormals(Kind kind) : before_(_mm_getcsr()) {
    _mm_setcsr(kind == kZero ? before_ | kFlushToZero : before_ & ~kFlushToZero);
  }
  ~Denormals() { _mm_setcsr(before_); }
  Denormals(const Denormals&) = delete;
  Denormals& operator=(const Denormals&) = delete;

 private:
  const unsigned before_;
};

}  // namespace ktinject::runtime
