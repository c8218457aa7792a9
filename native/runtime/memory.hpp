// Big, long-lived, 64-byte aligned blocks: packed weights and the workspace.
#pragma once

#include <cstddef>
#include <utility>

namespace ktinject::runtime {

// Anonymous zeroed pages, given back on destruction. Blocks of 2 MiB and more are aligned to 2 MiB and ask for huge
// pages; where the system has none to give they stay on 4 KiB pages.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes);  // throws std::bad_alloc
  ~Block();
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    swap(other);
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  // What lies wholly within [from, from + bytes) of whole pages goes back to the system, and is zero when it is read
  // again. Nothing else may use it meanwhile.
  static void release(std::byte* from, size_t bytes) noexcept;
  // What release() gives back at least, wherever the bytes begin.
  static size_t released(size_t bytes);
  void swap(Block& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(mapping_, other.mapping_);
    std::swap(mapped_, other.mapped_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace ktinject::runtime
