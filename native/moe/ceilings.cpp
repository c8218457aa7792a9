#include "moe/ceilings.hpp"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "moe/kernels/tiles.hpp"
#include "runtime/cpu_features.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject {
namespace {

using Clock = std::chrono::steady_clock;

// Seconds until the last thread is done with `body`, all starting together.
template <class Body>
double together(ThreadPool& workers, Body body) {
  const int threads = workers.threads();
  std::atomic<int> ready{0};
  std::vector<double> seconds(static_cast<size_t>(threads));
  workers.parallel_for(threads, [&](int index, int) {
    ready.fetch_add(1);
    while (ready.load() < threads) _mm_pause();  // one task a thread: nobody passes until everybody has one
    const auto start = Clock::now();
    body(index);
    seconds[static_cast<size_t>(index)] = std::chrono::duration<double>(Clock::now() - start).count();
  });
  return *std::max_element(seconds.begin(), seconds.end());
}

struct Unit {
  const char* name;
  uint32_t isa;
  double operations;  // per iteration
  void (*run)(long iterations);
};

// Through the wrappers of the kernels; zeros in the tiles.
void run_amx(long iterations, void (*product)(bool)) {
  HardwareTiles::configure(TileShapes(16, 16));
  for (long i = 0; i < iterations; ++i) product(true);
  HardwareTiles::release();
}
void run_amx_bf16(long iterations) { run_amx(iterations, HardwareTiles::bf16); }
void run_amx_int8(long iterations) { run_amx(iterations, HardwareTiles::unsigned_signed); }

// Twelve independent chains cover latency times throughput of every dot product unit so far. In assembly, because
// compilers keep such a set of accumulators in memory.
#define KTINJECT_STEP(INSTRUCTION, REGISTER, CHAIN) \
  INSTRUCTION " %%" REGISTER "15, %%" REGISTER "15, %%" REGISTER #CHAIN "\n\t"
#define KTINJECT_CHAINS(INSTRUCTION, REGISTER)                                                                       \
  __asm__ volatile("vzeroall" ::                                                                                     \
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",    \
                         "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                                               \
  for (long i = 0; i < iterations; ++i)                                                                              \
    __asm__ volatile(KTINJECT_STEP(INSTRUCTION, REGISTER, 0) KTINJECT_STEP(INSTRUCTION, REGISTER, 1)                 \
                         KTINJECT_STEP(INSTRUCTION, REGISTER, 2) KTINJECT_STEP(INSTRUCTION, REGISTER, 3)             \
                             KTINJECT_STEP(INSTRUCTION, REGISTER, 4) KTINJECT_STEP(INSTRUCTION, REGISTER, 5)         \
                                 KTINJECT_STEP(INSTRUCTION, REGISTER, 6) KTINJECT_STEP(INSTRUCTION, REGISTER, 7)     \
                                     KTINJECT_STEP(INSTRUCTION, REGISTER, 8) KTINJECT_STEP(INSTRUCTION, REGISTER, 9) \
                                         KTINJECT_STEP(INSTRUCTION, REGISTER, 10)                                    \
                                             KTINJECT_STEP(INSTRUCTION, REGISTER, 11)::                              \
                                                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",   \
                                                   "xmm8", "xmm9", "xmm10", "xmm11");

void run_avx512_bf16(long iterations) { KTINJECT_CHAINS("vdpbf16ps", "zmm") }
void run_avx512_int8(long iterations) { KTINJECT_CHAINS("vpdpbusd", "zmm") }
void run_avx2_fp32(long iterations) { KTINJECT_CHAINS("vfmadd231ps", "ymm") }

constexpr uint32_t kAvx512 = kAvx512f | kAvx512bw | kAvx512vl;
constexpr Unit kUnits[] = {
    {"amx_bf16", kAmxTile | kAmxBf16, 4.0 * 2 * 16 * 16 * 32, run_amx_bf16},
    {"amx_int8", kAmxTile | kAmxInt8, 4.0 * 2 * 16 * 16 * 64, run_amx_int8},
    {"avx512_bf16", kAvx512 | kAvx512Bf16, 12.0 * 2 * 32, run_avx512_bf16},
    {"avx512_int8", kAvx512 | kAvx512Vnni, 12.0 * 2 * 64, run_avx512_int8},
    {"avx2_fp32", kAvx2 | kFma, 12.0 * 2 * 8, run_avx2_fp32},
};

bool available(const Unit& unit) { return (unit.isa & ~cpu_features()) == 0; }

}  // namespace

double read_bandwidth(size_t bytes_per_thread) {
  const auto workers = pool();
  const auto session = workers->session();
  const int threads = workers->threads();
  std::vector<Block> blocks;
  for (int i = 0; i < threads; ++i) blocks.emplace_back(bytes_per_thread);
  std::atomic<uint64_t> sink{0};
  auto read = [&](int index) {
    const auto* p = reinterpret_cast<const uint64_t*>(blocks[static_cast<size_t>(index)].data());
    uint64_t sum[16] = {};
    for (size_t i = 0; i + 16 <= bytes_per_thread / 8; i += 16) {
      __builtin_prefetch(p + i + 512);
      __builtin_prefetch(p + i + 520);
      for (size_t j = 0; j < 16; ++j) sum[j] ^= p[i + j];
    }
    for (const uint64_t value : sum) sink.fetch_add(value);
  };
  together(*workers,
           [&](int index) { std::memset(blocks[static_cast<size_t>(index)].data(), index + 1, bytes_per_thread); });
  double best = 0;
  for (int round = 0; round < 4; ++round)
    best = std::max(best, static_cast<double>(bytes_per_thread) * threads / together(*workers, read));
  return best;
}

std::vector<std::string> multiply_units() {
  std::vector<std::string> names;
  for (const Unit& unit : kUnits)
    if (available(unit)) names.emplace_back(unit.name);
  return names;
}

double multiply_rate(const std::string& name) {
  for (const Unit& unit : kUnits) {
    if (unit.name != name || !available(unit)) continue;
    const auto workers = pool();
    const auto session = workers->session();
    const double pilot = together(*workers, [&](int) { unit.run(20000); });
    const auto iterations = static_cast<long>(20000 * 0.2 / std::max(pilot, 1e-6));  // about 0.2 s
    double best = 0;
    for (int round = 0; round < 3; ++round) {
      const double seconds = together(*workers, [&](int) { unit.run(iterations); });
      best = std::max(best, unit.operations * static_cast<double>(iterations) * workers->threads() / seconds);
    }
    return best;
  }
  throw std::invalid_argument("multiply unit '" + name + "' is not one this CPU has");
}

}  // namespace ktinject
