// Streams a layer's packed experts to a GPU: page-locks them in RAM, copies them packed, and unpacks them on the GPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/resident.hpp"
#include "cuda/stream.hpp"
#include "moe/experts.hpp"

namespace ktinject::cuda {

// What experts answer to tokens; device pointers, contiguous, at multiples of 16.
struct Answers {
  const void* values = nullptr;  // [known, hidden] bf16
  int64_t known = 0;
  const int64_t* rows = nullptr;  // [tokens, slots]: a row of values; from `known` on: no answer
  const void* weights = nullptr;  // [tokens, slots]
  DType weights_dtype = DType::f32;
  int tokens = 0;
  int slots = 0;
};

class Streamed {
 public:
  // Page-locks the packed weights of `experts`, which must be allocated and outlive this, from expert `first` on, but
  // for those that are released: only these can be copied. Throws std::runtime_error where the system refuses, or the
  // build has no CUDA.
  explicit Streamed(const moe::Experts& experts, int first = 0);
  ~Streamed();
  Streamed(const Streamed&) = delete;
  Streamed& operator=(const Streamed&) = delete;

  // What copy() moves for `count` experts.
  size_t packed_bytes(int count) const;
  // These experts → slot, packed_bytes(experts.size()) of device memory. Throws std::invalid_argument for one that is
  // not page-locked.
  void copy(const std::vector<int>& experts, void* slot, Stream stream) const;
  // What copy() left in slot → gate_up [count, n, hidden] and down [count, hidden, intermediate], dequantised and
  // rounded to bf16; n = 2 * intermediate with the gate above up, or intermediate where there is no gate. Widths must
  // be multiples of 8.
  void unpack(const void* slot, int count, void* gate_up, void* down, Stream stream) const;
  // The same of experts that lie at these places of `memory` on the device: nothing is copied. Throws
  // std::invalid_argument where `shapes` are not those of the experts.
  void unpack_resident(const Resident& shapes, const void* memory, const std::vector<int>& places, void* gate_up,
                       void* down, Stream stream) const;
  // gate_up [rows, n] of dtype → out [rows, intermediate] bf16: what the down projection multiplies.
  void activate(const void* gate_up, DType dtype, size_t rows, void* out, Stream stream) const;

  // out [tokens, hidden] of dtype = the weighted sum of each token's answers, in the order of its slots, in fp32; zeros
  // for a token without any.
  void sum(const Answers& answers, void* out, DType dtype, Stream stream) const;

 private:
  void unlock() noexcept;
  void unpack_run(const moe::PackedRun& run, const std::byte* from, size_t stride, const std::vector<int>& places,
                  void* out, Stream stream) const;
  void lock(const moe::PackedRun& run);
  const moe::Experts& experts_;
  const int first_;
  std::vector<moe::PackedRun> runs_;
  std::vector<std::byte*> locked_;            // where what is page-locked begins
  mutable std::atomic<uint64_t> devices_{0};  // bit n: copies went to device n
};

// out [count] = host + addend, rounded to the type of both, in the order of `stream`. host is page-locked and read by
// the kernel itself: a copy would wait for all the experts that are queued for the same engine. Addresses must be
// multiples of 16, count one of 8.
void add_from_host(const void* host, const float* addend, void* out, size_t count, DType dtype, Stream stream);

}  // namespace ktinject::cuda
