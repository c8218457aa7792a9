// Which CPUs and NUMA nodes this process may use, and memory placed on a node. The system calls are made directly, so
// no library is needed.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>
#include <vector>

namespace ktinject::runtime {

inline constexpr int kMostNodes = 1024;  // the kernel's own limit

// A part of the machine with memory of its own. `id` is the kernel's number, -1 where the memory is not to be placed:
// on a machine with one node, and for virtual nodes, which share one node's CPUs and memory.
struct Node {
  int id = -1;
  std::vector<int> cpus;   // in the order in which workers take them
  std::vector<int> cores;  // of each CPU, the first CPU of its core; empty where that is not known
};

// Any number of CPUs, as the system's calls take them; cpu_set_t ends at 1,024.
class CpuMask {
 public:
  // Throws std::bad_alloc.
  explicit CpuMask(const std::vector<int>& cpus = {});
  // Of a thread (0: the calling one); empty where the system does not say.
  static CpuMask of(int thread);

  std::vector<int> cpus() const;
  size_t bytes() const { return words_.size() * sizeof(unsigned long); }
  const cpu_set_t* get() const { return reinterpret_cast<const cpu_set_t*>(words_.data()); }

 private:
  std::vector<unsigned long> words_;
};

// CPUs this process may run on, in order: those of its first thread, for others may have narrowed their own. All that
// are online where the system does not say; affinity_refused() is then its reason, and empty else.
std::vector<int> allowed_cpus();
std::string affinity_refused();

// The nodes that have both CPUs and memory this process may use, in order of id; ids may have gaps. A node with memory
// only is left out. A node with CPUs only lends them to the nearest other. One node {-1, cpus} where the system does
// not say. `root` is where sys/ is looked for, `mems` the ids of the nodes whose memory is allowed (empty: all). A
// node's CPUs are ordered: one of each core before the second of any, and of these the fastest kind first.
std::vector<Node> find_nodes(const std::string& root, const std::vector<int>& cpus, const std::vector<int>& mems);

// find_nodes() for this process, which may use these CPUs.
std::vector<Node> usable_nodes(const std::vector<int>& cpus);

// `count` virtual nodes over these CPUs.
std::vector<Node> virtual_nodes(int count, const std::vector<int>& cpus);

// CPUs' worth of run time that the cgroups allow; infinity where nothing limits it.
double quota_cpus();

// Bytes of the second cache that each of these CPUs has where all that share one use it alike, the least of all CPUs; 0
// where the system does not say.
size_t level2_share(const std::string& root, const std::vector<int>& cpus);

// Asks for the untouched pages of [data, data + bytes) on a node, or in turns on all of these. Empty if the kernel
// agreed, else its reason: containers may forbid it. Where a node is full, the kernel takes another.
std::string place_on_node(void* data, size_t bytes, int node);
std::string interleave(void* data, size_t bytes, const std::vector<Node>& nodes);

// Of the touched pages of [data, data + bytes), looked at `samples` times at even distances: how many lie on each node,
// as {node, pages}; empty where the kernel does not say.
struct PagesOnNode {
  int node;
  size_t pages;
};
std::vector<PagesOnNode> pages_by_node(const void* data, size_t bytes, size_t samples);

}  // namespace ktinject::runtime
