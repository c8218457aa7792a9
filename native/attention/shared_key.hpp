// Attention of many heads to one head whose keys are values, within a window, and to compressed ones of all tokens
// before (DeepSeek-V4). What heads give turns back, and leads out by groups of heads.
#pragma once

#include <span>
#include <vector>

#include "attention/attention.hpp"
#include "attention/compressor.hpp"

namespace ktinject::attention {

//   q    = turned(x / rms(x)) of each head of q_b(q_norm(q_a(x)))
//   key  = turned(kv_norm(kv(x))), goes to a ring
//   out  = o(groups of turned back(softmax(q · keys scale) keys))
//
// Of a compressor whose keys no index chooses, all are seen of windows that are complete.
struct SharedKeyConfig {
  const gemm::Linear *q_a = nullptr, *q_b = nullptr, *kv = nullptr, *o = nullptr;
  Norm q_norm, kv_norm;
  float query_epsilon = 0;
  const void* grouped = nullptr;  // [o's inputs, heads * size / groups] of the model's dtype: heads to o's inputs
  int groups = 0;
  int heads = 0, size = 0, window = 0;
  float scale = 1;
  const float* sinks = nullptr;            // [heads]: scores that take part in the softmax and have no value
  const Compressor* compressor = nullptr;  // or none
  const CompressedIndex* index = nullptr;  // what chooses its keys, or none
};

class SharedKeyAttention final : public DecoderAttention {
 public:
  explicit SharedKeyAttention(SharedKeyConfig config);
  bool fits(int hidden) const override;
  void forward(const float* x, const Step& step, const LayerCache& cache, float* out) const override;

 private:
  void check_cache(const Step& step, const LayerCache& cache) const;
  // task(row, head) for all heads.
  template <class Task>
  void each_head(const Step& step, Task&& task) const;
  // A head's query, normed and turned.
  void prepare_query(const Step& step, int row, float* query) const;
  // A row's key, normed and turned, to the ring.
  void write_key(const Step& step, int row, float* key, const LayerCache& cache) const;
  // The windows that each row sees.
  void compress(const float* x, const float* low, const Step& step, const LayerCache& cache,
                std::vector<std::vector<int>>& chosen) const;
  void attend(const float* q, const Step& step, const LayerCache& cache, const std::vector<std::vector<int>>& chosen,
              float* out) const;
  void lead_out(const float* sum, const Step& step, float* out) const;
  std::span<const Cached> parts_of(const LayerCache& cache, bool of_index) const;

  SharedKeyConfig config_;
};

}  // namespace ktinject::attention
