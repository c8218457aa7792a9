// Hopper's own instructions as functions: barriers in shared memory, bulk copies, clusters, wgmma, dependent launches.
//
// Source: PTX ISA on wgmma, mbarrier, cp.async.bulk, barrier.cluster and griddepcontrol.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ktinject::cuda::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 4, 8 or 16 bytes of shared memory.
template <class V>
__device__ __forceinline__ V load_shared(uint32_t address) {
  V v;
  auto* r = reinterpret_cast<uint32_t*>(&v);
  if constexpr (sizeof(V) == 16)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else if constexpr (sizeof(V) == 8)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address));
  else asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r[0]) : "r"(address));
  return v;
}

// True for one lane of the warp, which the compiler then knows to be alone.
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(chosen));
  return chosen != 0;
}

// Barriers in shared memory.
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After the last `barrier_init`: the copy engine sees them.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive(uint64_t* barrier) { arrive(shared_address(barrier)); }
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) { wait(shared_address(barrier), parity); }

// How long a bulk copy's lines should stay in the L2.
constexpr uint64_t kOnce = 0x12F0000000000000, kNormal = 0x1000000000000000;

// Bulk copies to shared memory.
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Fetches the description of a matrix before the first box is asked for.
__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// A box of a matrix, at a column and a row.
__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// Programmatic dependent launch.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Clusters of blocks. What a block writes to another one's shared memory completes on that one's barrier.
__device__ __forceinline__ void cluster_arrive() {  // after `barriers_ready`
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void push(uint32_t to, float a, float b, float c, float d, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
               : "memory");
}

// wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A tile [rows][64] of 16-bit values, rows of 128 bytes, swizzled: 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t descriptor(const void* tile) {
  const uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
  return address | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// d [64, kColumns] += a [64, 16] in registers · b [kColumns, 16]ᵀ in shared memory.
template <class T, int kColumns>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], const uint32_t* a, uint64_t b);

#define KT_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KT_TEXT_16 KT_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KT_TEXT_32 KT_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KT_TEXT_48 KT_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KT_TEXT_64 KT_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KT_TEXT_128                                                                              \
  KT_TEXT_64                                                                                     \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KT_SUMS_8(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define KT_SUMS_16(i) KT_SUMS_8(i), KT_SUMS_8(i + 8)
#define KT_SUMS_32(i) KT_SUMS_16(i), KT_SUMS_16(i + 16)
#define KT_SUMS_48(i) KT_SUMS_32(i), KT_SUMS_16(i + 32)
#define KT_SUMS_64(i) KT_SUMS_32(i), KT_SUMS_32(i + 32)
#define KT_SUMS_128(i) KT_SUMS_64(i), KT_SUMS_64(i + 64)
// sums: registers of d. operands: the places of a and b among all operands.
#define KT_WGMMA(T, type, columns, sums, operands)                                                                    \
  template <>                                                                                                         \
  __device__ __forceinline__ void wgmma<T, columns>(float (&d)[sums], const uint32_t* a, uint64_t b) {                \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type \
                 "." type " {" KT_TEXT_##sums "}, " operands ", p, 1, 1, 0;\n}"                                       \
                 : KT_SUMS_##sums(0)                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                               \
  }
#define KT_WGMMA_BOTH(columns, sums, operands)             \
  KT_WGMMA(__nv_bfloat16, "bf16", columns, sums, operands) \
  KT_WGMMA(__half, "f16", columns, sums, operands)

KT_WGMMA_BOTH(32, 16, "{%16, %17, %18, %19}, %20")
KT_WGMMA_BOTH(64, 32, "{%32, %33, %34, %35}, %36")
KT_WGMMA_BOTH(96, 48, "{%48, %49, %50, %51}, %52")
KT_WGMMA_BOTH(128, 64, "{%64, %65, %66, %67}, %68")
KT_WGMMA_BOTH(256, 128, "{%128, %129, %130, %131}, %132")

#undef KT_WGMMA_BOTH
#undef KT_WGMMA
#undef KT_SUMS_128
#undef KT_SUMS_64
#undef KT_SUMS_48
#undef KT_SUMS_32
#undef KT_SUMS_16
#undef KT_SUMS_8
#undef KT_TEXT_128
#undef KT_TEXT_64
#undef KT_TEXT_48
#undef KT_TEXT_32
#undef KT_TEXT_16
#undef KT_TEXT_8

}  // namespace ktinject::cuda::hopper
