// What this machine can do at best, measured in the process that also runs the benchmark: the share of it is what
// counts.
#pragma once

#include <string>
#include <vector>

namespace ktinject::gemm {

// Bytes a second that all threads of the pool read together, from `bytes_per_thread` times as many bytes as there are
// threads, handed out by the megabyte.
double read_bandwidth(size_t bytes_per_thread);

// Median microseconds of a call with an empty task for each worker: what a fork and join costs. `everyone`: each worker
// runs one of them, so that the last one's wake-up counts; else they go to whoever comes, as always. `pause_us` pass
// between two calls; after more than workers spin they have to be woken.
double empty_call_us(int calls, double pause_us, bool everyone);

// Names of the multiply units this CPU has, of: amx_bf16, amx_int8, avx512_bf16, avx512_int8, avxvnni_int8,
// avx2_fp32.
std::vector<std::string> multiply_units();

// Operations a second (a multiply-add is two) of all threads with operands in registers. Throws std::invalid_argument
// for a unit that is not there.
double multiply_rate(const std::string& unit);

}  // namespace ktinject::gemm
