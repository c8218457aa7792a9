// What counts checks, and lets allocations fail.
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>

#include "native_test.hpp"

std::atomic<int> allocations_left{-1};
std::atomic<const void*> must_stay{nullptr};
std::atomic<bool> was_freed{false};

namespace {

bool fails_now() {
  int left = allocations_left.load(std::memory_order_relaxed);
  while (left >= 0 && !allocations_left.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0;
}

}  // namespace

// Of the core: memory by `new`, and pages (CMakeLists.txt has calls of mmap come here).
void* operator new(size_t bytes) {
  void* const memory = fails_now() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t bytes, std::align_val_t align) {
  const auto to = static_cast<size_t>(align);
  void* const memory = fails_now() ? nullptr : std::aligned_alloc(to, (bytes + to - 1) / to * to);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return fails_now() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new[](size_t bytes) { return operator new(bytes); }
void* operator new[](size_t bytes, std::align_val_t align) { return operator new(bytes, align); }
void operator delete(void* memory) noexcept {
  if (memory != nullptr && memory == must_stay.load(std::memory_order_relaxed)) was_freed = true;
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { operator delete(memory); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete[](void* memory, size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { operator delete(memory); }

extern "C" {
void* __real_mmap(void*, size_t, int, int, int, off_t);
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  if (!fails_now()) return __real_mmap(at, bytes, protection, flags, file, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}
}

namespace {

int failures = 0;
int checks = 0;

}  // namespace

bool check(bool holds, const std::string& what) {
  ++checks;
  if (!holds) {
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
    std::fflush(stdout);
  }
  return holds;
}

int report(const std::string& mode) {
  std::printf("%s: %d checks, %d failed\n", mode.c_str(), checks, failures);
  std::fflush(stdout);
  return failures == 0 ? 0 : 1;
}

bool has_failed() { return failures > 0; }
