// The dispatcher thread computes what others ask for. GPUs ask through rings in mapped memory, the host through post()
// and ring(). One thread looks at all of them and computes on the pool as its worker 0, so nothing hops to another
// thread. It never calls CUDA and never takes the GIL: whatever else waits for the GPU, the dispatcher answers.
//
// It spins while there has been work or a wake() within the last two milliseconds. After that
//   - it naps, if eager submits are on their way through a stream or there are graphs with submits: 50 us each, and 1
//   ms
//     when nothing has come for a second. A GPU cannot wake a sleeping thread, so the entry of a graph that is replayed
//     without wake() is found at the end of a nap, and the rest of its step by spinning;
//   - else it sleeps until wake().
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "handoff/protocol.hpp"
#include "moe/experts.hpp"
#include "runtime/waiting.hpp"

namespace ktinject::handoff {

// Something to compute. The caller that posts it keeps it alive until run() has returned.
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
  // Reads a ring of kRingEntries entries that one GPU writes, from now on and for as long as the process lives.
  void watch(const uint64_t* ring);

  // open() gives `work` a port, and returns the address that ring entries and ring() use for it. close() waits until
  // `work` does not run. Entries that come after close() are skipped, also when the port has a new owner.
  uint32_t open(Work* work);
  void close(uint32_t address);
  // Waits until `work` does not run. False if it still runs after so many seconds.
  bool settle(const Work* work, double seconds = std::numeric_limits<double>::infinity()) const;

  // Requests from the host, run in order; both wait if the queue is full. `work` must live until it has run; an address
  // may be closed earlier.
  void post(Work* work) { enqueue(reinterpret_cast<uintptr_t>(work)); }
  void ring(uint32_t address) { enqueue(uintptr_t{address} << 1 | 1); }

  // An eager submit, whose entry will come in this ring, is about to be put into a stream: wake up, and do not sleep
  // until the entry has come, withdraw() has taken it back, or lose() says that the device failed and nothing will
  // come.
  void announce(const uint64_t* ring);
  void withdraw(const uint64_t* ring);
  void lose(const uint64_t* ring);
  // While one lives, there is a graph with submits that may be replayed: nap instead of sleeping.
  class Replayable {
   public:
    explicit Replayable(Dispatcher& dispatcher);
    ~Replayable() { dispatcher_.replayable_.fetch_sub(1); }
    Replayable(const Replayable&) = delete;
    Replayable& operator=(const Replayable&) = delete;

   private:
    Dispatcher& dispatcher_;
  };
  // Whether it naps instead of sleeping.
  bool naps();
  // Before a graph is replayed, this saves the rest of a nap.
  void wake();
  // Submits that GPUs have asked for so far.
  uint64_t entries() const { return entries_.load(std::memory_order_relaxed); }

  // For tests of what happens when nobody answers: to what is submitted from now on.
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
    uint32_t next = 0;              // of this thread alone
    std::atomic<int> announced{0};  // submits whose entries have not come
    void take_announcement();
  };
  std::span<Ring> watched();
  Ring& find_ring(const uint64_t* entries);

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
  std::atomic<uint64_t> entries_{0};
  std::atomic<int> replayable_{0};
  std::atomic<bool> paused_{false}, is_pause_seen_{false};
  std::atomic<uint32_t> wake_{0};
  std::atomic<bool> sleeping_{false};
};

// The dispatcher of this process. It starts on first use; a forked child starts its own.
Dispatcher& dispatcher();

// A request from the host, which the dispatcher computes while the caller goes on.
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

// How long CPU and GPU wait for an answer before it counts as lost: 60 s unless set.
void set_answer_timeout(double seconds);
double answer_timeout();

}  // namespace ktinject::handoff
