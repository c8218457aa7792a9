#include <nanobind/nanobind.h>

#include "bindings/subjects.hpp"

NB_MODULE(_native, m) {
  m.doc() = "Native core of ktinject.";
  ktinject::init_system(m);
  ktinject::init_experts(m);
}
