// Big, long-lived, 64-byte aligned blocks: packed weights and the workspace.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace ktinject::runtime {

// What this process can still take, by the limit that leaves least.
struct Headroom {
  size_t bytes;
  const char* limit;
};
// Of memory that can be written to: the system's, swap included, and the cgroups'. `root` is where proc/ and sys/ are
// looked for; where they do not say, all there is.
Headroom memory_headroom(const std::string& root = "");
// Of addresses: RLIMIT_AS.
Headroom address_headroom();

// Memory that is refused: what() says how much, and which limit leaves less.
class NoRoom : public std::bad_alloc {
 public:
  NoRoom(size_t wanted, size_t promised, const Headroom& room) noexcept;
  NoRoom(size_t wanted, int error) noexcept;
  const char* what() const noexcept override { return text_; }

 private:
  char text_[320];
};

// Anonymous zeroed pages, given back on destruction. Blocks of 2 MiB and more are aligned to 2 MiB and ask for huge
// pages; where the system has none to give they stay on 4 KiB pages. The system promises pages that it does not have,
// and ends a process that writes to them; so a large block is refused that does not fit beside what was promised
// before.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes);  // throws NoRoom
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
