// The arithmetic that CUDA has and <cmath> has not. Fast approximations (__expf and the like) are computed exactly.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/cuda_types.h"

// The C library declares these names for itself, without defining them.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __sinf sinf
#define __cosf cosf
#define __powf powf

namespace simt {
inline namespace SIMT_BUILD {

template <class To, class From>
SIMT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// As in CUDA, the two may differ in type, and of a number and a NaN the number is taken.
template <class A, class B>
SIMT_INLINE std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = a, y = b;
  return x < y || y != y ? x : y;
}
template <class A, class B>
SIMT_INLINE std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  const T x = a, y = b;
  return x > y || y != y ? x : y;
}

#if !defined(__GLIBC__) || !__GLIBC_PREREQ(2, 42)  // newer C libraries have it
SIMT_INLINE float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#define SIMT_HAS_RSQRTF
#endif
SIMT_INLINE float __fdividef(float a, float b) { return a / b; }
SIMT_INLINE float __fdiv_rn(float a, float b) { return a / b; }
SIMT_INLINE float __frcp_rn(float x) { return 1.0f / x; }
SIMT_INLINE float __fsqrt_rn(float x) { return std::sqrt(x); }
SIMT_INLINE float __frsqrt_rn(float x) { return float(1.0 / std::sqrt(double(x))); }
SIMT_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }  // NaN becomes 0
SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// Contraction to fused multiply-add is never applied to these; nor is it by the compilers used here to + and *.
SIMT_INLINE float __fadd_rn(float a, float b) { return a + b; }
SIMT_INLINE float __fmul_rn(float a, float b) { return a * b; }

SIMT_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SIMT_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIMT_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIMT_INLINE int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
SIMT_INLINE unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
SIMT_INLINE int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }

SIMT_INLINE unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }
SIMT_INLINE float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
SIMT_INLINE int __float_as_int(float x) { return bit_cast<int>(x); }
SIMT_INLINE float __int_as_float(int x) { return bit_cast<float>(x); }

SIMT_INLINE int __float2int_rn(float x) { return int(std::nearbyint(x)); }
SIMT_INLINE int __float2int_rz(float x) { return int(x); }
SIMT_INLINE float __int2float_rn(int x) { return float(x); }

// A read through the read-only cache.
template <class T>
SIMT_INLINE T __ldg(const T* address) {
  return *address;
}

}  // namespace SIMT_BUILD
}  // namespace simt

using simt::min, simt::max;
#ifdef SIMT_HAS_RSQRTF
using simt::rsqrtf;
#undef SIMT_HAS_RSQRTF
#endif
using simt::__fdividef, simt::__fdiv_rn, simt::__frcp_rn, simt::__fsqrt_rn, simt::__frsqrt_rn, simt::__saturatef;
using simt::__float2int_rn, simt::__float2int_rz, simt::__int2float_rn, simt::__ldg;
using simt::__float_as_uint, simt::__uint_as_float, simt::__float_as_int, simt::__int_as_float;
using simt::__fmaf_rn, simt::__fadd_rn, simt::__fmul_rn;
using simt::__popc, simt::__popcll, simt::__ffs, simt::__clz, simt::__brev, simt::__umulhi, simt::__mulhi;
