// The experts on a GPU as a cache, and the policy that chooses them.
#include "handoff/expert_cache.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/addresses.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"
#include "handoff/reuse_policy.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

void def_policy(nb::module_& m) {
  using handoff::Exchange;
  using handoff::ReusePolicy;
  nb::class_<ReusePolicy>(m, "ReusePolicy",
                          "Which experts of a layer should lie on the GPU, from how often each step asks for each.")
      .def(nb::init<int, const std::vector<int>&>(), nb::arg("experts"), nb::arg("resident"))
      .def(
          "count",
          [](ReusePolicy& self, const std::vector<uint32_t>& uses) {
            if (uses.size() != static_cast<size_t>(self.experts()))
              throw std::invalid_argument("uses: found " + std::to_string(uses.size()) + " counts; expected " +
                                          std::to_string(self.experts()));
            self.count(uses.data());
          },
          nb::arg("uses"), "Count one step: how often it asked for each expert.")
      .def(
          "exchange",
          [](ReusePolicy& self, int most) {
            std::vector<std::tuple<int, int>> chosen;
            if (!self.pays()) return chosen;
            for (const Exchange& exchange : self.candidates(most)) {
              self.choose(exchange);
              chosen.emplace_back(exchange.leaving, exchange.coming);
            }
            return chosen;
          },
          nb::arg("most"),
          "Choose at most so many exchanges, (id that leaves, id that comes), in effect from the step after the next.")
      .def_prop_ro("pays", &ReusePolicy::pays, "Whether exchanges save more than they cost.")
      .def_prop_ro("gain", &ReusePolicy::gain, "Uses that an exchange saves, a moving average.")
      .def_prop_ro("uses", &ReusePolicy::uses, "Uses so far.")
      .def_prop_ro("hits", &ReusePolicy::hits, "Uses of experts that were on the GPU.")
      .def_prop_ro("exchanges", &ReusePolicy::exchanges, "Exchanges so far.");
}

void def_cache(nb::module_& m) {
  using HeldCache = EndsWithoutGil<handoff::ExpertCache>;
  nb::class_<handoff::CacheCounts>(m, "CacheCounts", "What the cache of a layer has done.")
      .def_ro("uses", &handoff::CacheCounts::uses, "Uses of experts, in steps that were counted.")
      .def_ro("hits", &handoff::CacheCounts::hits, "Of them, of experts on the GPU.")
      .def_ro("fetches", &handoff::CacheCounts::fetches, "Experts copied to the GPU.")
      .def_ro("bytes", &handoff::CacheCounts::bytes, "Bytes of these copies.")
      .def_ro("gain", &handoff::CacheCounts::gain, "Uses that an exchange saves, a moving average.")
      .def_ro("moves", &handoff::CacheCounts::moves, "Whether that is worth the copies.");
  nb::class_<HeldCache>(m, "ExpertCache", "The experts of several layers that lie on one CUDA device, as a cache.")
      .def(
          "__init__",
          [](HeldCache* self, int device) {
            nb::gil_scoped_release release;
            new (self) HeldCache(device);
          },
          nb::arg("device"))
      .def(
          "join",
          [](HeldCache& self, const moe::Experts& experts, const cuda::Resident& shapes,
             const EndsWithoutGil<handoff::Channel>& channel, Address<int32_t> places, Address<const uint32_t> traffic,
             Address<> memory, const std::vector<int>& resident, int spares) {
            return self.join({&experts, &shapes, &channel, places, traffic, static_cast<std::byte*>(memory.pointer)},
                             resident, spares);
          },
          nb::arg("experts"), nb::arg("shapes"), nb::arg("channel"), nb::arg("places"), nb::arg("traffic"),
          nb::arg("memory"), nb::arg("resident"), nb::arg("spares"), nb::call_guard<nb::gil_scoped_release>(),
          "Add a layer; its objects and tensors must live until leave(). Returns its number.")
      .def(
          "leave", [](HeldCache& self, int layer) { self.leave(layer); }, nb::arg("layer"),
          nb::call_guard<nb::gil_scoped_release>(), "Remove a layer; returns when nothing is copied to it any more.")
      .def(
          "step", [](HeldCache& self, uintptr_t stream) { self.step(stream); }, nb::arg("stream"),
          nb::call_guard<nb::gil_scoped_release>(), "Put a boundary between two steps into the stream.")
      .def(
          "places", [](const HeldCache& self, int layer) { return self.places(layer); }, nb::arg("layer"),
          "expert → place, or -1.")
      .def(
          "hold", [](HeldCache& self, int layer, uintptr_t stream) { return self.hold(layer, stream); },
          nb::arg("layer"), nb::arg("stream"), nb::call_guard<nb::gil_scoped_release>(),
          "expert → place, or -1; what lies there can be read in this stream, and stays until release().")
      .def(
          "release", [](HeldCache& self, uintptr_t stream) { self.release(stream); }, nb::arg("stream"),
          nb::call_guard<nb::gil_scoped_release>(), "End a hold, when the work in this stream so far has ended.")
      .def(
          "counts", [](const HeldCache& self, int layer) { return self.counts(layer); }, nb::arg("layer"),
          "What the cache of a layer has done.");
}

}  // namespace

void init_expert_cache(nb::module_& m) {
  def_policy(m);
  def_cache(m);
}

}  // namespace ktinject
