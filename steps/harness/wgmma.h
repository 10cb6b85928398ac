// wgmma: the matrix product of a warpgroup, 128 threads, asynchronous (PTX ISA 8.7, 9.7.15.5).
//
//     d (64 × kN, fp32) += a (64 × K) · b (K × kN)      K = 16 for __half and __nv_bfloat16, 32 for __nv_fp8_e4m3
//
// d lies in registers: d[i] of thread t is row 16·(t / 32) + t % 32 / 4 (+ 8 for i & 2), column
// 8·(i / 4) + 2·(t % 4) + (i & 1). b lies in shared memory, a there or in registers, as in mma_m16n8k16
// (tensor_cores.h).
#pragma once
#include "harness/hopper.h"

#ifndef __CUDACC__
#include "simt/wgmma.h"
#else
#include <cuda_fp8.h>

namespace flash {
inline namespace gpu {

// How an operand lies in its rows of 128 bytes. K: a row holds one m (or n) for as many k as fit. MN: a row holds 64 m
// (n) of one k, 16-bit types only.
enum class Major { K, MN };

// Describes an operand in shared memory: rows of 128 bytes, swizzled as TMA does it, groups of 8 rows one after the
// other (9.7.15.5.1). `next`, for MN: the distance in bytes to the next 64 m (n). Along K, 16 elements of 16 bits
// further are 2 more in the descriptor (it counts in 16 bytes); 16 rows of MN are 16 · 128 / 16. K-major operands may
// have rows of 64 bytes.
template <int kRowBytes = 128>
__device__ __forceinline__ uint64_t wgmma_operand(const void* shared, unsigned next = 0) {
  return uint64_t((shared_address(shared) & 0x3ffff) >> 4) | uint64_t(next >> 4) << 16 |
         uint64_t(8 * kRowBytes >> 4) << 32 | uint64_t(kRowBytes == 128 ? 1 : 2) << 62;
}

// Before the first product: registers that it reads or adds to are written (9.7.15.7.1).
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The products started since the last commit become a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the newest kPending groups are still computing. Until then nobody may touch their registers and
// their shared memory; `d` names results that are read afterwards, so that the compiler moves no read before the wait.
template <int kPending, int n>
__device__ __forceinline__ void wgmma_wait(float (&d)[n]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Four floats, rounded to e4m3, in one register: `a` in its lowest byte; what is too large becomes ±448 (9.7.9.21).
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

// ---- The instruction for each width. Its text must name every register of d; the macros hold those lists.
#define FLASH_8(i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define FLASH_RESULT_8(i)                                                                                     \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), \
      "=f"(d[i + 7])
#define FLASH_NAMES_64                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define FLASH_REGISTERS_64 FLASH_8(0), FLASH_8(8), FLASH_8(16), FLASH_8(24)
#define FLASH_NAMES_80 FLASH_NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define FLASH_REGISTERS_80 FLASH_REGISTERS_64, FLASH_8(32)
#define FLASH_NAMES_96 FLASH_NAMES_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define FLASH_REGISTERS_96 FLASH_REGISTERS_80, FLASH_8(40)
#define FLASH_NAMES_112 FLASH_NAMES_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define FLASH_REGISTERS_112 FLASH_REGISTERS_96, FLASH_8(48)
#define FLASH_NAMES_128 FLASH_NAMES_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define FLASH_REGISTERS_128 FLASH_REGISTERS_112, FLASH_8(56)
#define FLASH_NAMES_176                                                   \
  FLASH_NAMES_128                                                         \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80," \
  "%81,%82,%83,%84,%85,%86,%87"
#define FLASH_REGISTERS_176 FLASH_REGISTERS_128, FLASH_8(64), FLASH_8(72), FLASH_8(80)
#define FLASH_NAMES_192 FLASH_NAMES_176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define FLASH_REGISTERS_192 FLASH_REGISTERS_176, FLASH_8(88)
#define FLASH_NAMES_256                                                 \
  FLASH_NAMES_192                                                       \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109," \
  "%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FLASH_REGISTERS_256 FLASH_REGISTERS_192, FLASH_8(96), FLASH_8(104), FLASH_8(112), FLASH_8(120)

// The same lists for results that are overwritten.
#define FLASH_RESULTS_64 FLASH_RESULT_8(0), FLASH_RESULT_8(8), FLASH_RESULT_8(16), FLASH_RESULT_8(24)
#define FLASH_RESULTS_80 FLASH_RESULTS_64, FLASH_RESULT_8(32)
#define FLASH_RESULTS_96 FLASH_RESULTS_80, FLASH_RESULT_8(40)
#define FLASH_RESULTS_112 FLASH_RESULTS_96, FLASH_RESULT_8(48)
#define FLASH_RESULTS_128 FLASH_RESULTS_112, FLASH_RESULT_8(56)
#define FLASH_RESULTS_176 FLASH_RESULTS_128, FLASH_RESULT_8(64), FLASH_RESULT_8(72), FLASH_RESULT_8(80)
#define FLASH_RESULTS_192 FLASH_RESULTS_176, FLASH_RESULT_8(88)
#define FLASH_RESULTS_256 \
  FLASH_RESULTS_192, FLASH_RESULT_8(96), FLASH_RESULT_8(104), FLASH_RESULT_8(112), FLASH_RESULT_8(120)

// Also where it is overwritten d is "+f", read and written: with "=f" ptxas needs some ten registers more. Not so for
// e4m3. a_ to add_: the numbers of the operands after d's registers.
#define FLASH_SHARED_OVER(n, types, a_, b_, add_)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n types " {" FLASH_NAMES_##n "}, %" #a_ ", %" #b_ ", %" #add_ \
                                                                                 ", 1, 1;"                        \
               : FLASH_RESULTS_##n                                                                                \
               : "l"(a), "l"(b), "n"(0))
#define FLASH_SHARED(n, types, majors, a_, b_, add_)                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n types " {" FLASH_NAMES_##n "}, %" #a_ ", %" #b_ ", %" #add_ \
                                                                                 ", 1, 1" majors ";"              \
               : FLASH_REGISTERS_##n                                                                              \
               : "l"(a), "l"(b), "n"(int(kAdd)), "n"(int(kA)), "n"(int(kB)))
#define FLASH_REGISTER(n, types, majors, a0, a1, a2, a3, b_, add_)                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n types " {" FLASH_NAMES_##n                 \
               "}, {%" #a0 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b_ ", %" #add_ ", 1, 1" majors ";" \
               : FLASH_REGISTERS_##n                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kAdd)), "n"(int(kB)))
// The three element types.
#define FLASH_DEFINE_WGMMA(n, p0, p1, p2, p3, p4, p5, p6)                                          \
  template <>                                                                                      \
  struct Wgmma<n> {                                                                                \
    template <class T, Major kA, Major kB, bool kAdd>                                              \
    static __device__ __forceinline__ void run(float (&d)[n / 2], uint64_t a, uint64_t b) {        \
      if constexpr (sizeof(T) == 1 && !kAdd)                                                       \
        FLASH_SHARED_OVER(n, "k32.f32.e4m3.e4m3", p0, p1, p2);                                     \
      else if constexpr (sizeof(T) == 1)                                                           \
        FLASH_SHARED(n, "k32.f32.e4m3.e4m3", "", p0, p1, p2);                                      \
      else if constexpr (kIsBfloat16<T>)                                                           \
        FLASH_SHARED(n, "k16.f32.bf16.bf16", ", %" #p3 ", %" #p4, p0, p1, p2);                     \
      else                                                                                         \
        FLASH_SHARED(n, "k16.f32.f16.f16", ", %" #p3 ", %" #p4, p0, p1, p2);                       \
    }                                                                                              \
    template <class T, Major kB, bool kAdd>                                                        \
    static __device__ __forceinline__ void run(float (&d)[n / 2], const uint32_t* a, uint64_t b) { \
      if constexpr (sizeof(T) == 1)                                                                \
        FLASH_REGISTER(n, "k32.f32.e4m3.e4m3", "", p0, p1, p2, p3, p4, p5);                        \
      else if constexpr (kIsBfloat16<T>)                                                           \
        FLASH_REGISTER(n, "k16.f32.bf16.bf16", ", %" #p6, p0, p1, p2, p3, p4, p5);                 \
      else                                                                                         \
        FLASH_REGISTER(n, "k16.f32.f16.f16", ", %" #p6, p0, p1, p2, p3, p4, p5);                   \
    }                                                                                              \
  };
template <int kN>
struct Wgmma;
FLASH_DEFINE_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
FLASH_DEFINE_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
FLASH_DEFINE_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
FLASH_DEFINE_WGMMA(112, 56, 57, 58, 59, 60, 61, 62)
FLASH_DEFINE_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
FLASH_DEFINE_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
FLASH_DEFINE_WGMMA(192, 96, 97, 98, 99, 100, 101, 102)
FLASH_DEFINE_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef FLASH_DEFINE_WGMMA
#undef FLASH_REGISTER
#undef FLASH_SHARED
#undef FLASH_SHARED_OVER

// The product with both operands in shared memory, by their descriptors. Without kAdd d is overwritten. e4m3 operands
// are K-major both.
template <int kN, class T, Major kA, Major kB, bool kAdd>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], uint64_t a, uint64_t b) {
  static_assert(sizeof(T) == 2 || (kA == Major::K && kB == Major::K));
  Wgmma<kN>::template run<T, kA, kB, kAdd>(d, a, b);
}
// The same with a in four registers.
template <int kN, class T, Major kB, bool kAdd>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], const uint32_t* a, uint64_t b) {
  static_assert(sizeof(T) == 2 || kB == Major::K);
  Wgmma<kN>::template run<T, kB, kAdd>(d, a, b);
}

}  // namespace gpu
}  // namespace flash
#endif
