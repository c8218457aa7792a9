// The thread that answers. Work for the experts comes from GPUs, which write to rings in mapped memory, and from the
// host; one thread looks at all of them, computes on the pool as its worker 0 (so there is no hop to another thread),
// and answers. It never calls CUDA and never takes the GIL, so nothing that waits for the GPU can keep it from
// answering.
//
// It spins while there has been work or a wake() within the last two milliseconds. After that
//   - while eager submits are on their way through a stream, or graphs have been captured, it naps: 50 us, and 5 ms
//     when nothing came for a second. A GPU cannot wake a sleeping thread, so a graph that is replayed without wake()
//     is only found at the end of a nap;
//   - else it sleeps until wake().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <string>

#include "handoff/protocol.hpp"
#include "moe/experts.hpp"
#include "runtime/waiting.hpp"

namespace ktinject::handoff {

// Something to compute. Whoever hands it in keeps it alive until run() has returned.
class Work {
 public:
  virtual ~Work() = default;
  virtual void run() noexcept = 0;
};

// One call of Experts::forward, buffers in host memory.
struct Request {
  const void* x = nullptr;
  const void* ids = nullptr;
  bool ids_are_64_bit = false;
  const float* weights = nullptr;
  void* out = nullptr;
  DType dtype = DType::bf16;
  int tokens = 0;
  int top_k = 0;

  void compute(const moe::Experts& experts) const;
};

class Dispatcher {
 public:
  // A ring in memory that one GPU writes and the dispatcher reads: (ticket + 1) << 32 | address. It is never taken
  // away.
  void watch(const uint64_t* ring);

  // An address by which rings and ring() may ask for `work`. Whoever asks may be late: close() waits until the work
  // that runs, if any, has ended, and what still names the address then is skipped, also when its port has a new owner.
  uint32_t open(Work* work);
  void close(uint32_t address);
  // Returns when `work` does not run: true, or false if it still does after so many seconds.
  bool settle(const Work* work, double seconds = std::numeric_limits<double>::infinity()) const;

  // Work from the host, in order; wait for room. `work` must live until it has run; an address may be closed before.
  void post(Work* work) { enqueue(reinterpret_cast<uintptr_t>(work)); }
  void ring(uint32_t address) { enqueue(uintptr_t{address} << 1 | 1); }

  // An eager submit is about to be put into a stream: stay awake for it.
  void announce() {
    outstanding_.fetch_add(1, std::memory_order_relaxed);
    wake();
  }
  void withdraw() { outstanding_.fetch_sub(1, std::memory_order_relaxed); }
  // Whether it naps where it would else sleep.
  bool naps() const { return outstanding_.load() > 0 || captured_.load(); }
  // A graph with submits has been captured: never sleep for good again.
  void nap() {
    if (!captured_.exchange(true)) wake();
  }
  // To be called before a graph is replayed.
  void wake();

  // For tests of what happens when nobody answers.
  void pause(bool paused);

 private:
  friend Dispatcher& dispatcher();
  void loop();
  void enqueue(uintptr_t posted);
  Work* next();
  Work* find(uint32_t address);
  void run(Work* work);

  struct Ring {
    const uint64_t* entries = nullptr;
    uint32_t next = 0;
  };
  struct Port {
    std::atomic<Work*> work{nullptr};
    std::atomic<uint32_t> generation{0};
  };
  std::array<Ring, 64> rings_;
  std::atomic<size_t> ring_count_{0};
  std::array<Port, kMostPorts> ports_;
  std::array<std::atomic<uintptr_t>, 256> posted_{};  // a Work*, or an address doubled, plus one; 0: nothing
  std::atomic<uint32_t> post_ticket_{0};
  uint32_t post_next_ = 0;
  std::atomic<Work*> running_{nullptr};
  std::atomic<int> outstanding_{0};
  std::atomic<bool> captured_{false};
  std::atomic<bool> paused_{false};
  std::atomic<uint32_t> wake_{0};
  std::atomic<bool> sleeping_{false};
};

// The process's dispatcher, started on first use; a forked child starts its own.
Dispatcher& dispatcher();

// A request from the host, run by the dispatcher while the caller goes on.
class Task : public Work {
 public:
  Task(const moe::Experts& experts, const Request& request) : experts_(experts), request_(request) {}
  ~Task() override;
  void submit();
  // Rethrows what the computation threw; std::runtime_error if there is no answer within the timeout.
  void wait();
  bool done() const { return done_.load(std::memory_order_acquire); }
  void run() noexcept override;

 private:
  const moe::Experts& experts_;
  const Request request_;
  bool is_lost() const { return forks_ != runtime::forks(); }  // its dispatcher is the parent's

  bool submitted_ = false;
  const int forks_ = runtime::forks();
  std::atomic<bool> done_{false};
  std::exception_ptr failure_;
};

// How long anybody waits for an answer before calling its sender lost.
void set_answer_timeout(double seconds);
double answer_timeout();

}  // namespace ktinject::handoff
