#include "handoff/expert_cache.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::handoff {

using cuda::refuse;

ExpertCache::ExpertCache(int device) : device_(device) { refuse(); }
ExpertCache::~ExpertCache() = default;
int ExpertCache::join(const CachedLayer&, const std::vector<int>&, int) { refuse(); }
void ExpertCache::leave(int) { refuse(); }
void ExpertCache::step(uintptr_t) { refuse(); }
std::vector<int> ExpertCache::places(int) const { refuse(); }
std::vector<int> ExpertCache::hold(int, uintptr_t) { refuse(); }
void ExpertCache::release(uintptr_t) { refuse(); }
CacheCounts ExpertCache::counts(int) const { refuse(); }

}  // namespace ktinject::handoff
