// For wheels: what this module, its libstdc++ and its CUDA runtime take from glibc is named by the version that
// glibc 2.28 has, too. A linker would take the newest one, and these functions have got a new one where they moved from
// libpthread, libdl and librt to libc.
//
// Each function here only jumps to the older one, so it needs no declaration. It is hidden: nobody else finds it.
#if !defined(__x86_64__) || !defined(__linux__)
#error "KTINJECT_PORTABLE is for Linux on x86-64"
#endif

#define OLD(name, version)                                                                                       \
  __asm__(".text\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name                       \
          ":\n  endbr64\n  jmp *" #name "_of_old@GOTPCREL(%rip)\n.size " #name ", . - " #name "\n.symver " #name \
          "_of_old, " #name "@GLIBC_" version)

OLD(dlclose, "2.2.5");
OLD(dlerror, "2.2.5");
OLD(dlopen, "2.2.5");
OLD(dlsym, "2.2.5");
OLD(dlvsym, "2.2.5");
OLD(pthread_condattr_setpshared, "2.2.5");
OLD(pthread_create, "2.2.5");
OLD(pthread_detach, "2.2.5");
OLD(pthread_getspecific, "2.2.5");
OLD(pthread_join, "2.2.5");
OLD(pthread_key_create, "2.2.5");
OLD(pthread_key_delete, "2.2.5");
OLD(pthread_kill, "2.2.5");
OLD(pthread_mutex_trylock, "2.2.5");
OLD(pthread_mutexattr_destroy, "2.2.5");
OLD(pthread_mutexattr_init, "2.2.5");
OLD(pthread_mutexattr_setpshared, "2.2.5");
OLD(pthread_mutexattr_settype, "2.2.5");
OLD(pthread_once, "2.2.5");
OLD(pthread_rwlock_destroy, "2.2.5");
OLD(pthread_rwlock_init, "2.2.5");
OLD(pthread_rwlock_rdlock, "2.2.5");
OLD(pthread_rwlock_timedrdlock, "2.2.5");
OLD(pthread_rwlock_timedwrlock, "2.2.5");
OLD(pthread_rwlock_tryrdlock, "2.2.5");
OLD(pthread_rwlock_trywrlock, "2.2.5");
OLD(pthread_rwlock_unlock, "2.2.5");
OLD(pthread_rwlock_wrlock, "2.2.5");
OLD(pthread_rwlockattr_destroy, "2.2.5");
OLD(pthread_rwlockattr_init, "2.2.5");
OLD(pthread_rwlockattr_setpshared, "2.2.5");
OLD(pthread_setspecific, "2.2.5");
OLD(pthread_spin_destroy, "2.2.5");
OLD(pthread_spin_init, "2.2.5");
OLD(pthread_spin_lock, "2.2.5");
OLD(pthread_spin_trylock, "2.2.5");
OLD(pthread_spin_unlock, "2.2.5");
OLD(sem_destroy, "2.2.5");
OLD(sem_init, "2.2.5");
OLD(sem_post, "2.2.5");
OLD(sem_timedwait, "2.2.5");
OLD(sem_trywait, "2.2.5");
OLD(sem_wait, "2.2.5");
OLD(shm_open, "2.2.5");
OLD(shm_unlink, "2.2.5");
OLD(dlmopen, "2.3.4");
OLD(pthread_setaffinity_np, "2.3.4");
OLD(pthread_setname_np, "2.12");

// Since glibc 2.32: whether the process has one thread. "No" is always right, and costs an atomic operation.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
