#include "handoff/channel.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::handoff {

using cuda::refuse;

std::string why_no_flags(int) { refuse(); }
size_t pinned_bytes() { return 0; }
Slots::Slots(int on, int, size_t bytes, size_t routes, Mode way, bool several)
    : device(on), mode(way), shared(several), most_bytes(bytes), most_routes(routes) {
  refuse();
}
void Slots::leave() {}
void Slot::run() noexcept {}
Channel::Channel(const moe::Experts&, int device) : device_(device), expert_count_(0), layer_(nullptr) { refuse(); }
Channel::~Channel() = default;
void Channel::submit(const std::shared_ptr<Slots>&, int, const DeviceRequest&, uintptr_t) { refuse(); }
void Channel::wait(const std::shared_ptr<Slots>&, int, int, DType, void*, const float*, const void*, uintptr_t,
                   uintptr_t) {
  refuse();
}
void Channel::foresee(const std::shared_ptr<Slots>&, int, const int64_t*, int, uintptr_t) { refuse(); }
std::vector<SlotCounts> Channel::slot_counts() const { refuse(); }
void Channel::check() { refuse(); }

}  // namespace ktinject::handoff
