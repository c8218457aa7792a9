// For wheels, included before everything else: what is built on a newer system does not use what glibc 2.28 lacks.
#pragma once

#if defined(__cplusplus) && defined(__linux__)
#include <bits/c++config.h>
// Waits with a timeout then go by another clock.
#undef _GLIBCXX_USE_PTHREAD_COND_CLOCKWAIT
#undef _GLIBCXX_USE_PTHREAD_MUTEX_CLOCKLOCK
#undef _GLIBCXX_USE_PTHREAD_RWLOCK_CLOCKLOCK
#endif
