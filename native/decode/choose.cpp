#include "decode/choose.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/backends.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::decode {
namespace {

// Scores of a task, and so many tasks that fewer are left to the caller.
constexpr int kPart = 4096, kFewParts = 8;
enum Slot : size_t { kWords = 1, kFound };

struct Found {
  float best;
  int index;
};

// The generator's state as torch lays it out: seed, left, seeded, next, 624 words of 64 bits, and more.
class Twister {
 public:
  explicit Twister(std::byte* bytes) : bytes_(bytes) {
    int32_t left;
    uint64_t next, word;
    std::memcpy(&left, bytes + 8, sizeof left);
    std::memcpy(&next, bytes + 16, sizeof next);
    // Together, too: the words from `next` on are those that are left.
    constexpr auto kWordsOfState = static_cast<uint64_t>(gemm::kMersenneWords);
    if (left < 1 || left > gemm::kMersenneWords || next > kWordsOfState ||
        next + static_cast<uint64_t>(left) > kWordsOfState + 1)
      throw std::invalid_argument("generator: not the state of torch's generator on the CPU");
    left_ = left - 1;
    next_ = static_cast<int>(next);
    for (int i = 0; i < gemm::kMersenneWords; ++i) {
      std::memcpy(&word, bytes + 24 + static_cast<size_t>(i) * 8, sizeof word);
      state_[i] = static_cast<uint32_t>(word);
    }
  }

  // The next words of the state, as they are before `mersenne_temper`. They follow from each other, so one thread makes
  // them; what is made of each word is for all.
  void draw(uint32_t* out, size_t count, const gemm::StepOps& ops) {
    while (count > 0) {
      if (left_ == 0) {
        ops.mersenne_next(state_);
        left_ = gemm::kMersenneWords;
        next_ = 0;
      }
      const auto some = static_cast<int>(std::min(count, static_cast<size_t>(left_)));
      std::copy(state_ + next_, state_ + next_ + some, out);
      next_ += some;
      left_ -= some;
      out += some;
      count -= static_cast<size_t>(some);
    }
  }

  void save() const {
    const int32_t left = left_ + 1;
    const auto next = static_cast<uint64_t>(next_);
    std::memcpy(bytes_ + 8, &left, sizeof left);
    std::memcpy(bytes_ + 16, &next, sizeof next);
    for (int i = 0; i < gemm::kMersenneWords; ++i) {
      const uint64_t word = state_[i];
      std::memcpy(bytes_ + 24 + static_cast<size_t>(i) * 8, &word, sizeof word);
    }
  }

 private:
  std::byte* bytes_;
  int left_, next_;
  uint32_t state_[gemm::kMersenneWords];
};

bool is_less(const Found& a, const Found& b) { return a.best < b.best || (std::isnan(b.best) && !std::isnan(a.best)); }

// find(first, count) for parts of a row, and beside them the whole of `also`, by one thread; the best of what is found,
// the first of those that tie.
template <class Find, class Also>
Found best_of(runtime::ThreadPool& workers, int n, Find&& find, Also&& also) {
  const int parts = (n + kPart - 1) / kPart;
  auto* found = reinterpret_cast<Found*>(workers.buffer(kFound, static_cast<size_t>(parts) * sizeof(Found)));
  auto task = [&](int index, int) {
    if (index == 0) return also();  // the longest comes first
    const int first = (index - 1) * kPart;
    found[index - 1] = find(first, std::min(kPart, n - first));
    found[index - 1].index += first;
  };
  if (parts < kFewParts)
    for (int index = 0; index <= parts; ++index) task(index, 0);
  else workers.parallel_for(parts + 1, task);
  return *std::max_element(found, found + parts, is_less);
}

void nothing() {}

template <class Also>
Found greatest(runtime::ThreadPool& workers, const gemm::StepOps& ops, const float* scores, int n, Also&& also) {
  auto find = [&](int first, int count) {
    Found found{};
    found.best = ops.greatest(scores + first, count);
    auto is_it = [&](float x) { return std::isnan(found.best) ? std::isnan(x) : x == found.best; };
    while (found.index + 1 < count && !is_it(scores[first + found.index])) ++found.index;
    return found;
  };
  return best_of(workers, n, find, also);
}

}  // namespace

void choose_greatest(const float* scores, int rows, int n, int64_t* tokens) {
  const runtime::Session session;
  for (int row = 0; row < rows; ++row)
    tokens[row] =
        greatest(*session, gemm::step_ops(), scores + static_cast<size_t>(row) * static_cast<size_t>(n), n, nothing)
            .index;
}

void draw(const float* scores, int rows, int n, std::byte* generator, int64_t* tokens) {
  const gemm::StepOps& ops = gemm::step_ops();
  const runtime::Session session;
  Twister twister(generator);
  const auto count = static_cast<size_t>(n) * 2;
  auto* words = reinterpret_cast<uint32_t*>(session->buffer(kWords, count * sizeof(uint32_t)));
  for (int row = 0; row < rows; ++row) {
    const float* here = scores + static_cast<size_t>(row) * static_cast<size_t>(n);
    const float most = greatest(*session, ops, here, n, [&] { twister.draw(words, count, ops); }).best;
    if (!std::isfinite(most))  // before anything is saved: no random number is used up
      throw std::invalid_argument("scores: the greatest of row " + std::to_string(row) + " is " +
                                  (std::isnan(most) ? "NaN"
                                   : most > 0       ? "inf"
                                                    : "-inf") +
                                  "; nothing can be drawn");
    auto race = [&](int first, int size) {
      Found found{};
      uint32_t* own = words + static_cast<size_t>(first) * 2;
      ops.mersenne_temper(own, 2 * size, own);
      found.best = ops.race(here + first, own, size, most, &found.index);
      return found;
    };
    tokens[row] = best_of(*session, n, race, nothing).index;
  }
  twister.save();
}

}  // namespace ktinject::decode
