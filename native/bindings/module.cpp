#include <nanobind/nanobind.h>

#include "bindings/subjects.hpp"

NB_MODULE(_native, m) {
  // A model that lives until the interpreter ends, as in any script, is no leak.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native core of ktinject.";
  ktinject::init_system(m);
  ktinject::init_experts(m);
  ktinject::init_handoff(m);
  ktinject::init_linear(m);
  ktinject::init_int4_linear(m);
  ktinject::init_decode_ops(m);
  ktinject::init_decoder(m);
  ktinject::init_watch(m);
  ktinject::init_streamed(m);
}
