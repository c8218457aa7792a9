#include <nanobind/nanobind.h>
NB_MODULE(_native, m) { m.def("version", [] { return "0.1.0"; }); }
