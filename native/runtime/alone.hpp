// Threads that pack weights, each one others: many small matrices are packed faster by a thread each than by all threads
// one after the other, of which each waits for the slowest.
#pragma once

namespace ktinject::runtime {

// What this thread computes from now on, it computes on itself, beside others: its Sessions are no turns at the pool,
// until that is taken back. It is for the caller to see that no two threads change the same.
void compute_alone(bool alone);

}  // namespace ktinject::runtime
