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

// The first line of a small file that starts with `prefix`, without its end; empty if there is none. By C streams:
// those of C++ keep their locale in a global that a second copy of libstdc++ in the process can spoil.
std::string first_line(const std::string& path, const char* prefix = "") {
  const Closed<std::FILE, std::fclose> file(std::fopen(path.c_str(), "re"));
  if (file == nullptr) return {};
  std::string line, found;  // lists of CPUs and of distances may be of any length
  char part[4096];
  while (found.empty() && std::fgets(part, sizeof part, file.get()) != nullptr) {
    line += part;
    if (line.back() != '\n' && std::feof(file.get()) == 0) continue;
    if (line.starts_with(prefix)) found = line;
    line.clear();
  }
  if (!found.empty() && found.back() == '\n') found.pop_back();
  return found;
}

// "0-3,8" as 0 1 2 3 8.
std::vector<int> number_list(const std::string& text) {
  std::vector<int> numbers;
  for (const char* at = text.c_str(); *at != '\0';) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at) break;
    long last = first;
    if (*end == '-') last = std::strtol(end + 1, &end, 10);
    for (long number = first; number <= last; ++number) numbers.push_back(static_cast<int>(number));
    at = *end == ',' ? end + 1 : end;
  }
  return numbers;
}

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

std::vector<int> allowed_cpus() { return CpuMask::of(getpid()).cpus(); }

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
    Node node{id, {}};
    for (const int cpu : number_list(first_line(folder + "/cpulist")))
      if (std::find(cpus.begin(), cpus.end(), cpu) != cpus.end()) node.cpus.push_back(cpu);
    if (node.cpus.empty()) continue;
    const bool allowed = mems.empty() || std::find(mems.begin(), mems.end(), id) != mems.end();
    (allowed && has_memory(folder) ? nodes : lenders).push_back(std::move(node));
  }
  if (nodes.empty()) return {Node{-1, cpus}};
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
  }
  if (nodes.size() == 1) nodes[0].id = -1;
  return nodes;
}

std::vector<Node> usable_nodes() { return find_nodes("", allowed_cpus(), allowed_memory()); }

std::vector<Node> virtual_nodes(int count, const std::vector<int>& cpus) {
  std::vector<Node> nodes(static_cast<size_t>(count));
  for (size_t i = 0; i < cpus.size(); ++i) nodes[i * nodes.size() / cpus.size()].cpus.push_back(cpus[i]);
  return nodes;
}

double quota_cpus() {
  double quota = INFINITY, maximum = 0, period = 0;
  std::string path = first_line("/proc/self/cgroup", "0::");
  path.erase(0, 3);
  for (;;) {  // a parent's limit binds its children
    const std::string line = first_line("/sys/fs/cgroup" + path + "/cpu.max");
    if (std::sscanf(line.c_str(), "%lf %lf", &maximum, &period) == 2 && period > 0)
      quota = std::min(quota, maximum / period);
    if (path.empty() || path == "/") break;
    path.erase(path.rfind('/'));
  }
  const std::string v1 = "/sys/fs/cgroup/cpu/cpu.cfs_";
  if (std::sscanf(first_line(v1 + "quota_us").c_str(), "%lf", &maximum) == 1 && maximum > 0 &&
      std::sscanf(first_line(v1 + "period_us").c_str(), "%lf", &period) == 1 && period > 0)
    quota = std::min(quota, maximum / period);
  return quota;
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
