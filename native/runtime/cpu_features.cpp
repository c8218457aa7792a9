#include "runtime/cpu_features.hpp"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

namespace ktinject::runtime {
namespace {

// arch_prctl(2): tile data is state component 18, and is off until a process asks for it.
constexpr int kArchReqXcompPerm = 0x1023;
constexpr int kXfeatureXtileData = 18;

struct Detected {
  uint32_t features = 0;
  std::string amx = "absent";
};

uint64_t read_xcr0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

Detected detect() {
  Detected found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool osxsave = c & (1u << 27);
  if (!osxsave) return found;
  const uint64_t xcr0 = read_xcr0();
  const bool ymm = (xcr0 & 0x6) == 0x6;
  const bool zmm = (xcr0 & 0xe6) == 0xe6;
  const bool tiles = (xcr0 & 0x60000) == 0x60000;
  const bool fma = c & (1u << 12), f16c = c & (1u << 29);

  uint32_t b7 = 0, c7 = 0, d7 = 0, a71 = 0, unused = 0;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return found;
  const uint32_t subleaves = a;
  if (subleaves >= 1) __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);

  auto set = [&](Isa bit, bool on) { found.features |= on ? bit : 0u; };
  set(kAvx2, ymm && (b7 & (1u << 5)));
  set(kFma, ymm && fma);
  set(kF16c, ymm && f16c);
  set(kAvxVnni, ymm && (a71 & (1u << 4)));
  set(kAvx512f, zmm && (b7 & (1u << 16)));
  set(kAvx512dq, zmm && (b7 & (1u << 17)));
  set(kAvx512bw, zmm && (b7 & (1u << 30)));
  set(kAvx512vl, zmm && (b7 & (1u << 31)));
  set(kAvx512Vnni, zmm && (c7 & (1u << 11)));
  set(kAvx512Bf16, zmm && (a71 & (1u << 5)));
  set(kAvx512Fp16, zmm && (d7 & (1u << 23)));

  if (d7 & (1u << 24)) {
    if (!tiles) {
      found.amx = "refused: the operating system does not save tile registers (XCR0)";
    } else if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureXtileData) != 0) {
      found.amx = std::string("refused: arch_prctl(ARCH_REQ_XCOMP_PERM): ") + std::strerror(errno);
    } else {
      found.amx = "granted";
      set(kAmxTile, true);
      set(kAmxBf16, d7 & (1u << 22));
      set(kAmxInt8, d7 & (1u << 25));
    }
  }
  return found;
}

const Detected& detected() {
  static const Detected found = detect();
  return found;
}

std::atomic<uint32_t> allowed_features{~0u};

}  // namespace

std::string names_of(uint32_t isa, const char* between) {
  std::string names;
  for (const IsaName& one : kIsaNames)
    if (isa & one.bit) names += (names.empty() ? "" : between) + std::string(one.name);
  return names;
}

uint32_t cpu_features() { return detected().features & allowed_features.load(std::memory_order_relaxed); }
uint32_t detected_features() { return detected().features; }
void restrict_cpu(uint32_t allowed) { allowed_features.store(allowed, std::memory_order_relaxed); }
bool has_waitpkg() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & (1u << 5));
}
const std::string& amx_permission() { return detected().amx; }

}  // namespace ktinject::runtime
