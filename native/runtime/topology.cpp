#include "runtime/topology.hpp"

#include <dirent.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>

#include "runtime/system_files.hpp"

namespace ktinject::runtime {
namespace {

// Of <linux/mempolicy.h>, which need not be installed.
constexpr int kPreferred = 1, kInterleave = 3;
constexpr unsigned long kMemsAllowed = 4;
constexpr int kWordBits = static_cast<int>(sizeof(unsigned long)) * CHAR_BIT;

struct NodeMask {
  unsigned long words[kMostNodes / kWordBits] = {};
  void set(int node) { words[node / kWordBits] |= 1ul << node % kWordBits; }
  bool has(int node) const { return (words[node / kWordBits] >> node % kWordBits & 1) != 0; }
};

// Closed by whatever way a function is left.
template <class Handle, int (*kClose)(Handle*)>
struct Closer {
  void operator()(Handle* handle) const { kClose(handle); }
};
template <class Handle, int (*kClose)(Handle*)>
using Closed = std::unique_ptr<Handle, Closer<Handle, kClose>>;

// Whether a node's meminfo says that it has memory; true where there is no such file.
bool has_memory(const std::string& folder) {
  const Closed<std::FILE, std::fclose> file(std::fopen((folder + "/meminfo").c_str(), "re"));
  if (file == nullptr) return true;
  long long kib = -1;
  char line[256];
  while (kib < 0 && std::fgets(line, sizeof line, file.get()) != nullptr)
    if (const char* total = std::strstr(line, "MemTotal:")) kib = std::atoll(total + 9);
  return kib != 0;
}

// Orders a node's CPUs as workers take them: of each core one CPU, and of these the fastest kind first, before the
// second of any. So fewer threads than CPUs have a core each. Where the system does not say, they stay as they are.
void order_cpus(const std::string& root, Node& node) {
  struct Cpu {
    int rank;       // of the node's CPUs of this core, how many come before it
    long slowness;  // of its kind
    int number;
    int core;
    bool operator<(const Cpu& other) const {
      return std::tie(rank, slowness, number) < std::tie(other.rank, other.slowness, other.number);
    }
  };
  const std::string devices = root + "/sys/devices/";
  const std::vector<int> fast = number_list(first_line(devices + "cpu_core/cpus"));  // of Intel's hybrid CPUs
  const auto is_in = [](const std::vector<int>& list, int cpu) {
    return std::find(list.begin(), list.end(), cpu) != list.end();
  };
  std::vector<Cpu> cpus;
  bool are_cores_known = !node.cpus.empty();
  for (const int number : node.cpus) {
    const std::string folder = devices + "system/cpu/cpu" + std::to_string(number);
    std::vector<int> siblings = number_list(first_line(folder + "/topology/core_cpus_list"));
    if (siblings.empty()) siblings = number_list(first_line(folder + "/topology/thread_siblings_list"));
    are_cores_known = are_cores_known && !siblings.empty();
    const auto before =
        std::count_if(siblings.begin(), siblings.end(), [&](int cpu) { return cpu < number && is_in(node.cpus, cpu); });
    const long slowness = fast.empty()          ? -std::atol(first_line(folder + "/cpu_capacity").c_str())
                          : is_in(fast, number) ? 0
                                                : 1;
    cpus.push_back({static_cast<int>(before), slowness, number,
                    siblings.empty() ? number : *std::min_element(siblings.begin(), siblings.end())});
  }
  std::sort(cpus.begin(), cpus.end());
  node.cpus.clear();
  for (const Cpu& cpu : cpus) {
    node.cpus.push_back(cpu.number);
    if (are_cores_known) node.cores.push_back(cpu.core);
  }
}

std::vector<int> allowed_memory() {
  NodeMask mask;
  std::vector<int> nodes;
  if (syscall(SYS_get_mempolicy, nullptr, mask.words, static_cast<unsigned long>(kMostNodes), nullptr, kMemsAllowed) ==
      0)
    for (int node = 0; node < kMostNodes; ++node)
      if (mask.has(node)) nodes.push_back(node);
  return nodes;
}

std::string bind(void* data, size_t bytes, int mode, const NodeMask& mask) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto start = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes + page - 1) / page * page;
  if (bytes == 0 ||
      syscall(SYS_mbind, start, end - start, mode, mask.words, static_cast<unsigned long>(kMostNodes) + 1, 0) == 0)
    return {};
  return std::strerror(errno);
}

}  // namespace

CpuMask::CpuMask(const std::vector<int>& cpus) : words_(1) {
  for (const int cpu : cpus) {
    const auto word = static_cast<size_t>(cpu / kWordBits);
    if (word >= words_.size()) words_.resize(word + 1);
    words_[word] |= 1ul << cpu % kWordBits;
  }
}

CpuMask CpuMask::of(int thread) {
  constexpr size_t kEnough = (size_t{1} << 20) / kWordBits;
  CpuMask mask;
  for (size_t words = 16; words <= kEnough; words *= 2) {  // until the kernel's own mask fits
    mask.words_.assign(words, 0);
    if (sched_getaffinity(thread, mask.bytes(), reinterpret_cast<cpu_set_t*>(mask.words_.data())) == 0) return mask;
    if (errno != EINVAL) break;
  }
  return CpuMask();
}

std::vector<int> CpuMask::cpus() const {
  std::vector<int> cpus;
  for (size_t word = 0; word < words_.size(); ++word)
    for (int bit = 0; bit < kWordBits; ++bit)
      if (words_[word] >> bit & 1) cpus.push_back(static_cast<int>(word) * kWordBits + bit);
  return cpus;
}

std::vector<int> allowed_cpus() {
  std::vector<int> cpus = CpuMask::of(getpid()).cpus();
  if (cpus.empty()) cpus = number_list(first_line("/sys/devices/system/cpu/online"));
  if (cpus.empty()) {
    cpus.resize(static_cast<size_t>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN))));
    std::iota(cpus.begin(), cpus.end(), 0);
  }
  return cpus;
}

std::string affinity_refused() {
  errno = 0;
  return CpuMask::of(getpid()).cpus().empty() ? std::strerror(errno) : "";
}

std::vector<Node> find_nodes(const std::string& root, const std::vector<int>& cpus, const std::vector<int>& mems) {
  const std::string base = root + "/sys/devices/system/node";
  std::vector<int> ids;
  if (const Closed<DIR, closedir> folder{opendir(base.c_str())}) {
    while (const dirent* entry = readdir(folder.get())) {
      int id = 0, end = 0;
      if (std::sscanf(entry->d_name, "node%d%n", &id, &end) == 1 && entry->d_name[end] == '\0' && id >= 0 &&
          id < kMostNodes)
        ids.push_back(id);
    }
  }
  std::sort(ids.begin(), ids.end());
  std::vector<Node> nodes, lenders;
  for (const int id : ids) {
    const std::string folder = base + "/node" + std::to_string(id);
    Node node{id, {}, {}};
    for (const int cpu : number_list(first_line(folder + "/cpulist")))
      if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) node.cpus.push_back(cpu);
    if (node.cpus.empty()) continue;
    order_cpus(root, node);
    const bool allowed = mems.empty() || std::find(mems.begin(), mems.end(), id) != mems.end();
    (allowed && has_memory(folder) ? nodes : lenders).push_back(std::move(node));
  }
  if (nodes.empty()) {
    Node all{-1, cpus, {}};
    order_cpus(root, all);
    return {std::move(all)};
  }
  for (const Node& lender : lenders) {
    // The file lists the distances to all nodes that are online, in order of id.
    const std::string line = first_line(base + "/node" + std::to_string(lender.id) + "/distance");
    std::vector<int> distance;
    for (const char* at = line.c_str();;) {
      char* end = nullptr;
      const long value = std::strtol(at, &end, 10);
      if (end == at) break;
      distance.push_back(static_cast<int>(value));
      at = end;
    }
    auto far = [&](const Node& node) {
      const auto at = static_cast<size_t>(std::lower_bound(ids.begin(), ids.end(), node.id) - ids.begin());
      return at < distance.size() ? distance[at] : INT_MAX;
    };
    Node& nearest =
        *std::min_element(nodes.begin(), nodes.end(), [&](const Node& a, const Node& b) { return far(a) < far(b); });
    nearest.cpus.insert(nearest.cpus.end(), lender.cpus.begin(), lender.cpus.end());
    nearest.cores.insert(nearest.cores.end(), lender.cores.begin(), lender.cores.end());
    if (nearest.cores.size() != nearest.cpus.size()) nearest.cores.clear();
  }
  if (nodes.size() == 1) nodes[0].id = -1;
  return nodes;
}

std::vector<Node> usable_nodes(const std::vector<int>& cpus) { return find_nodes("", cpus, allowed_memory()); }

std::vector<Node> virtual_nodes(int count, const std::vector<int>& cpus) {
  std::vector<Node> nodes(static_cast<size_t>(count));
  for (size_t i = 0; i < cpus.size(); ++i) nodes[i * nodes.size() / cpus.size()].cpus.push_back(cpus[i]);
  return nodes;
}

double quota_cpus() {
  double quota = INFINITY, maximum = 0, period = 0;
  for (const std::string& folder : cgroup_folders("")) {
    const std::string line = first_line(folder + "/cpu.max");
    if (std::sscanf(line.c_str(), "%lf %lf", &maximum, &period) == 2 && period > 0)
      quota = std::min(quota, maximum / period);
  }
  const std::string v1 = "/sys/fs/cgroup/cpu/cpu.cfs_";
  if (std::sscanf(first_line(v1 + "quota_us").c_str(), "%lf", &maximum) == 1 && maximum > 0 &&
      std::sscanf(first_line(v1 + "period_us").c_str(), "%lf", &period) == 1 && period > 0)
    quota = std::min(quota, maximum / period);
  return quota;
}

size_t level2_share(const std::string& root, const std::vector<int>& cpus) {
  size_t least = 0;
  std::vector<int> seen;  // those that share a cache that was looked at
  for (const int cpu : cpus) {
    if (std::find(seen.begin(), seen.end(), cpu) != seen.end()) continue;
    for (int index = 0; index < 8; ++index) {
      const std::string folder =
          root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index);
      const std::string level = first_line(folder + "/level");
      if (level.empty()) break;
      if (level != "2" || first_line(folder + "/type") == "Instruction") continue;
      const std::vector<int> sharing = number_list(first_line(folder + "/shared_cpu_list"));
      size_t bytes = 0;
      char unit = '\0';
      if (std::sscanf(first_line(folder + "/size").c_str(), "%zu%c", &bytes, &unit) < 1 || sharing.empty()) continue;
      bytes <<= unit == 'K' ? 10 : unit == 'M' ? 20 : 0;
      const size_t share = bytes / sharing.size();
      if (share > 0 && (least == 0 || share < least)) least = share;
      seen.insert(seen.end(), sharing.begin(), sharing.end());
      break;
    }
  }
  return least;
}

std::string place_on_node(void* data, size_t bytes, int node) {
  NodeMask mask;
  mask.set(node);
  return bind(data, bytes, kPreferred, mask);
}

std::string interleave(void* data, size_t bytes, const std::vector<Node>& nodes) {
  NodeMask mask;
  for (const Node& node : nodes) mask.set(node.id);
  return bind(data, bytes, kInterleave, mask);
}

std::vector<PagesOnNode> pages_by_node(const void* data, size_t bytes, size_t samples) {
  if (bytes == 0 || samples == 0) return {};
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  std::vector<void*> pages;
  for (size_t i = 0; i < samples; ++i) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(data) + bytes / samples * i;
    pages.push_back(reinterpret_cast<void*>(at / page * page));
  }
  std::vector<int> status(samples, -1);
  // Without target nodes the call moves nothing and only says where the pages are.
  if (syscall(SYS_move_pages, 0, samples, pages.data(), nullptr, status.data(), 0) != 0) return {};
  std::vector<PagesOnNode> found;
  for (const int node : status) {
    if (node < 0) continue;  // not touched yet
    const auto same = std::find_if(found.begin(), found.end(), [&](const PagesOnNode& f) { return f.node == node; });
    if (same != found.end()) ++same->pages;
    else found.push_back({node, 1});
  }
  return found;
}

}  // namespace ktinject::runtime
