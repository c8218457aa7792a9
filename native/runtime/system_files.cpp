#include "runtime/system_files.hpp"

#include <cstdio>
#include <cstdlib>
#include <memory>

namespace ktinject::runtime {
namespace {

struct Closer {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

}  // namespace

std::string first_line(const std::string& path, const char* prefix) {
  const std::unique_ptr<std::FILE, Closer> file(std::fopen(path.c_str(), "re"));
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

std::vector<std::string> cgroup_folders(const std::string& root) {
  std::vector<std::string> folders;
  std::string path = first_line(root + "/proc/self/cgroup", "0::");
  path.erase(0, 3);
  for (;;) {  // a parent's limit binds its children
    folders.push_back(root + "/sys/fs/cgroup" + path);
    if (path.empty() || path == "/") return folders;
    path.erase(path.rfind('/'));
  }
}

}  // namespace ktinject::runtime
