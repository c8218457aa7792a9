// Decides which experts of a layer should lie on the GPU, from how often each step asks for each expert.
//
// Routing repeats itself: an expert that was just used is likely to be used again soon. So an expert's score counts its
// uses, and a use counts half after kHalfLife steps: recency and frequency in one number (LRFU, Lee et al., 2001). The
// policy keeps a set of *wanted* experts, as large as the resident set: an expert that is used and not wanted takes the
// place of the wanted one with the lowest score, where its own is clearly higher.
//
// Copies cost bandwidth, and where routing does not repeat itself they gain nothing. So each entry into the wanted set
// is followed: how often the expert that came in was used while it was in, less the uses of the one that left. Only
// where these gains pay for the copies are resident experts exchanged. The wanted set costs no copies, so it goes on
// without.
//
// No time and no chance is in it: the same uses give the same exchanges. It knows nothing of GPUs.
#pragma once

#include <cstdint>
#include <vector>

namespace ktinject::handoff {

struct Exchange {
  int leaving = 0;
  int coming = 0;
  float gain = 0;  // difference of the scores
};

class ReusePolicy {
 public:
  static constexpr float kHalfLife = 6;  // steps
  static constexpr float kMargin = 0.25f;
  // A copy reads an expert from RAM once, as a use on the CPU does, so an entry must gain more than one use. What
  // entries gain beyond that adds up, and what they fall short is taken off: exchanges begin at kBegins, and end at 0.
  static constexpr float kCost = 1, kBegins = 12, kMost = 24;
  static constexpr int kFollowed = 16;  // steps that an entry is followed
  static constexpr int kAveraged = 64;  // entries, in the moving average of the gain

  // resident: ids of the experts that are on the GPU. Throws std::invalid_argument.
  ReusePolicy(int experts, const std::vector<int>& resident);

  // One step: uses [experts], how often each expert was asked for. Exchanges that were chosen after the step before
  // have taken effect behind this one.
  void count(const uint32_t* uses);
  // Several steps that nobody looked at, and without exchanges: only uses and hits are counted.
  void skip(const uint32_t* uses);
  // Whether exchanges pay at present.
  bool pays() const { return pays_; }
  // At most `most` exchanges that bring the resident experts closer to the wanted ones; the most useful first.
  std::vector<Exchange> candidates(int most) const;
  // One of the candidates, or the first several, are carried out: from the step after the next on.
  void choose(const Exchange& exchange);

  int experts() const { return static_cast<int>(scores_.size()); }
  uint64_t uses() const { return uses_; }
  uint64_t hits() const { return hits_; }  // uses of resident experts
  uint64_t exchanges() const { return exchanges_; }
  float gain() const { return gain_; }  // of an entry into the wanted set, in uses

 private:
  struct Entry {
    int left = -1;  // the expert that left for it; -1: not followed
    uint32_t since = 0;
    uint64_t uses_then = 0, left_uses_then = 0;
  };
  void close(int expert);
  int coldest_wanted() const;
  bool is_colder(int one, int other) const;

  std::vector<float> scores_;
  std::vector<uint32_t> last_;   // the step of the last use
  std::vector<uint64_t> total_;  // uses so far
  std::vector<uint8_t> resident_, wanted_, leaving_, coming_;
  std::vector<Entry> entries_;
  std::vector<Exchange> chosen_;
  uint32_t step_ = 0;
  uint64_t uses_ = 0, hits_ = 0, exchanges_ = 0;
  float gain_ = 0, credit_ = 0;
  int averaged_ = 0;
  bool pays_ = false;
};

}  // namespace ktinject::handoff
