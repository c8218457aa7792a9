#include "gemm/ceilings.hpp"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "gemm/kernels/tiles.hpp"
#include "runtime/cpu_features.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::gemm {

using namespace runtime;  // the bits of instruction sets
namespace {

using Clock = std::chrono::steady_clock;

// Seconds that the pool takes for `tasks` tasks. Handed out like the tasks of a layer, so that a thread that shares its
// core, with another thread or with another guest of the host, does less and holds up nobody: equal shares would make
// the slowest thread the machine's ceiling, and layers would exceed it.
template <class Body>
double seconds_for(runtime::ThreadPool& workers, int tasks, Body body) {
  const auto start = Clock::now();
  workers.parallel_for(tasks, [&](int index, int) { body(index); });
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Bits that are ordinary numbers as bf16, fp32 and int8. Units fed with zeros draw less power and run faster.
constexpr uint32_t kOperand = 0x3f923f8b;

struct Unit {
  const char* name;
  uint32_t isa;
  double operations;  // per iteration
  void (*run)(long iterations);
};

// Through the wrappers of the kernels.
void run_amx(long iterations, void (*product)(bool)) {
  alignas(64) uint32_t operand[256];
  for (uint32_t i = 0; i < 256; ++i) operand[i] = kOperand ^ (i * 0x9e3779b1u & 0x807f807fu);
  HardwareTiles::configure(TileShapes(16, 16));
  HardwareTiles::zero(true);
  HardwareTiles::load_a0(operand);
  HardwareTiles::load_a1(operand);
  HardwareTiles::load_b(operand, operand);
  for (long i = 0; i < iterations; ++i) product(true);
  HardwareTiles::release();
}
void run_amx_bf16(long iterations) { run_amx(iterations, HardwareTiles::bf16); }
void run_amx_int8(long iterations) { run_amx(iterations, HardwareTiles::unsigned_signed); }

// Twelve independent chains cover latency times throughput of every dot product unit so far. In assembly, because
// compilers keep such a set of accumulators in memory.
#define KTINJECT_STEP(INSTRUCTION, REGISTER, CHAIN) \
  INSTRUCTION " %%" REGISTER "15, %%" REGISTER "15, %%" REGISTER #CHAIN "\n\t"
#define KTINJECT_CHAINS(INSTRUCTION, REGISTER)                                                                         \
  __asm__ volatile("vzeroall\n\tvpbroadcastd %0, %%" REGISTER "15" ::"m"(kOperand)                                     \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", \
                     "xmm12", "xmm13", "xmm14", "xmm15");                                                              \
  for (long i = 0; i < iterations; ++i)                                                                                \
    __asm__ volatile(KTINJECT_STEP(INSTRUCTION, REGISTER, 0) KTINJECT_STEP(INSTRUCTION, REGISTER, 1)                   \
                         KTINJECT_STEP(INSTRUCTION, REGISTER, 2) KTINJECT_STEP(INSTRUCTION, REGISTER, 3)               \
                             KTINJECT_STEP(INSTRUCTION, REGISTER, 4) KTINJECT_STEP(INSTRUCTION, REGISTER, 5)           \
                                 KTINJECT_STEP(INSTRUCTION, REGISTER, 6) KTINJECT_STEP(INSTRUCTION, REGISTER, 7)       \
                                     KTINJECT_STEP(INSTRUCTION, REGISTER, 8) KTINJECT_STEP(INSTRUCTION, REGISTER, 9)   \
                                         KTINJECT_STEP(INSTRUCTION, REGISTER, 10)                                      \
                                             KTINJECT_STEP(INSTRUCTION, REGISTER, 11)::                                \
                                                 : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",     \
                                                   "xmm8", "xmm9", "xmm10", "xmm11");

void run_avx512_bf16(long iterations) { KTINJECT_CHAINS("vdpbf16ps", "zmm") }
void run_avx512_int8(long iterations) { KTINJECT_CHAINS("vpdpbusd", "zmm") }
void run_avxvnni_int8(long iterations) { KTINJECT_CHAINS("%{vex%} vpdpbusd", "ymm") }
void run_avx2_fp32(long iterations) { KTINJECT_CHAINS("vfmadd231ps", "ymm") }

constexpr uint32_t kAvx512 = kAvx512f | kAvx512bw | kAvx512vl;
constexpr Unit kUnits[] = {
    {"amx_bf16", kAmxTile | kAmxBf16, 4.0 * 2 * 16 * 16 * 32, run_amx_bf16},
    {"amx_int8", kAmxTile | kAmxInt8, 4.0 * 2 * 16 * 16 * 64, run_amx_int8},
    {"avx512_bf16", kAvx512 | kAvx512Bf16, 12.0 * 2 * 32, run_avx512_bf16},
    {"avx512_int8", kAvx512 | kAvx512Vnni, 12.0 * 2 * 64, run_avx512_int8},
    {"avxvnni_int8", kAvxVnni | kAvx2, 12.0 * 2 * 32, run_avxvnni_int8},
    {"avx2_fp32", kAvx2 | kFma, 12.0 * 2 * 8, run_avx2_fp32},
};

bool available(const Unit& unit) { return (unit.isa & ~cpu_features()) == 0; }

constexpr size_t kPiece = size_t{1} << 20;  // read by one thread at a time

uint64_t read_64(const std::byte* from, size_t ahead) {
  const auto* p = reinterpret_cast<const uint64_t*>(from);
  uint64_t sum[8] = {};
  for (size_t i = 0; i < kPiece / 8; i += 8) {
    if (ahead != 0) _mm_prefetch(reinterpret_cast<const char*>(p + i) + ahead, _MM_HINT_T0);
    for (size_t j = 0; j < 8; ++j) sum[j] ^= p[i + j];
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

#pragma GCC push_options
#pragma GCC target("avx512f")
uint64_t read_512(const std::byte* from, size_t ahead) {
  __m512i a = _mm512_setzero_si512(), b = a;
  for (size_t i = 0; i < kPiece; i += 128) {
    if (ahead != 0) {
      _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(from + i + ahead + 64), _MM_HINT_T0);
    }
    a = _mm512_xor_si512(a, _mm512_load_si512(from + i));
    b = _mm512_xor_si512(b, _mm512_load_si512(from + i + 64));
  }
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_xor_si512(a, b)));
}
#pragma GCC pop_options

}  // namespace

double read_bandwidth(size_t bytes_per_thread) {
  const runtime::Session workers;
  const int pieces = static_cast<int>(std::max<size_t>(1, bytes_per_thread / kPiece)) * workers->threads();
  runtime::Block block(static_cast<size_t>(pieces) * kPiece);
  auto piece = [&](int index) { return block.data() + static_cast<size_t>(index) * kPiece; };
  seconds_for(*workers, pieces, [&](int index) { std::memset(piece(index), index + 1, kPiece); });
  const bool wide = (cpu_features() & kAvx512f) != 0;
  std::atomic<uint64_t> sink{0};
  double best = 0;
  // One is best on one machine, one on another: the processor's own prefetchers alone, or with some help.
  for (int round = 0; round < 3; ++round)
    for (const size_t ahead : {size_t{0}, size_t{2048}, size_t{8192}}) {
      const double seconds = seconds_for(*workers, pieces, [&](int index) {
        sink.fetch_add((wide ? read_512 : read_64)(piece(index), ahead), std::memory_order_relaxed);
      });
      best = std::max(best, static_cast<double>(block.size()) / seconds);
    }
  return best;
}

double empty_call_us(int calls, double pause_us, bool everyone) {
  const runtime::Session workers;
  const int threads = workers->threads();
  std::vector<double> us;
  for (int call = 0; call < std::max(1, calls); ++call) {
    const auto resume = Clock::now() + std::chrono::duration<double, std::micro>(pause_us);
    while (Clock::now() < resume) _mm_pause();
    std::atomic<int> arrived{0};
    const auto start = Clock::now();
    if (everyone)
      workers->parallel_for(threads, [&](int, int) {
        arrived.fetch_add(1);
        for (int turn = 0; arrived.load() < threads; ++turn) runtime::ThreadPool::relax(turn);
      });
    else workers->parallel_for(threads, [](int, int) {});
    us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::nth_element(us.begin(), us.begin() + static_cast<ptrdiff_t>(us.size() / 2), us.end());
  return us[us.size() / 2];
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
    const runtime::Session workers;
    constexpr int kTasksPerThread = 64;
    const int tasks = kTasksPerThread * workers->threads();
    const double pilot = seconds_for(*workers, tasks, [&](int) { unit.run(400); });
    const auto iterations = static_cast<long>(400 * 0.1 / std::max(pilot, 1e-6));  // about 0.1 s
    double best = 0;
    for (int round = 0; round < 4; ++round) {
      const double seconds = seconds_for(*workers, tasks, [&](int) { unit.run(iterations); });
      best = std::max(best, unit.operations * static_cast<double>(iterations) * tasks / seconds);
    }
    return best;
  }
  throw std::invalid_argument("multiply unit '" + name + "' is not one this CPU has");
}

}  // namespace ktinject::gemm
