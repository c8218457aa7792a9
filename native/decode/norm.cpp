#include "decode/norm.hpp"

#include <algorithm>

#include "gemm/backends.hpp"
#include "runtime/thread_pool.hpp"

namespace ktinject::decode {
namespace {

// Values of a task; as many in all are left to the caller, since waking workers would cost more.
constexpr size_t kPart = 16384;
constexpr size_t kSlot = 1;

}  // namespace

void norm_rows(const void* x, DType dtype, size_t rows, const gemm::Norm& norm, void* out) {
  const int n = norm.size;
  const gemm::StepOps& ops = gemm::step_ops();
  const auto widen = gemm::vector_ops().widen;
  const runtime::Session session;
  const auto size = static_cast<size_t>(n), line = (size + 15) / 16 * 16;
  const size_t step = std::max<size_t>(1, kPart / size), tasks = (rows + step - 1) / step;
  const bool alone = tasks <= 1;
  auto* memory = reinterpret_cast<float*>(
      session->buffer(kSlot, 2 * line * sizeof(float) * static_cast<size_t>(alone ? 1 : session->threads())));
  auto task = [&](int index, int worker) {
    float *wide = memory + 2 * line * static_cast<size_t>(worker), *normed = wide + line;
    const size_t first = static_cast<size_t>(index) * step, last = std::min(rows, first + step);
    for (size_t row = first; row < last; ++row) {
      const size_t at = row * size * dtype_bytes(dtype);
      widen(static_cast<const std::byte*>(x) + at, dtype, 1, n, wide);
      ops.rms_norm(wide, norm, dtype, normed);
      ops.store(normed, n, dtype, static_cast<std::byte*>(out) + at);
    }
  };
  if (alone)
    for (size_t index = 0; index < tasks; ++index) task(static_cast<int>(index), 0);
  else session->parallel_for(static_cast<int>(tasks), task);
}

}  // namespace ktinject::decode
