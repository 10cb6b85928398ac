// CUDA's 8-bit floating-point type e4m3 for a plain C++ compiler: sign, 4 bits of exponent (bias 7), 3 of fraction; no
// infinities, largest number 448. Conversion from float rounds to nearest and saturates.
#pragma once
#include "simt/cuda_half.h"

namespace simt {
inline namespace SIMT_BUILD {

inline uint8_t e4m3_bits(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;                        // NaN
  if (magnitude >= bits_of(448.0f)) return uint8_t(sign | 0x7e);  // the largest
  if (magnitude >= bits_of(0x1p-6f)) return uint8_t(sign | drop_bits(magnitude - (120u << 23), 20));
  // A subnormal is a multiple of 2^-9, which is the spacing of floats around 2^14: the addition rounds.
  return uint8_t(sign | (bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f)));
}

inline float e4m3_value(uint8_t bits) {
  const uint32_t sign = uint32_t(bits & 0x80) << 24;
  const uint32_t exponent = bits >> 3 & 15;
  const uint32_t fraction = bits & 7;
  if ((bits & 0x7f) == 0x7f) return float_of(0x7fffffff);
  if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-9f));
  return float_of(sign | (exponent + 120) << 23 | fraction << 20);
}

struct __nv_fp8_e4m3 {
  uint8_t __x;
  __nv_fp8_e4m3() = default;
  SIMT_INLINE explicit __nv_fp8_e4m3(float x) : __x(e4m3_bits(x)) {}
  SIMT_INLINE explicit operator float() const { return e4m3_value(__x); }
};

}  // namespace SIMT_BUILD
}  // namespace simt

using simt::__nv_fp8_e4m3;
