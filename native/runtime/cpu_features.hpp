// What this CPU may be asked to do: CPUID says what is built in, XCR0 what the kernel saves on a context switch, and
// for AMX the process has to ask for permission first.
#pragma once

#include <cstdint>
#include <string>

namespace ktinject::runtime {

// Bits of an ISA mask. A kernel states what it needs; it runs where all its bits are set.
enum Isa : uint32_t {
  kAvx2 = 1u << 0,
  kFma = 1u << 1,
  kF16c = 1u << 2,
  kAvxVnni = 1u << 3,
  kAvx512f = 1u << 4,
  kAvx512bw = 1u << 5,
  kAvx512vl = 1u << 6,
  kAvx512dq = 1u << 7,
  kAvx512Bf16 = 1u << 8,
  kAvx512Vnni = 1u << 9,
  kAvx512Fp16 = 1u << 10,
  kAmxTile = 1u << 11,
  kAmxBf16 = 1u << 12,
  kAmxInt8 = 1u << 13,
};

struct IsaName {
  Isa bit;
  const char* name;
};

inline constexpr IsaName kIsaNames[] = {
    {kAvx2, "avx2"},
    {kFma, "fma"},
    {kF16c, "f16c"},
    {kAvxVnni, "avx_vnni"},
    {kAvx512f, "avx512f"},
    {kAvx512bw, "avx512bw"},
    {kAvx512vl, "avx512vl"},
    {kAvx512dq, "avx512dq"},
    {kAvx512Bf16, "avx512_bf16"},
    {kAvx512Vnni, "avx512_vnni"},
    {kAvx512Fp16, "avx512_fp16"},
    {kAmxTile, "amx_tile"},
    {kAmxBf16, "amx_bf16"},
    {kAmxInt8, "amx_int8"},
};

// The names of these bits, with `between` between two.
std::string names_of(uint32_t isa, const char* between);

// The bits that this process may use: those that were detected, less what restrict_cpu() leaves out.
uint32_t cpu_features();

// What the CPU and the operating system have, detected once a process.
uint32_t detected_features();

// From now on cpu_features() has none but these bits.
void restrict_cpu(uint32_t allowed);

// Whether a thread may wait for a write to a cache line (umwait).
bool has_waitpkg();

// "granted", "absent" or "refused: <why>".
const std::string& amx_permission();

}  // namespace ktinject::runtime
