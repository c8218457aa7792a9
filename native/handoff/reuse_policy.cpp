#include "handoff/reuse_policy.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace ktinject::handoff {

ReusePolicy::ReusePolicy(int experts, const std::vector<int>& resident)
    : scores_(static_cast<size_t>(std::max(0, experts))),
      last_(scores_.size()),
      total_(scores_.size()),
      resident_(scores_.size()),
      leaving_(scores_.size()),
      coming_(scores_.size()),
      entries_(scores_.size()) {
  for (const int expert : resident) {
    if (expert < 0 || expert >= experts || resident_[static_cast<size_t>(expert)] != 0)
      throw std::invalid_argument("resident experts: found " + std::to_string(expert) + "; allowed: each of 0 to " +
                                  std::to_string(experts - 1) + " once");
    resident_[static_cast<size_t>(expert)] = 1;
  }
  wanted_ = resident_;
}

// Of equal scores, the one that was used longer ago; of equal ones again, the one with the lower id.
bool ReusePolicy::is_colder(int one, int other) const {
  const auto a = static_cast<size_t>(one), b = static_cast<size_t>(other);
  if (scores_[a] != scores_[b]) return scores_[a] < scores_[b];
  if (last_[a] != last_[b]) return last_[a] < last_[b];
  return one < other;
}

int ReusePolicy::coldest_wanted() const {
  int coldest = -1;
  for (int expert = 0; expert < experts(); ++expert)
    if (wanted_[static_cast<size_t>(expert)] != 0 && (coldest < 0 || is_colder(expert, coldest))) coldest = expert;
  return coldest;
}

void ReusePolicy::close(int expert) {
  Entry& entry = entries_[static_cast<size_t>(expert)];
  const auto own = static_cast<float>(total_[static_cast<size_t>(expert)] - entry.uses_then);
  const auto others = static_cast<float>(total_[static_cast<size_t>(entry.left)] - entry.left_uses_then);
  averaged_ = std::min(averaged_ + 1, kAveraged);
  gain_ += (own - others - gain_) / static_cast<float>(averaged_);
  credit_ = std::clamp(credit_ + own - others - kCost, 0.0f, kMost);
  entry.left = -1;
}

void ReusePolicy::count(const uint32_t* uses) {
  static const float decay = std::exp2(-1.0f / kHalfLife);
  constexpr float kNothing = 1e-12f;  // below, scores would become denormal numbers, which are slow
  ++step_;
  std::vector<int> used;
  for (int expert = 0; expert < experts(); ++expert) {
    const auto at = static_cast<size_t>(expert);
    scores_[at] = scores_[at] < kNothing ? 0 : scores_[at] * decay;
    if (uses[at] == 0) continue;
    uses_ += uses[at];
    if (resident_[at] != 0) hits_ += uses[at];
    scores_[at] += static_cast<float>(uses[at]);
    total_[at] += uses[at];
    last_[at] = step_;
    if (wanted_[at] == 0) used.push_back(expert);
  }
  for (const Exchange& exchange : chosen_) {
    resident_[static_cast<size_t>(exchange.leaving)] = leaving_[static_cast<size_t>(exchange.leaving)] = 0;
    coming_[static_cast<size_t>(exchange.coming)] = 0;
    resident_[static_cast<size_t>(exchange.coming)] = 1;
  }
  chosen_.clear();
  for (int expert = 0; expert < experts(); ++expert) {
    const Entry& entry = entries_[static_cast<size_t>(expert)];
    if (entry.left >= 0 && step_ - entry.since >= kFollowed) close(expert);
  }
  std::sort(used.begin(), used.end(), [this](int one, int other) { return is_colder(other, one); });
  for (const int expert : used) {
    const int coldest = coldest_wanted();
    const auto in = static_cast<size_t>(expert);
    if (coldest < 0 || scores_[in] <= scores_[static_cast<size_t>(coldest)] + kMargin) break;
    const auto out = static_cast<size_t>(coldest);
    if (entries_[out].left >= 0) close(coldest);
    wanted_[out] = 0;
    wanted_[in] = 1;
    entries_[in] = {coldest, step_, total_[in], total_[out]};
  }
  pays_ = pays_ ? credit_ > 0 : credit_ >= kBegins;
}

void ReusePolicy::skip(const uint32_t* uses) {
  for (size_t at = 0; at < scores_.size(); ++at) {
    uses_ += uses[at];
    if (resident_[at] != 0) hits_ += uses[at];
  }
}

std::vector<Exchange> ReusePolicy::candidates(int most) const {
  std::vector<int> coming, leaving;
  for (int expert = 0; expert < experts(); ++expert) {
    const auto at = static_cast<size_t>(expert);
    if (wanted_[at] != 0 && resident_[at] == 0 && coming_[at] == 0) coming.push_back(expert);
    if (wanted_[at] == 0 && resident_[at] != 0 && leaving_[at] == 0) leaving.push_back(expert);
  }
  std::sort(coming.begin(), coming.end(), [this](int one, int other) { return is_colder(other, one); });
  std::sort(leaving.begin(), leaving.end(), [this](int one, int other) { return is_colder(one, other); });
  std::vector<Exchange> found;
  const size_t count = std::min({coming.size(), leaving.size(), static_cast<size_t>(std::max(0, most))});
  for (size_t i = 0; i < count; ++i) {
    const float gain = scores_[static_cast<size_t>(coming[i])] - scores_[static_cast<size_t>(leaving[i])];
    if (gain <= kMargin) break;  // what was wanted has grown cold before there was time to copy it
    found.push_back({leaving[i], coming[i], gain});
  }
  return found;
}

void ReusePolicy::choose(const Exchange& exchange) {
  const auto out = static_cast<size_t>(exchange.leaving), in = static_cast<size_t>(exchange.coming);
  if (resident_.at(out) == 0 || leaving_[out] != 0 || resident_.at(in) != 0 || coming_[in] != 0)
    throw std::invalid_argument("an exchange that is none of the candidates");
  leaving_[out] = coming_[in] = 1;
  chosen_.push_back(exchange);
  ++exchanges_;
}

}  // namespace ktinject::handoff
