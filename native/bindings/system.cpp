// What the machine can do, and how many threads may do it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/sequences.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"
#include "gemm/backends.hpp"
#include "gemm/ceilings.hpp"
#include "runtime/alone.hpp"
#include "runtime/cpu_features.hpp"
#include "runtime/memory.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/trace.hpp"
#include "runtime/uses.hpp"

namespace nb = nanobind;

namespace ktinject {
namespace {

void def_cpu(nb::module_& m) {
  m.def(
      "cpu_features",
      [] {
        nb::dict features;
        for (const runtime::IsaName& isa : runtime::kIsaNames)
          features[isa.name] = (runtime::cpu_features() & isa.bit) != 0;
        return features;
      },
      "Instruction sets that this process may use: CPU and operating system have them, and so has its level.");
  m.def("amx_permission", [] { return runtime::amx_permission(); }, "'granted', 'absent' or 'refused: <why>'.");
  m.def(
      "levels",
      [] {
        nb::list rows;
        for (const gemm::Level& level : gemm::levels()) {
          const std::string reason = gemm::why_unavailable(level);
          nb::dict row;
          row["name"] = level.name;
          row["isa"] = runtime::names_of(level.isa, " ");
          row["available"] = reason.empty();
          row["reason"] = reason;
          rows.append(row);
        }
        return rows;
      },
      "The instruction levels, by name.");
  m.def("restrict_to", &gemm::restrict_to, nb::arg("level"),
        "From now on nothing native uses an instruction set that this level does not have; layers that exist stay as "
        "they\nare. 'auto' takes that back. Raises ValueError.");
  m.def(
      "kernels",
      [] {
        nb::list rows;
        for (const gemm::Kernel& kernel : gemm::kernel_table()) {
          nb::dict row;
          const std::string reason = gemm::why_unavailable(kernel);
          row["name"] = kernel.name;
          row["weights"] = gemm::format_name(kernel.format);
          row["isa"] = runtime::names_of(kernel.isa, " ");
          row["available"] = reason.empty();
          row["automatic"] = gemm::is_automatic(*kernel.backend);
          row["reason"] = reason;
          rows.append(row);
        }
        return rows;
      },
      "The kernel table, best first.");
  m.def("force_kernel", &gemm::force_kernel, nb::arg("name"),
        "From now on 'auto' is this kernel for its weight format, and loops that belong to no layer are those of its "
        "backend;\n'auto' takes that back. Raises ValueError.");
}

void def_threads(nb::module_& m) {
  m.def("allowed_cpus", &runtime::allowed_cpus,
        "CPUs that this process may run on; all that are online where the system "
        "does not say.");
  m.def("affinity_refused", &runtime::affinity_refused,
        "Why the system does not say which CPUs this process may run on; empty where it does.");
  m.def("default_threads", &runtime::default_threads, "min(CPU affinity, cgroup quota).");
  m.def("set_threads", &runtime::set_threads, nb::arg("threads"), nb::arg("crowded") = false,
        "Threads that compute, the caller included; 0: default_threads(). No more than CPUs, unless `crowded`.");
  m.def("compute_alone", &runtime::compute_alone, nb::arg("alone"),
        "Whether what the calling thread packs from now on, it packs by itself, beside other threads.");
  m.def("threads", [] { return runtime::pool()->threads(); }, "Threads in use.");
  m.def(
      "fetched_bytes", [] { return runtime::pool()->fetched(); },
      "Bytes of weights that idle workers of the pool have asked for ahead of a call, so far.");
  m.def("sessions", &runtime::Session::count, "How many turns at the pool there have been, for tests.");
  m.def("set_nodes", &runtime::set_nodes, nb::arg("virtual_nodes"),
        "Virtual NUMA nodes that threads and the weights allocated from now on are cut into; 0: the machine's nodes.");
  m.def(
      "nodes",
      [] {
        nb::list rows;
        for (const runtime::Node& node : runtime::nodes()) rows.append(nb::make_tuple(node.id, node.cpus));
        return rows;
      },
      "(id, CPUs) of each node that weights are cut for; id -1 where memory is not placed: one node, or virtual ones.");
  m.def(
      "find_nodes",
      [](const std::string& root, const Sequence<int>& cpus, const Sequence<int>& mems) {
        nb::list rows;
        for (const runtime::Node& node : runtime::find_nodes(root, vector_of(cpus, "cpus"), vector_of(mems, "mems")))
          rows.append(nb::make_tuple(node.id, node.cpus, node.cores));
        return rows;
      },
      nb::arg("root"), nb::arg("cpus"), nb::arg("mems"),
      "The same as read under another root, for these CPUs and nodes with memory ([]: all), with the first CPU of "
      "each\n"
      "CPU's core ([]: not known).");
}

void def_memory(nb::module_& m) {
  auto room = [](const runtime::Headroom& found) { return nb::make_tuple(found.bytes, found.limit); };
  m.def(
      "memory_headroom", [room](const std::string& root) { return room(runtime::memory_headroom(root)); },
      nb::arg("root") = "",
      "(bytes that this process can still fill, the limit that leaves no more), as read under a root.");
  m.def(
      "address_headroom", [room] { return room(runtime::address_headroom()); }, "The same of addresses, by RLIMIT_AS.");
  m.def(
      "level2_share",
      [](const std::string& root, const Sequence<int>& cpus) {
        return runtime::level2_share(root, vector_of(cpus, "cpus"));
      },
      nb::arg("root"), nb::arg("cpus"),
      "Bytes of the second cache for each of these CPUs, the least of all, as read under a root; 0: not known.");
}

void def_measurements(nb::module_& m) {
  m.def("empty_call_us", &gemm::empty_call_us, nb::arg("calls"), nb::arg("pause_us"), nb::arg("everyone"),
        nb::call_guard<WithoutGil>(),
        "Median microseconds of a call with an empty task for each worker, `pause_us` between two calls; with "
        "`everyone`,\neach worker runs one of them.");
  m.def("read_bandwidth", &gemm::read_bandwidth, nb::arg("bytes_per_thread"), nb::call_guard<WithoutGil>(),
        "Bytes a second that all threads read together, measured now.");
  m.def("multiply_units", &gemm::multiply_units, "Multiply units of this CPU.");
  m.def("multiply_rate", &gemm::multiply_rate, nb::arg("unit"), nb::call_guard<WithoutGil>(),
        "Operations a second of all threads on one unit, operands in registers, measured now.");
  m.def(
      "take_outliers", &gemm::take_outliers, nb::arg("take"),
      "Whether int8 and int4 layers take outliers out of what they quantise from now on; for measurements of what that "
      "costs.");
  m.def("trace_start", &runtime::trace_start,
        "Record from now on when experts compute; the first 65,536 spans are kept.");
  m.def(
      "trace_stop",
      [] {
        nb::list spans;
        for (const runtime::Span& span : runtime::trace_stop())
          spans.append(
              nb::make_tuple(span.begin_ns, span.end_ns, reinterpret_cast<uintptr_t>(span.owner), span.tokens));
        return spans;
      },
      "Stop, and give (begin, end, Experts.id, tokens) of each span; nanoseconds of the system clock.");
  m.def("uses_start", &runtime::uses_start, "Forget what was counted, and count from now on which experts compute.");
  m.def("uses_stop", &runtime::uses_stop, "Count no more.");
  m.def(
      "uses",
      [] {
        nb::list found;
        for (const auto& [owner, counts] : runtime::uses())
          found.append(nb::make_tuple(reinterpret_cast<uintptr_t>(owner), counts));
        return found;
      },
      "(Experts.id, how often each of its experts was chosen since uses_start()) of each that computed since then.");
}

}  // namespace

void init_system(nb::module_& m) {
  def_cpu(m);
  def_threads(m);
  def_memory(m);
  def_measurements(m);
}

}  // namespace ktinject
