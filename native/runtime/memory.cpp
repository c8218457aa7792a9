#include "runtime/memory.hpp"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/system_files.hpp"

namespace ktinject::runtime {
namespace {

constexpr size_t kPage = 4096;
// Smaller blocks are not looked at: to ask takes a tenth of a millisecond.
constexpr size_t kLookedAt = size_t{64} << 20;
constexpr double kMib = 1 << 20;

// Of all blocks, but for what was released of them: a release is not taken back where its block ends, so that this may
// be too small, and nothing is refused that fits.
std::atomic<int64_t> reserved{0};

// The number in the first line that starts so, of a file of /proc or /sys; -1 where there is none.
long long number_in(const std::string& path, const char* prefix = "") {
  const std::string line = first_line(path, prefix);
  const size_t at = line.find_first_of("0123456789", std::strlen(prefix));
  return at == std::string::npos ? -1 : std::atoll(line.c_str() + at);
}

// What is left of a limit once what is used has gone off. The page cache counts as used, but gives way.
void take_cgroup(Headroom& room, const std::string& limit, const std::string& used, const std::string& stat,
                 size_t swap) {
  const long long most = number_in(limit), now = std::max(0LL, number_in(used));
  if (most < 0 || most >= 1LL << 60) return;  // version 1 writes "no limit" as a number of 63 bits
  const long long cache =
      std::max(0LL, number_in(stat, "active_file ")) + std::max(0LL, number_in(stat, "inactive_file "));
  const size_t left = static_cast<size_t>(std::max(0LL, most - std::max(0LL, now - cache))) + swap;
  if (left < room.bytes) room = {left, "the cgroup's memory limit"};
}

// Bytes of blocks that were promised and not yet written to, at least. Other memory of the process may hide some.
size_t promised() {
  const std::string status = "/proc/self/status";
  const long long resident = std::max(0LL, number_in(status, "RssAnon:")) + std::max(0LL, number_in(status, "VmSwap:"));
  return static_cast<size_t>(std::max<int64_t>(0, reserved.load() - resident * 1024));
}

}  // namespace

Headroom memory_headroom(const std::string& root) {
  Headroom room{SIZE_MAX, "nothing"};
  const std::string meminfo = root + "/proc/meminfo";
  const long long available = number_in(meminfo, "MemAvailable:");
  const auto swap = static_cast<size_t>(std::max(0LL, number_in(meminfo, "SwapFree:"))) * 1024;
  if (available >= 0) room = {static_cast<size_t>(available) * 1024 + swap, "the memory and swap that are free"};
  for (const std::string& folder : cgroup_folders(root)) {
    const long long most_swap = number_in(folder + "/memory.swap.max");  // -1: none, or "max"
    const size_t own_swap = most_swap < 0 ? swap : std::min(swap, static_cast<size_t>(most_swap));
    take_cgroup(room, folder + "/memory.max", folder + "/memory.current", folder + "/memory.stat", own_swap);
  }
  const std::string v1 = root + "/sys/fs/cgroup/memory/memory.";
  take_cgroup(room, v1 + "limit_in_bytes", v1 + "usage_in_bytes", v1 + "stat", swap);
  return room;
}

Headroom address_headroom() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {SIZE_MAX, "nothing"};
  const auto taken =
      static_cast<size_t>(std::max(0LL, number_in("/proc/self/statm"))) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return {limit.rlim_cur > taken ? limit.rlim_cur - taken : 0, "RLIMIT_AS (ulimit -v)"};
}

NoRoom::NoRoom(size_t wanted, size_t promised, const Headroom& room) noexcept {
  char beside[96] = "";
  if (promised > 0)
    std::snprintf(beside, sizeof beside, " beside %.1f MiB that were asked for before and are not filled yet",
                  static_cast<double>(promised) / kMib);
  std::snprintf(text_, sizeof text_, "%.1f MiB were asked for%s, and %s leave%s %.1f MiB",
                static_cast<double>(wanted) / kMib, beside, room.limit,
                std::strstr(room.limit, " are ") == nullptr ? "s" : "", static_cast<double>(room.bytes) / kMib);
}

NoRoom::NoRoom(size_t wanted, int error) noexcept {
  const Headroom room = address_headroom();
  if (room.bytes < wanted)
    std::snprintf(text_, sizeof text_, "%.1f MiB were asked for, and %s leaves %.1f MiB",
                  static_cast<double>(wanted) / kMib, room.limit, static_cast<double>(room.bytes) / kMib);
  else
    std::snprintf(text_, sizeof text_, "the system refused %.1f MiB: %s", static_cast<double>(wanted) / kMib,
                  std::strerror(error));
}

Block::Block(size_t bytes) {
  if (bytes == 0) return;
  if (bytes >= kLookedAt) {
    const Headroom room = memory_headroom();
    const size_t before = promised();
    if (room.bytes < before || room.bytes - before < bytes) throw NoRoom(bytes, before, room);
  }
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t align = bytes >= kHuge ? kHuge : kPage;
  // One alignment unit too much, so that an aligned start always lies inside; untouched pages cost nothing.
  mapped_ = bytes + align;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    const int error = errno;
    mapping_ = nullptr;
    throw NoRoom(std::exchange(mapped_, 0), error);
  }
  reserved += static_cast<int64_t>(mapped_);
  const auto start = (reinterpret_cast<uintptr_t>(mapping_) + align - 1) / align * align;
  data_ = reinterpret_cast<std::byte*>(start);
  size_ = bytes;
  if (align == kHuge) madvise(data_, bytes, MADV_HUGEPAGE);  // advice: refused on kernels without huge pages
}

void Block::release(std::byte* from, size_t bytes) noexcept {
  const auto start = (reinterpret_cast<uintptr_t>(from) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(from) + bytes) / kPage * kPage;
  if (start >= end) return;
  madvise(reinterpret_cast<void*>(start), end - start, MADV_DONTNEED);
  reserved -= static_cast<int64_t>(end - start);
}

size_t Block::released(size_t bytes) { return bytes < 2 * kPage ? 0 : (bytes - kPage) / kPage * kPage; }

Block::~Block() {
  if (mapping_ == nullptr) return;
  munmap(mapping_, mapped_);
  reserved -= static_cast<int64_t>(mapped_);
}

}  // namespace ktinject::runtime
