// Tensor cores and asynchronous copies as GPUs have them since Ampere (sm_80): one function an instruction, and the few
// conversions that go with them. nvcc gets the PTX below; the CPU executor has its own definitions
// (simt/tensor_cores.h). Sections are those of the PTX ISA, version 8.7.
#pragma once
#include "harness/kernel.h"

#ifndef __CUDACC__
#include "simt/tensor_cores.h"
#else

namespace flash {
inline namespace gpu {

template <class T>
constexpr bool kIsBfloat16 = false;
template <>
inline constexpr bool kIsBfloat16<__nv_bfloat16> = true;

// Where PTX finds what a pointer into shared memory points to.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// d += a·b for a 16×16 (rows), b 16×8 (columns), d 16×8, spread over a warp (9.7.14.5.8). With g = lane / 4, t = lane %
// 4 a register of a or b holds two neighbours of 16 bits, the first in its lower half:
//     a  [g][2t], [g + 8][2t], [g][2t + 8], [g + 8][2t + 8]     b  [2t][g], [2t + 8][g]
//     d  [g][2t], [g][2t + 1], [g + 8][2t], [g + 8][2t + 1]
// T is __half or __nv_bfloat16; sums are fp32.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kIsBfloat16<T>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8×8 matrices of 16-bit elements from shared memory (9.7.14.5.15). Lane i gives the address of row i % 8 of
// matrix i / 8. Register r of a lane gets elements [g][2t], [g][2t + 1] of matrix r; with _trans, those of its
// transpose.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Starts a copy of 16 bytes from global to shared memory, past the registers (9.7.9.25.3.1). Without `inside` zeros are
// written and nothing is read. Both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool inside = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}
// The copies that this thread has started since the last commit become a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the newest kPending groups of this thread are still under way. Other threads see what the copies
// wrote only after a barrier that follows.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 2^x by the special function unit: relative error below 2^-22, results below 2^-126 become 0 (9.7.3.21).
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats, rounded to T, in one register: `low` in its lower half (9.7.9.21).
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (kIsBfloat16<T>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// A barrier for a part of the block (9.7.13.1): `threads` of them, a multiple of 32, meet in the barrier of this
// number, 1 to 15. _sync waits for the others; _arrive only counts.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace gpu
}  // namespace flash
#endif
