// Lists of arguments. nanobind's own casters for std::vector grow it where nothing may be thrown, so a process that is
// out of memory would end there. Here it is a MemoryError.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

namespace ktinject {

// An argument, which says in signatures what it holds.
template <class T>
using Sequence = nanobind::typed<nanobind::sequence, T>;

// Raises TypeError for an item that is no T.
template <class T>
std::vector<T> vector_of(const Sequence<T>& items, const char* name) {
  std::vector<T> found;
  found.reserve(nanobind::len(items));
  for (nanobind::handle item : items) {
    T value;
    if (!nanobind::try_cast<T>(item, value))
      throw nanobind::type_error((std::string(name) + "[" + std::to_string(found.size()) + "]: found " +
                                  nanobind::type_name(item.type()).c_str() + ", which is not taken")
                                     .c_str());
    found.push_back(std::move(value));
  }
  return found;
}

}  // namespace ktinject
