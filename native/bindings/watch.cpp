// Whether Python objects still hold what was written down of them (ktinject/watch.py). In C++, since it is asked before
// every decode step: a model of 48 layers has some 15,000 attributes.
#include "bindings/subjects.hpp"

namespace ktinject {
namespace {

namespace nb = nanobind;

// What an entry says; the numbers are those of ktinject/watch.py.
enum Kind : long { kAttributes, kItems, kElements, kLookups, kClass, kTensor };

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
    if (!value.is_valid()) PyErr_Clear();
    if (value.ptr() != PyTuple_GET_ITEM(pairs, i + 1)) return false;
  }
  return true;
}

bool same_attributes(PyObject* object, PyObject* entry) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != PyTuple_GET_ITEM(entry, 2)) return false;
  nb::object dict = nb::steal(PyObject_GenericGetDict(object, nullptr));
  if (!dict.is_valid()) throw nb::python_error();
  return same_dict(dict.ptr(), PyTuple_GET_ITEM(entry, 3), PyTuple_GET_ITEM(entry, 4));
}

bool same_tensor(PyObject* tensor, PyObject* address) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  nb::object found = nb::steal(PyObject_CallMethodNoArgs(tensor, name));
  if (!found.is_valid()) throw nb::python_error();
  const int same = PyObject_RichCompareBool(found.ptr(), address, Py_EQ);
  if (same < 0) throw nb::python_error();
  return same == 1;
}

bool is_same(PyObject* entry, PyObject* root) {
  if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) < 3) throw nb::type_error("watch: an entry is a tuple");
  PyObject* holder = PyTuple_GET_ITEM(entry, 1);
  if (holder == Py_None) holder = root;
  PyObject* noted = PyTuple_GET_ITEM(entry, 2);
  switch (PyLong_AsLong(PyTuple_GET_ITEM(entry, 0))) {
    case kAttributes:
      return same_attributes(holder, entry);
    case kItems:
      return same_dict(holder, noted, nullptr);
    case kElements:
      return same_elements(holder, noted);
    case kLookups:
      return same_lookups(holder, noted);
    case kClass:
      return same_class(holder, noted);
    case kTensor:
      return same_tensor(holder, noted);
    default:
      throw nb::value_error("watch: an entry of another kind");
  }
}

// A number, or -1. The list may not change meanwhile; what it holds is kept by it.
Py_ssize_t first_change(nb::list entries, nb::object root) {
  for (size_t i = 0; i < entries.size(); ++i)
    if (!is_same(PyList_GET_ITEM(entries.ptr(), static_cast<Py_ssize_t>(i)), root.ptr()))
      return static_cast<Py_ssize_t>(i);
  return -1;
}

}  // namespace

void init_watch(nb::module_& m) {
  m.def("first_change", &first_change, nb::arg("entries"), nb::arg("root"),
        "The index of the first entry of ktinject.watch.Watch that is true no more, or -1. None as an entry's object "
        "stands for root.");
}

}  // namespace ktinject
