#include <dlfcn.h>
#include <nanobind/eval.h>
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "bindings/arrays.hpp"
#include "bindings/subjects.hpp"
#include "bindings/waiting.hpp"

namespace ktinject {
namespace {

#ifdef Py_LIMITED_API
// The stable ABI has no call for it, and all interpreters have this one. Where one has not, nothing is checked.
bool holds_gil() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}
#else
bool holds_gil() {
  const PyThreadState* const mine = PyGILState_GetThisThreadState();
#if PY_VERSION_HEX >= 0x030d0000
  return mine != nullptr && mine == PyThreadState_GetUnchecked();
#else
  return mine != nullptr && mine == _PyThreadState_UncheckedGet();
#endif
}
#endif

void refuse_with_gil() {
  if (holds_gil())
    throw std::logic_error(
        "a call waited for its turn with the GIL, which whoever has the turn may need: a binding "
        "lacks its call guard, WithoutGil");
}

}  // namespace

// A function that does nothing. Made when the module is: making it runs code, and another thread may get the GIL
// meanwhile, which would wait for a static variable's initialisation with it.
static PyObject* nothing = nullptr;

void raise_pending_signal() {
  nanobind::gil_scoped_acquire acquire;
  const runtime::Denormals denormals(runtime::Denormals::kCount);  // Python computes as it always does
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
  // An exception that another thread sends this one (ktinject/ending.py) is raised by whatever code of Python runs
  // next.
  nanobind::steal(PyObject_CallNoArgs(nothing));
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
}

}  // namespace ktinject

namespace ktinject {

nb::object exported(nb::handle source) noexcept {
  static PyObject *tensor = nullptr, *to_dlpack = nullptr;  // with the GIL; they live as long as the process
  if (tensor == nullptr) {
    const auto torch = nb::steal(PyImport_GetModule(nb::str("torch").ptr()));
    if (!torch.is_valid()) return nb::borrow(source);  // nobody has imported it, so this is no tensor
    const auto core = nb::steal(PyObject_GetAttrString(torch.ptr(), "_C"));
    if (core.is_valid()) to_dlpack = PyObject_GetAttrString(core.ptr(), "_to_dlpack");
    if (to_dlpack != nullptr) tensor = PyObject_GetAttrString(torch.ptr(), "Tensor");
    PyErr_Clear();
  }
  if (tensor == nullptr || !PyObject_TypeCheck(source.ptr(), reinterpret_cast<PyTypeObject*>(tensor)))
    return nb::borrow(source);
  auto capsule = nb::steal(PyObject_CallFunctionObjArgs(to_dlpack, source.ptr(), nullptr));
  if (!capsule.is_valid()) PyErr_Clear();
  return capsule;
}

}  // namespace ktinject

NB_MODULE(_native, m) {
  ktinject::nothing = nanobind::eval("lambda: None", nanobind::dict()).release().ptr();
  ktinject::runtime::set_wait_guard(ktinject::refuse_with_gil);
  // A model that lives until the interpreter ends, as in any script, is no leak.
  nanobind::set_leak_warnings(false);
  m.doc() = "Native core of ktinject.";
  ktinject::init_system(m);
  ktinject::init_devices(m);
  ktinject::init_experts(m);
  ktinject::init_handoff(m);
  ktinject::init_expert_cache(m);
  ktinject::init_linear(m);
  ktinject::init_int4_linear(m);
  ktinject::init_decode_ops(m);
  ktinject::init_decoder(m);
  ktinject::init_prompts(m);
  ktinject::init_watch(m);
  ktinject::init_streamed(m);
}
