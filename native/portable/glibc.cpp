// For wheels: what this module and its libstdc++ take from glibc is named by the version that glibc 2.28 has, too. A
// linker would take the newest one, and these functions have got a new version where they moved from libpthread and
// libdl to libc.
//
// What is defined here is hidden: nobody else finds it.
#include <pthread.h>
#include <sched.h>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))
#define OLD(result, name, version, parameters)                   \
  extern "C" result name##_of_old parameters noexcept;           \
  __asm__(".symver " #name "_of_old, " #name "@GLIBC_" version); \
  HIDDEN result name parameters noexcept

using Start = void* (*)(void*);
using Once = void (*)();

OLD(int, pthread_create, "2.2.5", (pthread_t * thread, const pthread_attr_t* attributes, Start start, void* argument)) {
  return pthread_create_of_old(thread, attributes, start, argument);
}
OLD(int, pthread_detach, "2.2.5", (pthread_t thread)) { return pthread_detach_of_old(thread); }
OLD(int, pthread_setname_np, "2.12", (pthread_t thread, const char* name)) {
  return pthread_setname_np_of_old(thread, name);
}
OLD(int, pthread_setaffinity_np, "2.3.4", (pthread_t thread, size_t size, const cpu_set_t* cpus)) {
  return pthread_setaffinity_np_of_old(thread, size, cpus);
}
OLD(void*, dlsym, "2.2.5", (void* library, const char* name)) { return dlsym_of_old(library, name); }

// These may be left by an exception, or by a thread that is cancelled.
extern "C" int pthread_join_of_old(pthread_t thread, void** result);
__asm__(".symver pthread_join_of_old, pthread_join@GLIBC_2.2.5");
HIDDEN int pthread_join(pthread_t thread, void** result) { return pthread_join_of_old(thread, result); }

extern "C" int pthread_once_of_old(pthread_once_t* control, Once work);
__asm__(".symver pthread_once_of_old, pthread_once@GLIBC_2.2.5");
HIDDEN int pthread_once(pthread_once_t* control, Once work) { return pthread_once_of_old(control, work); }

// Since glibc 2.32: whether the process has one thread. "No" is always right, and costs an atomic operation.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;
