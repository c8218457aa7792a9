// Whether Python objects still hold what was written down of them (ktinject/generation/watch.py). In C++, since it is
// asked before every decode step: a model of 48 layers has some 20,000 attributes.
#include <cstddef>
#include <cstring>
#include <vector>

#include "bindings/subjects.hpp"

namespace ktinject {
namespace {

namespace nb = nanobind;

// In place of macros that the stable ABI does not have. What they are given is a tuple or a list, and is long enough.
#ifdef Py_LIMITED_API
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_GET_ITEM PyList_GetItem
#endif

// What an entry says; the numbers are those of ktinject/generation/watch.py.
enum Kind : long { kAttributes, kItems, kElements, kLookups, kClass, kTensor, kEmpty };

// Python gives a dict and a class a number that no other state of it, nor of another one, ever has. Where the number is
// the one that was seen when all was found to be the same, it still is. 0: there is none, so it has to be looked at.
//
// The stable ABI does not name them. In the versions of Python that had been released when this was written they stand
// here, which builds for each of these check; of newer ones nothing is read.
constexpr size_t kNumberOfDict = 24, kNumberOfClass = 384;

#ifdef Py_LIMITED_API
const unsigned long python = Py_Version >> 16;  // that runs
const bool dicts_have = python < 0x030D, classes_have = python < 0x030E;
#else
constexpr bool dicts_have = PY_VERSION_HEX < 0x030D0000, classes_have = true;
static_assert(offsetof(PyTypeObject, tp_version_tag) == kNumberOfClass);
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static_assert(offsetof(PyDictObject, ma_version_tag) == kNumberOfDict);
#pragma GCC diagnostic pop
#endif
#endif

template <class Number>
uint64_t number_at(PyObject* object, size_t offset) {
  Number found;
  std::memcpy(&found, reinterpret_cast<const char*>(object) + offset, sizeof(found));
  return found;
}

uint64_t number_of_dict(PyObject* dict) { return dicts_have ? number_at<uint64_t>(dict, kNumberOfDict) : 0; }

uint64_t number_of_class(PyObject* type) {
  const bool has = (PyType_GetFlags(reinterpret_cast<PyTypeObject*>(type)) & Py_TPFLAGS_VALID_VERSION_TAG) != 0;
  return has && classes_have ? number_at<unsigned int>(type, kNumberOfClass) : 0;
}

bool is_ignored(PyObject* ignored, PyObject* key) {
  const int found = PySet_Contains(ignored, key);
  if (found < 0) throw nb::python_error();
  return found == 1;
}

// A dict whose keys come in another order than they did, or that differs.
bool same_in_any_order(PyObject* dict, PyObject* pairs, PyObject* ignored) {
  Py_ssize_t counted = 0, position = 0;
  PyObject *key, *value;
  while (PyDict_Next(dict, &position, &key, &value))
    if (ignored == nullptr || !is_ignored(ignored, key)) counted += 2;
  if (counted != PyTuple_GET_SIZE(pairs)) return false;
  for (Py_ssize_t i = 0; i < counted; i += 2) {
    value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(pairs, i));
    if (value == nullptr && PyErr_Occurred()) throw nb::python_error();
    if (value != PyTuple_GET_ITEM(pairs, i + 1)) return false;
  }
  return true;
}

// pairs: key, value, key, value …; keys in `ignored`, a frozenset or null, may come, go and change.
bool same_dict(PyObject* dict, PyObject* pairs, PyObject* ignored) {
  const Py_ssize_t n = PyTuple_GET_SIZE(pairs);
  Py_ssize_t at = 0, position = 0;
  PyObject *key, *value;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (at < n && key == PyTuple_GET_ITEM(pairs, at) && value == PyTuple_GET_ITEM(pairs, at + 1)) at += 2;
    else if (ignored == nullptr || !is_ignored(ignored, key)) return same_in_any_order(dict, pairs, ignored);
  }
  return at == n;
}

bool same_elements(PyObject* list, PyObject* elements) {
  if (!PyList_Check(list) || PyList_GET_SIZE(list) != PyTuple_GET_SIZE(elements)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(elements); ++i)
    if (PyList_GET_ITEM(list, i) != PyTuple_GET_ITEM(elements, i)) return false;
  return true;
}

bool same_lookups(PyObject* dict, PyObject* pairs) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i += 2) {
    PyObject* value = PyDict_GetItemWithError(dict, PyTuple_GET_ITEM(pairs, i));
    if (value == nullptr && PyErr_Occurred()) throw nb::python_error();
    if (value != PyTuple_GET_ITEM(pairs, i + 1)) return false;
  }
  return true;
}

bool same_class(PyObject* type, PyObject* pairs) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i += 2) {
    nb::object value = nb::steal(PyObject_GetAttr(type, PyTuple_GET_ITEM(pairs, i)));
    if (!value.is_valid()) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw nb::python_error();  // Ctrl-C in a metaclass's code
      PyErr_Clear();
    }
    if (value.ptr() != PyTuple_GET_ITEM(pairs, i + 1)) return false;
  }
  return true;
}

// Behind a step they are in no cache, and each is a place of its own in memory: so those further on are asked for now.
bool all_empty(PyObject* dicts) {
  constexpr Py_ssize_t kAhead = 24;
  const Py_ssize_t count = PyTuple_GET_SIZE(dicts);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(PyTuple_GET_ITEM(dicts, i + kAhead));
    if (PyDict_Size(PyTuple_GET_ITEM(dicts, i)) != 0) {
      if (PyErr_Occurred()) throw nb::python_error();
      return false;
    }
  }
  return true;
}

bool same_tensor(PyObject* tensor, PyObject* address) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  nb::object found = nb::steal(PyObject_CallMethodObjArgs(tensor, name, nullptr));
  if (!found.is_valid()) throw nb::python_error();
  const int same = PyObject_RichCompareBool(found.ptr(), address, Py_EQ);
  if (same < 0) throw nb::python_error();
  return same == 1;
}

// The numbers under which entries were last found to be true. Holds no Python object.
class Seen {
 public:
  // The first entry that is true no more, or -1. The list, which may not change, keeps alive what it names.
  Py_ssize_t first_change(nb::list entries, nb::object root) {
    seen_.resize(entries.size());
    const size_t count = seen_.size();
    auto entry_at = [&](size_t i) { return PyList_GET_ITEM(entries.ptr(), static_cast<Py_ssize_t>(i)); };
    for (size_t i = 0; i < count; ++i) {
      // A step has read gigabytes since these were last looked at. What entries further on will read is asked for now,
      // so that it is waited for once and not each time.
      if (i + 2 * kAhead < count) __builtin_prefetch(entry_at(i + 2 * kAhead));
      if (i + kAhead < count) {
        __builtin_prefetch(seen_[i + kAhead].holder);
        if (PyObject* entry = entry_at(i + kAhead); PyTuple_Check(entry) && PyTuple_GET_SIZE(entry) > 1)
          __builtin_prefetch(PyTuple_GET_ITEM(entry, 1));
      }
      if (!is_same(entry_at(i), root.ptr(), seen_[i])) return static_cast<Py_ssize_t>(i);
    }
    return -1;
  }

 private:
  static constexpr size_t kAhead = 12;  // entries
  struct Number {
    PyObject* holder = nullptr;  // only compared
    uint64_t number = 0;
  };

  template <class Compare>
  static bool look(PyObject* holder, uint64_t number, Number& seen, Compare&& compare) {
    if (number != 0 && number == seen.number && holder == seen.holder) return true;
    if (!compare()) return false;
    seen = {holder, number};
    return true;
  }

  static bool is_same(PyObject* entry, PyObject* root, Number& seen) {
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) < 3) throw nb::type_error("watch: an entry is a tuple");
    PyObject* holder = PyTuple_GET_ITEM(entry, 1);
    if (holder == Py_None) holder = root;
    PyObject* noted = PyTuple_GET_ITEM(entry, 2);
    switch (PyLong_AsLong(PyTuple_GET_ITEM(entry, 0))) {
      case kAttributes: {
        if (reinterpret_cast<PyObject*>(Py_TYPE(holder)) != noted) return false;
        nb::object dict = nb::steal(PyObject_GenericGetDict(holder, nullptr));
        if (!dict.is_valid()) throw nb::python_error();
        return look(dict.ptr(), number_of_dict(dict.ptr()), seen,
                    [&] { return same_dict(dict.ptr(), PyTuple_GET_ITEM(entry, 3), PyTuple_GET_ITEM(entry, 4)); });
      }
      case kItems:
        return look(holder, number_of_dict(holder), seen, [&] { return same_dict(holder, noted, nullptr); });
      case kLookups:
        return look(holder, number_of_dict(holder), seen, [&] { return same_lookups(holder, noted); });
      case kClass:
        return look(holder, number_of_class(holder), seen, [&] { return same_class(holder, noted); });
      case kElements:
        return same_elements(holder, noted);
      case kTensor:
        return same_tensor(holder, noted);
      case kEmpty:
        return all_empty(noted);
      default:
        throw nb::value_error("watch: an entry of another kind");
    }
  }

  std::vector<Number> seen_;
};

}  // namespace

void init_watch(nb::module_& m) {
  nb::class_<Seen>(m, "Seen", "What of the entries of ktinject.generation.watch.Watch was last found to be true.")
      .def(nb::init<>())
      .def("first_change", &Seen::first_change, nb::arg("entries"), nb::arg("root"),
           "The index of the first entry that is true no more, or -1. None as an entry's object stands for root.");
}

}  // namespace ktinject
