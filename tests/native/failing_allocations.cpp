// To be preloaded into a process: the n-th allocation that the native core makes itself fails, by `new` or as pages.
//   arm(n)   from now on; n from 0
//   disarm() returns how many were left: below 0 if one has failed
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<int> left{-1};
std::atomic<bool> armed{false};
uintptr_t first = 0, last = 0;  // of the native core

int find_native(dl_phdr_info* library, size_t, void*) {
  if (std::strstr(library->dlpi_name, "/_native.") == nullptr) return 0;
  first = last = library->dlpi_addr;
  for (int i = 0; i < library->dlpi_phnum; ++i)
    if (library->dlpi_phdr[i].p_type == PT_LOAD)
      last = std::max<uintptr_t>(last, first + library->dlpi_phdr[i].p_vaddr + library->dlpi_phdr[i].p_memsz);
  return 1;
}

bool fails(const void* caller) {
  const auto at = reinterpret_cast<uintptr_t>(caller);
  return armed.load(std::memory_order_relaxed) && first <= at && at < last && left.fetch_sub(1) == 0;
}

}  // namespace

extern "C" void arm(int n) {
  dl_iterate_phdr(find_native, nullptr);
  left = n;
  armed = true;
}

extern "C" int disarm() {
  armed = false;
  return left;
}

extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  static const auto real = reinterpret_cast<decltype(&mmap)>(dlsym(RTLD_NEXT, "mmap"));
  if (!fails(__builtin_return_address(0))) return real(at, bytes, protection, flags, file, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

void* operator new(size_t bytes) {
  void* const memory = fails(__builtin_return_address(0)) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t bytes, std::align_val_t align) {
  const auto to = static_cast<size_t>(align);
  void* const memory =
      fails(__builtin_return_address(0)) ? nullptr : std::aligned_alloc(to, (bytes + to - 1) / to * to);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
