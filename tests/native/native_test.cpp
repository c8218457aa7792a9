// The native core by itself, for what Python is in the way of: sanitizers, and a machine that is booted for one test.
//
//   native_test forward      every kernel of the table against the reference kernel of its format, for 1 to 4 nodes
//   native_test plan         that tasks cover each row and panel once, wait for earlier ones only, and fit their memory
//   native_test pool         exceptions, cancelling, waiting tasks, turns, forks, many CPUs and nodes, memory
//   native_test teardown N   N pools that end at once
//   native_test writes       weights that are refused leave those that are there, and half of them compute nothing
//   native_test fuzz N SEED  every kernel N times, in buffers of exactly the size that it needs
//   native_test exit         kernels are chosen after all static objects have gone
//   native_test dispatcher   late entries of rings and of the host, whose owner has gone; naps that end; sleepers
//   native_test sharing      several threads on one object, which others change
//   native_test allocations  the n-th allocation fails, for every n
//   native_test churn N      N times: submit, cancel, fork; memory, threads and open files must stay as they were
//   native_test placement    on a machine with two nodes and a third without CPUs: where each page and worker is
//
// As process 1 it mounts /proc and /sys, runs `placement` and switches the machine off.
#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "decode/choose.hpp"
#include "decode/decoder.hpp"
#include "gemm/k_quants.hpp"
#include "gemm/linear.hpp"
#include "handoff/dispatcher.hpp"
#include "moe/experts.hpp"
#include "native_test.hpp"
#include "runtime/denormals.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"

using namespace ktinject;
using namespace ktinject::runtime;
using namespace ktinject::gemm;
using namespace ktinject::moe;
using namespace ktinject::attention;
using namespace ktinject::decode;
using namespace ktinject::handoff;

namespace {

struct Problem {
  int experts = 5;
  int hidden = 64;
  int inner = 48;
  int top_k = 2;
  Format format = Format::bf16;
  int group_size = 0;
  bool symmetric = true;
  bool has_bias = false;
  std::string kernel = "auto";
  int nodes = 0;
};

std::unique_ptr<Experts> layer(const Problem& problem) {
  ExpertsConfig config;
  config.experts = problem.experts;
  config.hidden_size = problem.hidden;
  config.intermediate_size = problem.inner;
  config.format = problem.format;
  config.down_format = problem.format;
  config.group_size = problem.group_size;
  config.symmetric = problem.symmetric;
  config.has_bias = problem.has_bias;
  config.kernel = problem.kernel;
  config.nodes = problem.nodes;
  config.activation.gate_max = config.activation.up_limit = std::numeric_limits<float>::infinity();
  auto made = std::make_unique<Experts>(config);
  made->allocate();
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (int expert = 0; expert < problem.experts; ++expert)
    for (const Projection projection : {Projection::gate, Projection::up, Projection::down}) {
      const bool down = projection == Projection::down;
      const int n = down ? problem.hidden : problem.inner, k = down ? problem.inner : problem.hidden;
      if (gemm::is_k_quant(problem.format)) {  // blocks of a file; with these bits alone, scales in fp16 are below 1
        const size_t row =
            static_cast<size_t>(k / gemm::k_file_inputs(problem.format)) * gemm::k_file_bytes(problem.format);
        std::vector<uint8_t> blocks(row * static_cast<size_t>(n));
        for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(random() & 0x3b);
        made->load_blocks(projection, expert, {blocks.data(), n, row, static_cast<ptrdiff_t>(row)});
        continue;
      }
      std::vector<float> weight(static_cast<size_t>(n) * static_cast<size_t>(k));
      for (float& value : weight) value = normal(random) / std::sqrt(static_cast<float>(k));
      made->load(projection, expert, {weight.data(), DType::f32, n, k, k, 1});
      if (problem.has_bias) made->load_bias(projection, expert, {weight.data(), DType::f32, n, 1, 1, 1});
    }
  check(made->absent(1).empty(), "everything is loaded");
  return made;
}

struct Input {
  std::vector<float> x;
  std::vector<int> ids;
  std::vector<float> weights;
};

Input input(const Problem& problem, int tokens) {
  std::mt19937 random(static_cast<unsigned>(tokens));
  std::normal_distribution<float> normal;
  Input made;
  for (int i = 0; i < tokens * problem.hidden; ++i) made.x.push_back(normal(random));
  for (int i = 0; i < tokens * problem.top_k; ++i) {
    made.ids.push_back(static_cast<int>(random() % static_cast<unsigned>(problem.experts + 1)) - (random() % 8 == 0));
    made.weights.push_back(static_cast<float>(random() % 100) / 100);
  }
  return made;
}

std::vector<float> forward(const Experts& experts, const Input& in, int tokens, int top_k) {
  std::vector<float> out(in.x.size(), NAN);
  experts.forward(in.x.data(), DType::f32, in.ids.data(), in.weights.data(), tokens, top_k, out.data());
  return out;
}

double relative_error(const std::vector<float>& found, const std::vector<float>& want) {
  double difference = 0, size = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += std::pow(static_cast<double>(found[i]) - want[i], 2);
    size += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(difference / size);
}

void test_forward() {
  set_threads(3, true);
  for (const Kernel& kernel : kernel_table()) {
    if (!why_unavailable(kernel).empty()) continue;
    double worst = 0;
    using Shapes = std::vector<std::pair<int, int>>;
    const bool has_blocks = gemm::is_k_quant(kernel.format);  // of up to 256 inputs
    for (const auto& [hidden, inner] :
         has_blocks ? Shapes{{256, 512}, {512, 256}} : Shapes{{64, 48}, {100, 33}, {33, 160}})
      for (const bool symmetric : {true, false}) {
        if (!symmetric && kernel.format != Format::int4) continue;
        Problem problem;
        problem.hidden = hidden;
        problem.inner = inner;
        problem.format = kernel.format;
        problem.group_size = kernel.format == Format::int4 ? 32 : 0;
        problem.symmetric = symmetric;
        problem.has_bias = inner % 2 == 1;
        problem.kernel = std::string("reference_") + format_name(kernel.format);
        set_nodes(0);
        const auto reference = layer(problem);
        problem.kernel = kernel.name;
        std::vector<std::unique_ptr<Experts>> cut;
        for (int nodes = 1; nodes <= 4; ++nodes) {
          set_nodes(nodes);
          cut.push_back(layer(problem));
        }
        for (const int tokens : {0, 1, 2, 5, 37}) {
          const Input in = input(problem, tokens);
          const std::vector<float> want = forward(*reference, in, tokens, problem.top_k);
          std::vector<float> first;
          for (int nodes = 1; nodes <= 4; ++nodes) {
            set_nodes(nodes);
            const Experts* experts = cut[static_cast<size_t>(nodes - 1)].get();
            const std::vector<float> found = forward(*experts, in, tokens, problem.top_k);
            if (nodes == 1) first = found;
            check(found == first, kernel.name + ": the same bits on several nodes");
          }
          worst = std::max(worst, relative_error(first, want));
        }
      }
    std::printf("%-20s worst %.1e\n", kernel.name.c_str(), worst);
    // An intermediate may fall to the other side of a rounding boundary; AMX rounds int4 once more.
    check(worst < 0.03, kernel.name + " agrees with the reference");
  }
  set_nodes(0);
}

bool throws_first(int tasks, int bad) {
  try {
    call(tasks, [&](int index, int) {
      if (index >= bad) throw Fault(std::to_string(index));
    });
  } catch (const Fault&) {
    return true;
  }
  return false;
}

// True if the child's computation gave `want`.
bool child_computes(const Experts& experts, const Input& in, int tokens, int top_k, const std::vector<float>& want) {
  const pid_t child = fork();
  if (child == 0) _exit(forward(experts, in, tokens, top_k) == want ? 0 : 1);
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void test_pool(bool forks) {
  for (const int threads : {1, 2, 5, 40}) {
    set_threads(threads, true);
    for (const int tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      call(tasks, [&](int index, int) { ++runs[static_cast<size_t>(index)]; });
      check(std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; }), "every task runs once");
    }
    for (int i = 0; i < 50; ++i) check(throws_first(100, i), "an exception comes back");
    // Every task waits for all of the stage before, in lists for two nodes of which a worker may see but one.
    for (int i = 0; i < 50; ++i) {
      set_nodes(2);
      const Session workers;
      std::atomic<int> left{64}, wrong{0};
      const int lists[] = {64, 64}, limits[] = {32, 32};
      workers->parallel_lists(lists, [&](int, int index, int worker) {
        if (index < 32) {
          --left;
          return;
        }
        if (!workers->await([&] { return left == 0; }, limits, worker, [] { return false; }) || left != 0) ++wrong;
      });
      check(wrong == 0, "a task that waits goes on when what it waits for is done");
    }
    set_nodes(0);
  }
  set_threads(4, true);
  Problem problem;
  problem.format = Format::int8;
  const auto a = layer(problem), b = layer(problem);
  const Input in = input(problem, 20);
  const std::vector<float> want = forward(*a, in, 20, 2);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (const Experts* experts : {a.get(), a.get(), b.get()})
    callers.emplace_back([&, experts] {
      for (int i = 0; i < 100; ++i)
        if (forward(*experts, in, 20, 2) != want) ++wrong;
    });
  for (auto& caller : callers) caller.join();
  check(wrong == 0, "two threads on one layer and one on another");
  if (forks)
    for (int i = 0; i < 20; ++i) check(child_computes(*a, in, 20, 2, want), "a forked child computes");
  check(!place_on_node(a.get(), sizeof *a, 1000).empty(), "a node that is not there is no place");
}

// One layer of a model, and what chooses the next token.
struct Step {
  static constexpr int kHidden = 64, kHeads = 4, kSize = 16, kPlaces = 8;

  std::vector<std::unique_ptr<Linear>> linears;
  std::unique_ptr<Experts> experts;
  std::unique_ptr<GroupedAttention> attention;
  std::unique_ptr<Mixture> mixture;
  Decoder decoder{kHidden, DType::f32};
  std::vector<float> ones = std::vector<float>(kHidden, 1.0f);

  const Linear& linear(int out, int in) {
    auto& made = linears.emplace_back(std::make_unique<Linear>(LinearConfig{out, in, Format::bf16, 0, true, false}));
    made->allocate();
    std::vector<float> weight(static_cast<size_t>(out) * static_cast<size_t>(in));
    for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 17) / 17 - 0.4f;
    made->load({weight.data(), DType::f32, out, in, in, 1});
    return *made;
  }

  Step() {
    Problem problem;
    experts = layer(problem);
    attention = std::make_unique<GroupedAttention>(GroupedAttentionConfig{&linear(kHidden, kHidden),
                                                                          &linear(kHidden, kHidden),
                                                                          &linear(kHidden, kHidden),
                                                                          &linear(kHidden, kHidden),
                                                                          {},
                                                                          {},
                                                                          kHeads,
                                                                          kHeads,
                                                                          kSize,
                                                                          0.25f});
    RouterConfig router;
    router.linear = &linear(problem.experts, kHidden);
    router.top_k = 2;
    mixture = std::make_unique<Mixture>(router, *experts, nullptr);
    const Norm norm{ones.data(), kHidden, 1e-6f};
    LayerConfig layer;
    layer.before_attention = layer.before_feed_forward = norm;
    layer.attention = attention.get();
    layer.feed_forward = mixture.get();
    decoder.add(layer);
  }

  // What a step gives for one token, and the token chosen from that.
  std::vector<float> operator()() const {
    std::vector<float> x(kHidden), y(kHidden), keys(kHeads * kPlaces * kSize, 0.5f), values = keys;
    for (int i = 0; i < kHidden; ++i) x[static_cast<size_t>(i)] = static_cast<float>(i % 7) / 7;
    attention::Step step;
    step.dtype = DType::f32;
    step.position = 3;
    const attention::Cached held{keys.data(), DType::f32, {1, kHeads, kPlaces, kSize}};
    const attention::LayerCache cache{held, {values.data(), held.dtype, held.shape}};
    decoder.forward(x.data(), step, {cache}, 0, 1, {}, nullptr, y.data());
    int64_t token = -1;
    choose_greatest(y.data(), 1, kHidden, &token);
    y.push_back(static_cast<float>(token));
    return y;
  }
};

// From here on this thread's sched_getaffinity says that the machine has more CPUs than fit into `bytes`.
void refuse_masks_of(uint32_t bytes) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_getaffinity, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, bytes, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{6, program};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "masks can be refused");
}

void test_big_machines(bool forks) {
  check(CpuMask({3, 1024, 70000}).cpus() == std::vector<int>{3, 1024, 70000}, "a mask holds any CPU");
  const std::vector<int> cpus = allowed_cpus();
  check(!cpus.empty(), "the CPUs are known");
  if (forks) {
    const pid_t child = fork();
    if (child == 0) {
      refuse_masks_of(1 << 12);
      _exit(!has_failed() && allowed_cpus() == cpus ? 0 : 1);
    }
    int status = 1;
    check(waitpid(child, &status, 0) == child && status == 0, "the CPUs of a machine with 32,768 are known");
  }
  Problem problem;
  problem.inner = 3300;  // panels for all
  set_nodes(1);
  const Input in = input(problem, 5);
  const std::vector<float> want = forward(*layer(problem), in, 5, problem.top_k);
  set_nodes(200);
  check(forward(*layer(problem), in, 5, problem.top_k) == want, "the same bits on 200 nodes");
  set_nodes(0);
}

// Threads that compute on one object while others change it: an answer belongs to what was there before or after.
void test_sharing() {
  set_threads(3, true);
  Problem problem;
  problem.has_bias = true;
  const auto experts = layer(problem);
  experts->repeat(0);
  const Input in = input(problem, 20);
  const std::vector<float> want = forward(*experts, in, 20, problem.top_k);
  const Step step;
  const std::vector<float> want_step = step();
  std::vector<float> weight(static_cast<size_t>(problem.inner) * static_cast<size_t>(problem.hidden));
  experts->unpack(Projection::up, 0, weight.data());
  const Source source{weight.data(), DType::f32, problem.inner, problem.hidden, problem.hidden, 1};
  std::atomic<int> wrong{0};
  const int rounds = is_sanitized ? 30 : 200;
  std::vector<std::thread> threads;
  auto on_a_thread = [&](auto work) {
    threads.emplace_back([&, work] {
      for (int round = 0; round < rounds; ++round)
        if (!work(round)) ++wrong;
    });
  };
  for (int i = 0; i < 2; ++i) {
    on_a_thread([&](int) { return forward(*experts, in, 20, problem.top_k) == want; });
    on_a_thread([&](int) { return step() == want_step; });
  }
  on_a_thread([&](int round) {  // what it loads is there already
    experts->load(Projection::up, round % problem.experts, source);
    experts->repeat(round % problem.experts);
    return throws<std::logic_error>([&] { experts->allocate(); });
  });
  on_a_thread([&](int round) {
    std::vector<float> found(weight.size()), bias(static_cast<size_t>(problem.inner));
    experts->unpack(Projection::up, round % problem.experts, found.data());
    experts->unpack_bias(Projection::up, 0, bias.data());
    experts->load_bias(Projection::up, 0, {bias.data(), DType::f32, problem.inner, 1, 1, 1});
    return found == weight && experts->not_placed().empty();
  });
  on_a_thread([&](int round) {
    const auto others = layer(problem);
    if (round % 10 == 0) set_threads(2 + round / 10 % 3, true);
    others->repeat(0);
    return forward(*others, in, 20, problem.top_k) == want;
  });
  on_a_thread([&](int) {  // spans of the others' calls
    trace_start();
    std::this_thread::yield();
    for (const Span& span : trace_stop())
      if (span.begin_ns == 0 || span.end_ns < span.begin_ns || span.owner == nullptr) return false;
    return true;
  });
  for (auto& thread : threads) thread.join();
  check(wrong == 0, "answers of objects that threads share");
}

struct Usage {
  long resident_kib = 0;
  long threads = 0;
  long files = 0;
};

Usage usage() {
  Usage found;
  std::FILE* status = std::fopen("/proc/self/status", "re");
  char line[256];
  while (std::fgets(line, sizeof line, status) != nullptr) {
    std::sscanf(line, "VmRSS: %ld", &found.resident_kib);
    std::sscanf(line, "Threads: %ld", &found.threads);
  }
  std::fclose(status);
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++found.files;
  closedir(folder);
  return found;
}

void test_churn(int iterations, bool forks) {
  set_threads(4, true);
  Problem problem;
  problem.format = Format::int8;
  problem.hidden = problem.inner = 256;
  const auto experts = layer(problem);
  const Input in = input(problem, 40);
  const std::vector<float> want = forward(*experts, in, 40, 2);
  std::atomic<bool> stop{false};
  std::atomic<int> wanted{0}, sent{0};
  std::thread canceller([&] {
    while (!stop) {
      if (sent < wanted) {
        pool()->cancel();
        ++sent;
      } else std::this_thread::yield();
    }
  });
  int cancelled = 0;
  Usage before;
  for (int i = 0; i < iterations; ++i) {
    if (i == iterations / 10) {
      set_threads(4, true);
      forward(*experts, in, 40, 2);
      before = usage();
    }
    check(forward(*experts, in, 40, 2) == want, "a call gives what it gave");
    ++wanted;
    try {
      while (sent < wanted) check(forward(*experts, in, 40, 2) == want, "a call beside a cancel that missed it");
    } catch (const Cancelled&) {
      ++cancelled;
    }
    while (sent < wanted) std::this_thread::yield();
    check(throws_first(20, i % 20), "an exception comes back");
    if (forks) check(child_computes(*experts, in, 40, 2, want), "a forked child computes");
    if (i % 1000 == 999) {
      set_threads(2 + i / 1000 % 4, true);
      forward(*experts, in, 40, 2);
    }
  }
  set_threads(4, true);
  forward(*experts, in, 40, 2);
  const Usage after = usage();
  stop = true;
  canceller.join();
  std::printf("%d iterations, %d cancelled, %s; resident %ld -> %ld KiB, threads %ld -> %ld, files %ld -> %ld\n",
              iterations, cancelled, forks ? "all with a fork" : "no forks", before.resident_kib, after.resident_kib,
              before.threads, after.threads, before.files, after.files);
  check(cancelled > 0, "some calls were met by their cancel");
  // Sanitizers keep what was freed for a while.
  check(is_sanitized || after.resident_kib < before.resident_kib * 1.02 + 1024, "memory does not grow");
  check(after.threads == before.threads, "no thread is left over");
  check(after.files == before.files, "no file is left open");
}

// `call` with its n-th allocation failing, for n from 1 on, until it needs no more. Each time on a new thread, with a
// new pool: nothing is there from before.
template <class Call>
void fail_each_allocation(const char* what, Call&& call) {
  Usage before;
  int n = 0;
  for (bool failed = true; failed; ++n) {
    std::thread([&] {
      set_threads(3, true);
      allocations_left = n;
      try {
        call();
        failed = allocations_left < 0;  // and was made up for
      } catch (const std::bad_alloc&) {
      }
      allocations_left = -1;
      call();
    }).join();
    if (n == 10) before = usage();
    if (!check(n < 10000, std::string(what) + ": at some time nothing fails any more")) break;
  }
  set_threads(3, true);
  const Usage after = usage();
  std::printf("%s: %d allocations failed; resident %ld -> %ld KiB, threads %ld -> %ld\n", what, n - 1,
              before.resident_kib, after.resident_kib, before.threads, after.threads);
  check(n > 10, std::string(what) + ": some allocations failed");
  check(is_sanitized || after.resident_kib < before.resident_kib * 1.02 + 1024, std::string(what) + ": memory is back");
  check(after.threads <= before.threads, std::string(what) + ": no thread is left over");
}

void test_allocations() {
  Problem problem;
  problem.has_bias = true;
  const Input in = input(problem, 20);
  const auto experts = layer(problem);
  const std::vector<float> want = forward(*experts, in, 20, problem.top_k);
  const Step step;
  const std::vector<float> want_step = step();
  // Failing within `layer`, a check would only print; what is loaded is compared by its answers.
  fail_each_allocation("load", [&] {
    const auto made = layer(problem);
    check(forward(*made, in, 20, problem.top_k) == want, "load: the answer");
  });
  fail_each_allocation("forward",
                       [&] { check(forward(*experts, in, 20, problem.top_k) == want, "forward: the answer"); });
  fail_each_allocation("a decode step", [&] { check(step() == want_step, "a decode step: the answer"); });
}

int node_of_this_cpu() {
  unsigned cpu = 0, node = 0;
  syscall(SYS_getcpu, &cpu, &node, nullptr);
  return static_cast<int>(node);
}

// From here on this thread's mbind fails as it does in a container.
void refuse_mbind() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mbind, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{4, program};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0, "mbind can be refused");
}

void check_placement(const char* title, const Problem& problem, const std::vector<int>& ids) {
  const auto experts = layer(problem);
  check(experts->shards().size() == ids.size(), std::string(title) + ": a shard a node");
  for (size_t i = 0; i < experts->shards().size(); ++i)
    for (const bool down : {false, true}) {
      const Shard::Part& part = down ? experts->shards()[i].down : experts->shards()[i].gate_up;
      size_t here = 0, all = 0;
      for (const PagesOnNode& pages : pages_by_node(part.data.data(), part.data.size(), 1000)) {
        all += pages.pages;
        if (pages.node == ids[i]) here += pages.pages;
      }
      std::printf("%s: %s of node %d: %d panels, %zu of %zu sampled pages there\n", title,
                  down ? "down" : "gate and up", ids[i], part.panels, here, all);
      check(all == 1000 && here == all, std::string(title) + ": all pages of a shard on its node");
    }
  const Session workers;
  std::mutex mutex;
  std::set<int> seen;
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> arrived{0};
    workers->parallel_for(workers->threads(), [&](int, int worker) {
      ++arrived;  // a task each: nobody leaves before everybody has one
      for (int turn = 0; arrived < workers->threads(); ++turn) ThreadPool::relax(turn);
      if (worker == 0) return;  // the caller's thread is not ours to move
      cpu_set_t mask;
      sched_getaffinity(0, sizeof mask, &mask);
      const Node& node = workers->nodes()[static_cast<size_t>(workers->node_of(worker))];
      bool inside = true;
      for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
        if (CPU_ISSET(cpu, &mask)) inside &= std::find(node.cpus.begin(), node.cpus.end(), cpu) != node.cpus.end();
      std::lock_guard lock(mutex);
      check(inside, std::string(title) + ": a worker may run on its node's CPUs only");
      check(node_of_this_cpu() == node.id, std::string(title) + ": a worker runs on its node");
      if (seen.insert(worker).second)
        std::printf("%s: worker %d on node %d, CPU %d\n", title, worker, node_of_this_cpu(), sched_getcpu());
    });
  }
  check(static_cast<int>(seen.size()) == workers->threads() - 1, std::string(title) + ": every worker was seen");
}

void test_placement() {
  const std::vector<Node> there = nodes();
  for (const Node& node : there) std::printf("node %d: %zu CPUs\n", node.id, node.cpus.size());
  if (!check(there.size() == 2 && there[0].id == 0 && there[1].id == 1,
             "two nodes are usable; the third has memory and no CPU"))
    return;
  Problem problem;
  problem.experts = 4;
  problem.hidden = 1024;
  problem.inner = 1040;  // 65 panels of gate and up: the cut is uneven
  problem.format = Format::int8;
  const Input in = input(problem, 9);
  check_placement("bound", problem, {0, 1});
  const std::vector<float> want = forward(*layer(problem), in, 9, 2);

  Problem uncut = problem;
  uncut.nodes = 1;
  const auto whole = layer(uncut);
  const Block& block = whole->shards()[0].gate_up.data;
  for (const PagesOnNode& pages : pages_by_node(block.data(), block.size(), 1000)) {
    std::printf("uncut: %zu of 1000 sampled pages on node %d\n", pages.pages, pages.node);
    check(pages.pages > 300 && pages.pages < 700 && pages.node < 2, "uncut weights are interleaved");
  }
  check(forward(*whole, in, 9, 2) == want, "the same bits from two nodes and from one");

  // One CPU of the first node is taken away, and mbind.
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int cpu : {0, 2, 3}) CPU_SET(static_cast<size_t>(cpu), &mask);
  sched_setaffinity(0, sizeof mask, &mask);
  set_threads(0);
  refuse_mbind();
  check(layer(problem)->not_placed() == std::strerror(EPERM), "a refusal is kept");
  check_placement("mbind refused, CPUs 0, 2, 3", problem, {0, 1});
  check(forward(*layer(problem), in, 9, 2) == want, "the same bits with other CPUs");
}

}  // namespace

const void* kernels_of_exit = nullptr;

// Kernels may be chosen while the process ends, by the dispatcher's thread; what ends first here is what is made last.
int watch_exit() {
  std::atexit([] {
    const Kernels again = choose_kernel(Format::int4, "auto");
    check(!was_freed && again.many == kernels_of_exit && !again.many->name.empty(), "kernels are there to the end");
    std::_Exit(report("exit"));
  });
  must_stay = kernel_table().data();
  kernels_of_exit = choose_kernel(Format::int4, "auto").many;
  return 0;
}

int main(int argc, char** argv) {
  const runtime::Denormals zero(runtime::Denormals::kZero);  // as all have it who compute
  const bool is_init = getpid() == 1;
  if (is_init) {
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    check(mount("proc", "/proc", "proc", 0, nullptr) == 0 && mount("sysfs", "/sys", "sysfs", 0, nullptr) == 0,
          "/proc and /sys are there");
  }
  const std::string mode = is_init ? "placement" : argc > 1 ? argv[1] : "";
  const bool forks = std::getenv("KTINJECT_TEST_NO_FORKS") == nullptr;
  try {
    if (mode == "forward") test_forward();
    else if (mode == "plan") test_plan(), test_outlier_rows();
    else if (mode == "pool")
      test_pool_without_memory(), test_scratch(), test_denormals(), test_pool(forks), test_room(), test_fetch(),
          test_stages(), test_turns(forks), test_big_machines(forks), test_cores(), test_memory(), test_last_news(),
          test_trace();
    else if (mode == "teardown") test_teardown(argc > 2 ? std::atoi(argv[2]) : 5000);
    else if (mode == "writes") test_writes();
    else if (mode == "fuzz")
      test_kernels_at_the_edge(argc > 2 ? std::atoi(argv[2]) : 20,
                               argc > 3 ? static_cast<unsigned>(std::atoi(argv[3])) : 1);
    else if (mode == "exit") return watch_exit();
    else if (mode == "dispatcher") test_dispatcher(), test_arrivals();
    else if (mode == "sharing") test_sharing();
    else if (mode == "allocations") test_allocations();
    else if (mode == "churn") test_churn(argc > 2 ? std::atoi(argv[2]) : 1000, forks);
    else if (mode == "placement") test_placement();
    else
      check(false,
            "a mode is named: forward, plan, pool, teardown N, writes, fuzz N SEED, exit, dispatcher, sharing, "
            "allocations, churn N or placement");
  } catch (const std::exception& error) {
    check(false, error.what());
  }
  set_threads(1);  // ends the workers, so that nothing of theirs counts as leaked
  const int code = report(mode);
  if (is_init) {
    sync();
    reboot(RB_POWER_OFF);
  }
  return code;
}
