// CUDA's 16-bit floating-point types, half and bfloat16, for a plain C++ compiler. Arithmetic on them is that of float,
// rounded once at the end, which for +, -, * of two of them gives what a GPU gives.
#pragma once
#include <type_traits>

#include "simt/cuda_types.h"

namespace simt {
inline namespace SIMT_BUILD {

SIMT_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
SIMT_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Drops the low `count` bits, rounding to nearest, to even between two.
SIMT_INLINE uint32_t drop_bits(uint32_t x, unsigned count) {
  return (x + (1u << (count - 1)) - 1 + (x >> count & 1)) >> count;
}

// float to half: sign, 5 bits of exponent (bias 15 for 127), 10 of fraction for 23.
inline uint16_t half_bits(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;                    // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
  if (magnitude >= 0x38800000) return uint16_t(sign | drop_bits(magnitude - (112u << 23), 13));
  // A subnormal half is a multiple of 2^-24, which is the spacing of floats around 0.5: the addition rounds.
  return uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
}

inline float half_value(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const uint32_t exponent = bits >> 10 & 31;
  const uint32_t fraction = bits & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

// bfloat16 is the upper half of a float.
inline uint16_t bfloat16_bits(float x) {
  const uint32_t bits = bits_of(x);
  return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fff) : uint16_t(drop_bits(bits, 16));
}
inline float bfloat16_value(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

struct alignas(2) __half {
  uint16_t bits;
  __half() = default;
  SIMT_INLINE __half(float x) : bits(half_bits(x)) {}
  SIMT_INLINE operator float() const {
    const __half copy = *this;  // one 2-byte access
    return half_value(copy.bits);
  }
  SIMT_COPIED_AS_WORD(__half)
};
struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  SIMT_INLINE __nv_bfloat16(float x) : bits(bfloat16_bits(x)) {}
  SIMT_INLINE operator float() const {
    const __nv_bfloat16 copy = *this;
    return bfloat16_value(copy.bits);
  }
  SIMT_COPIED_AS_WORD(__nv_bfloat16)
};
struct alignas(4) __half2 {
  __half x, y;
  __half2() = default;
  SIMT_INLINE __half2(__half x, __half y) : x(x), y(y) {}
  SIMT_COPIED_AS_WORD(__half2)
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  SIMT_INLINE __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
  SIMT_COPIED_AS_WORD(__nv_bfloat162)
};

// What exists for both types alike.
template <class T>
concept Half = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
template <class T>
concept Half2 = std::is_same_v<T, __half2> || std::is_same_v<T, __nv_bfloat162>;

template <Half T>
SIMT_INLINE T __hadd(T a, T b) {
  return float(a) + float(b);
}
template <Half T>
SIMT_INLINE T __hsub(T a, T b) {
  return float(a) - float(b);
}
template <Half T>
SIMT_INLINE T __hmul(T a, T b) {
  return float(a) * float(b);
}
template <Half T>
SIMT_INLINE bool __hisnan(T a) {
  return float(a) != float(a);
}
template <Half2 T>
SIMT_INLINE T __hadd2(T a, T b) {
  return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
template <Half2 T>
SIMT_INLINE T __hsub2(T a, T b) {
  return {__hsub(a.x, b.x), __hsub(a.y, b.y)};
}
template <Half2 T>
SIMT_INLINE T __hmul2(T a, T b) {
  return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
template <Half2 T>
SIMT_INLINE float __low2float(T a) {
  return a.x;
}
template <Half2 T>
SIMT_INLINE float __high2float(T a) {
  return a.y;
}

SIMT_INLINE float __half2float(__half x) { return x; }
SIMT_INLINE __half __float2half(float x) { return x; }
SIMT_INLINE __half __float2half_rn(float x) { return x; }
SIMT_INLINE __half __low2half(__half2 a) { return a.x; }
SIMT_INLINE __half __high2half(__half2 a) { return a.y; }
SIMT_INLINE __half2 __halves2half2(__half x, __half y) { return {x, y}; }
SIMT_INLINE __half2 __half2half2(__half x) { return {x, x}; }
SIMT_INLINE __half2 __float2half2_rn(float x) { return {x, x}; }
SIMT_INLINE __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
SIMT_INLINE __half2 __float22half2_rn(float2 a) { return {a.x, a.y}; }
SIMT_INLINE float2 __half22float2(__half2 a) { return {a.x, a.y}; }
SIMT_INLINE unsigned short __half_as_ushort(__half x) { return x.bits; }
SIMT_INLINE __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}

SIMT_INLINE float __bfloat162float(__nv_bfloat16 x) { return x; }
SIMT_INLINE __nv_bfloat16 __float2bfloat16(float x) { return x; }
SIMT_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
SIMT_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 a) { return a.x; }
SIMT_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 a) { return a.y; }
SIMT_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
SIMT_INLINE __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
SIMT_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
SIMT_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
SIMT_INLINE float2 __bfloat1622float2(__nv_bfloat162 a) { return {a.x, a.y}; }
SIMT_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
SIMT_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 x;
  x.bits = bits;
  return x;
}

}  // namespace SIMT_BUILD
}  // namespace simt

using simt::__half, simt::__half2, simt::__nv_bfloat16, simt::__nv_bfloat162;
using half = simt::__half;
using half2 = simt::__half2;
using nv_bfloat16 = simt::__nv_bfloat16;
using nv_bfloat162 = simt::__nv_bfloat162;
using simt::__bfloat162float, simt::__float2bfloat16, simt::__float2bfloat16_rn, simt::__low2bfloat16;
using simt::__float22bfloat162_rn, simt::__bfloat1622float2, simt::__bfloat16_as_ushort, simt::__ushort_as_bfloat16;
using simt::__float22half2_rn, simt::__half22float2, simt::__half_as_ushort, simt::__ushort_as_half;
using simt::__hadd, simt::__hsub, simt::__hmul, simt::__hisnan, simt::__hadd2, simt::__hsub2, simt::__hmul2;
using simt::__half2float, simt::__float2half, simt::__float2half_rn, simt::__low2half, simt::__high2half;
using simt::__halves2half2, simt::__half2half2, simt::__float2half2_rn, simt::__floats2half2_rn;
using simt::__high2bfloat16, simt::__halves2bfloat162, simt::__float2bfloat162_rn, simt::__floats2bfloat162_rn;
using simt::__low2float, simt::__high2float;
