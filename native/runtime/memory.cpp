#include "runtime/memory.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace ktinject::runtime {

Block::Block(size_t bytes) {
  if (bytes == 0) return;
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t align = bytes >= kHuge ? kHuge : 4096;
  // One alignment unit too much, so that an aligned start always lies inside; untouched pages cost nothing.
  mapped_ = bytes + align;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    mapped_ = 0;
    throw std::bad_alloc();
  }
  const auto start = (reinterpret_cast<uintptr_t>(mapping_) + align - 1) / align * align;
  data_ = reinterpret_cast<std::byte*>(start);
  size_ = bytes;
  if (align == kHuge) madvise(data_, bytes, MADV_HUGEPAGE);  // advice: refused on kernels without huge pages
}

Block::~Block() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

}  // namespace ktinject::runtime
