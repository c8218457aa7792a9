// Small files of /proc and /sys.
#pragma once

#include <string>
#include <vector>

namespace ktinject::runtime {

// The first line of a small file that starts with `prefix`, without its end; empty if there is none. By C streams:
// those of C++ keep their locale in a global that a second copy of libstdc++ in the process can spoil.
std::string first_line(const std::string& path, const char* prefix = "");

// "0-3,8" as 0 1 2 3 8.
std::vector<int> number_list(const std::string& text);

// The folder of a path's cgroup (version 2) and those above it, below `root`; the last is the mount itself.
std::vector<std::string> cgroup_folders(const std::string& root);

}  // namespace ktinject::runtime
