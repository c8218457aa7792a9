// Work for the experts that is handed in by one call and waited for by another.
#include "handoff/channel.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>

#include "bindings/addresses.hpp"
#include "bindings/stream.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"
#include "cuda/devices.hpp"
#include "cuda/resident.hpp"
#include "handoff/dispatcher.hpp"
#include "handoff/waits.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

void def_task(nb::module_& m) {
  using HeldTask = EndsWithoutGil<handoff::Task>;
  nb::class_<HeldTask>(m, "Task", "One request in host memory, run by the dispatcher thread while the caller goes on.")
      .def(
          "__init__",
          [](HeldTask* self, const moe::Experts& experts, Address<> x, DType dtype, Address<> ids, bool ids_are_64_bit,
             Address<const float> weights, Address<> out, int tokens, int top_k) {
            new (self) HeldTask(experts, handoff::Request{x, ids, ids_are_64_bit, weights, out, dtype, tokens, top_k});
          },
          nb::arg("experts"), nb::arg("x"), nb::arg("dtype"), nb::arg("ids"), nb::arg("ids_are_64_bit"),
          nb::arg("weights"), nb::arg("out"), nb::arg("tokens"), nb::arg("top_k"), nb::keep_alive<1, 2>(),
          "Addresses of contiguous tensors, which must outlive the task.")
      .def("submit", &handoff::Task::submit, nb::call_guard<nb::gil_scoped_release>(),
           "Hand it to the dispatcher thread.")
      .def("wait", &handoff::Task::wait, nb::call_guard<nb::gil_scoped_release>(),
           "Return when it is computed. Raises what the computation raised, or RuntimeError if nobody answers.")
      .def_prop_ro("done", &handoff::Task::done, "Whether it is computed.");
}

// Graphs keep slots, too: CUDA drops them when it drops the graph.
struct KeptSlots {
  KeptSlots(int device, int count, size_t bytes, size_t routes, bool host_func, bool shared)
      : kept(std::make_shared<handoff::Slots>(device, count, bytes, routes,
                                              host_func ? handoff::Mode::host_func : handoff::Mode::flags, shared)) {}
  std::shared_ptr<handoff::Slots> kept;
};
using HeldSlots = EndsWithoutGil<KeptSlots>;

void def_slots(nb::module_& m) {
  nb::class_<HeldSlots>(m, "Slots", "Buffers for submits under way on a CUDA device, in pinned memory.")
      .def(
          "__init__",
          [](HeldSlots* self, int device, int count, size_t bytes, size_t routes, bool host_func, bool shared) {
            nb::gil_scoped_release release;
            new (self) HeldSlots(device, count, bytes, routes, host_func, shared);
          },
          nb::kw_only(), nb::arg("device"), nb::arg("count"), nb::arg("bytes"), nb::arg("routes"), nb::arg("host_func"),
          nb::arg("shared"),
          "bytes: of x, and as many of the answer; routes: pairs of an id and a weight; both of each slot.")
      .def_prop_ro("bytes", [](const HeldSlots& self) { return self.kept->bytes(); }, "Pinned bytes that it holds.");
}

void def_channel(nb::module_& m) {
  using HeldChannel = EndsWithoutGil<handoff::Channel>;
  nb::class_<HeldChannel>(m, "Channel", "A layer's way from one CUDA device.")
      .def(
          "__init__",
          [](HeldChannel* self, const moe::Experts& experts, int device) {
            nb::gil_scoped_release release;
            new (self) HeldChannel(experts, device);
          },
          nb::kw_only(), nb::arg("experts"), nb::arg("device"), nb::keep_alive<1, 2>())
      .def(
          "submit",
          [](HeldChannel& self, const HeldSlots& slots, int slot, Address<> x, DType dtype, Address<> ids,
             bool ids_are_64_bit, Address<> weights, DType weights_dtype, int tokens, int top_k,
             Address<const int32_t> places, Address<int32_t> chosen, Address<uint32_t> traffic, int rank_from,
             int rank_to, Address<const uint8_t> live, bool skips_unknown, Address<> logits, DType logits_dtype,
             bool normed, uintptr_t stream) {
            self.submit(slots.kept, slot,
                        {x,
                         dtype,
                         ids,
                         ids_are_64_bit,
                         weights,
                         weights_dtype,
                         tokens,
                         top_k,
                         places,
                         chosen,
                         traffic,
                         rank_from,
                         rank_to,
                         live,
                         skips_unknown,
                         {logits, logits_dtype, normed}},
                        stream);
          },
          nb::arg("slots"), nb::arg("slot"), nb::arg("x"), nb::arg("dtype"), nb::arg("ids"), nb::arg("ids_are_64_bit"),
          nb::arg("weights"), nb::arg("weights_dtype"), nb::arg("tokens"), nb::arg("top_k"), nb::arg("places"),
          nb::arg("chosen"), nb::arg("traffic"), nb::arg("rank_from"), nb::arg("rank_to"), nb::arg("live"),
          nb::arg("skips_unknown"), nb::arg("logits"), nb::arg("logits_dtype"), nb::arg("normed"), nb::arg("stream"),
          "Put a submit into the stream; addresses on the device. With logits, ids and weights are written.")
      .def(
          "wait",
          [](HeldChannel& self, const HeldSlots& slots, int slot, int tokens, DType dtype, Address<> out,
             Address<const float> addend, Address<> residual, uintptr_t stream, uintptr_t submitted_in) {
            self.wait(slots.kept, slot, tokens, dtype, out, addend, residual, stream, submitted_in);
          },
          nb::arg("slots"), nb::arg("slot"), nb::arg("tokens"), nb::arg("dtype"), nb::arg("out"), nb::arg("addend"),
          nb::arg("residual"), nb::arg("stream"), nb::arg("submitted_in"),
          "Put a wait into the stream; out 0: drop the answer, addend, residual 0: add nothing.")
      .def(
          "foresee",
          [](HeldChannel& self, const HeldSlots& slots, int slot, Address<const int64_t> ids, int top_k,
             uintptr_t stream) { self.foresee(slots.kept, slot, ids, top_k, stream); },
          nb::arg("slots"), nb::arg("slot"), nb::arg("ids"), nb::arg("top_k"), nb::arg("stream"),
          "Between submit and wait of another layer, whose slot this is: experts on the device that this one will "
          "perhaps\nbe asked for next.")
      .def("check", &handoff::Channel::check, nb::call_guard<nb::gil_scoped_release>(),
           "Raise what went wrong since the last call.");
}

void def_resident(nb::module_& m) {
  nb::class_<cuda::Resident>(m, "Resident",
                             "The shapes of the experts of one layer that lie on a GPU, and their part of it.")
      .def(nb::init<const moe::Experts&>(), nb::arg("experts"))
      .def_prop_ro("bytes", &cuda::Resident::bytes, "Device bytes of one expert.")
      .def_prop_ro("inner_width", &cuda::Resident::inner_width, "Values a (token, slot) pair of the working memory.")
      .def(
          "copy",
          [](const cuda::Resident& self, const moe::Experts& experts, int expert, Address<> to, cuda::Stream stream) {
            self.copy(experts, expert, to, stream);
          },
          nb::arg("experts"), nb::arg("expert"), nb::arg("to"), nb::arg("stream"),
          nb::call_guard<nb::gil_scoped_release>(), "Put the copy of one packed expert into the stream.")
      .def(
          "forward",
          [](const cuda::Resident& self, Address<> x, DType dtype, Address<const int32_t> chosen, Address<> weights,
             DType weights_dtype, int tokens, int top_k, Address<> resident, Address<> inner, Address<float> out,
             cuda::Stream stream) {
            self.forward({x, dtype, weights, weights_dtype, tokens, top_k, chosen, resident, inner, out}, stream);
          },
          nb::arg("x"), nb::arg("dtype"), nb::arg("chosen"), nb::arg("weights"), nb::arg("weights_dtype"),
          nb::arg("tokens"), nb::arg("top_k"), nb::arg("resident"), nb::arg("inner"), nb::arg("out"), nb::arg("stream"),
          "Put out [tokens, hidden] fp32 = the weighted sum of the experts that are here into the stream.");
}

void def_dispatcher(nb::module_& m) {
  m.def("why_no_flags", &handoff::why_no_flags, nb::arg("device"), nb::call_guard<nb::gil_scoped_release>(),
        "Why mapped flags do not work on a CUDA device; empty where they do. Tried once a process.");
  m.def(
      "read_device",
      [](Address<> from, Address<> to, size_t bytes, cuda::Stream stream) {
        cuda::read_device(from, to, bytes, stream);
      },
      nb::arg("from_device"), nb::arg("to_host"), nb::arg("bytes"), nb::arg("stream"),
      nb::call_guard<nb::gil_scoped_release>(), "Copy from a device to the host through a stream.");
  m.def(
      "handoff_wake", [] { handoff::dispatcher().wake(); },
      "Wake the dispatcher thread: a submit that finds it asleep is answered later.");
  m.def("pinned_bytes", &handoff::pinned_bytes,
        "Pinned bytes that buffers of submits hold or have left to be used again.");
  m.def(
      "handoff_entries", [] { return handoff::dispatcher().entries(); },
      "Submits from CUDA devices that the dispatcher thread has found so far.");
  m.def(
      "handoff_pause", [](bool paused) { handoff::dispatcher().pause(paused); }, nb::arg("paused"),
      "For tests: let nobody answer.");
  m.def(
      "handoff_naps", [] { return handoff::dispatcher().naps(); },
      "For tests: whether the dispatcher naps where it would else sleep, since submits are under way or were "
      "captured.");
  m.attr("LONGEST_KERNEL_SECONDS") = handoff::kLongestKernelSeconds;
  m.def("kernel_wait_seconds", &handoff::kernel_wait_seconds, nb::arg("answer_timeout"), nb::arg("ends_long_kernels"),
        "How long a kernel waits for the CPU, at most LONGEST_KERNEL_SECONDS where the driver ends long ones.");
  m.def("next_quiet_ns", &handoff::next_quiet_ns, nb::arg("quiet"), nb::arg("waited"), nb::arg("came_in_it"),
        "How long the next wait of a slot reads one word alone; see native/handoff/waits.hpp.");
  m.def("set_answer_timeout", &handoff::set_answer_timeout, nb::arg("seconds"), "How long an answer may take.");
  m.def("answer_timeout", &handoff::answer_timeout, "How long an answer may take, in seconds.");
}

}  // namespace

void init_handoff(nb::module_& m) {
  def_task(m);
  def_slots(m);
  def_channel(m);
  def_resident(m);
  def_dispatcher(m);
}

}  // namespace ktinject
