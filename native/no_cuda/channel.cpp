#include "handoff/channel.hpp"

#include "no_cuda/refuse.hpp"

namespace ktinject {

struct Channel::Slot {};
struct Channel::Shared {};

std::string why_no_flags(int) { refuse(); }
void read_device(const void*, void*, size_t, Stream) { refuse(); }
Channel::Channel(const moe::Experts&, int, int, int, int, HandoffMode) { refuse(); }
Channel::~Channel() = default;
HandoffMode Channel::mode() const { refuse(); }
size_t Channel::bytes() const { refuse(); }
void Channel::submit(int, const DeviceRequest&, uintptr_t) { refuse(); }
void Channel::wait(int, int, DType, void*, const float*, const void*, uintptr_t) { refuse(); }
void Channel::exchange(const Resident&, const moe::Experts&, int, int, int, int32_t*, void*, uintptr_t) { refuse(); }
void Channel::check() { refuse(); }

}  // namespace ktinject
