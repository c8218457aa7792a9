#include "handoff/channel.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject::handoff {

using cuda::refuse;

struct Channel::Slot {};
struct Channel::Shared {};

std::string why_no_flags(int) { refuse(); }
Channel::Channel(const moe::Experts&, int, int, int, int, Mode) { refuse(); }
Channel::~Channel() = default;
Mode Channel::mode() const { refuse(); }
size_t Channel::bytes() const { refuse(); }
void Channel::submit(int, const DeviceRequest&, uintptr_t) { refuse(); }
void Channel::wait(int, int, DType, void*, const float*, const void*, uintptr_t) { refuse(); }
void Channel::exchange(const cuda::Resident&, const moe::Experts&, int, int, int, int32_t*, void*, uintptr_t) {
  refuse();
}
void Channel::check() { refuse(); }

}  // namespace ktinject::handoff
