#include "runtime/memory.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace ktinject::runtime {
namespace {

constexpr size_t kPage = 4096;

}  // namespace

Block::Block(size_t bytes) {
  if (bytes == 0) return;
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t align = bytes >= kHuge ? kHuge : kPage;
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

void Block::release(std::byte* from, size_t bytes) noexcept {
  const auto start = (reinterpret_cast<uintptr_t>(from) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(from) + bytes) / kPage * kPage;
  if (start < end) madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
}

size_t Block::released(size_t bytes) { return bytes < 2 * kPage ? 0 : (bytes - kPage) / kPage * kPage; }

Block::~Block() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

}  // namespace ktinject::runtime
