// Rounding to the narrow floating-point types: of a step's inputs, and of what the baseline stores.
#pragma once
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

#include "harness/problem.h"

#ifdef __FAST_MATH__
#error "rounded_to adds and takes away again; with -ffast-math the compiler leaves both out"
#endif

namespace flash {

static_assert(FLT_EVAL_METHOD == 0, "rounded_to wants sums of doubles rounded to doubles");

// What rounding needs to know of a floating-point type.
struct FloatFormat {
  double spacing_at_1;  // between its numbers from 1 to 2
  double smallest_normal;
  double largest;
  bool saturates;  // what is too large becomes the largest number rather than ∞
};

inline FloatFormat format_of(DType type) {
  switch (type) {
    case DType::e4m3:
      return {0x1p-3, 0x1p-6, 448.0, true};
    case DType::fp16:
      return {0x1p-10, 0x1p-14, 65504.0, false};
    case DType::bf16:
      return {0x1p-7, 0x1p-126, 0x1.FEp127, false};
    case DType::fp32:
      return {0x1p-23, 0x1p-126, std::numeric_limits<float>::max(), false};
    case DType::fp64:
      break;
  }
  return {0x1p-52, std::numeric_limits<double>::min(), std::numeric_limits<double>::max(), false};
}

// The value of the type that is nearest to x, ties to the even one; e4m3 saturates at ±448.
inline double rounded_to(DType type, double x) {
  if (type == DType::fp64 || std::isnan(x)) return x;
  const FloatFormat format = format_of(type);
  const double too_large = format.saturates ? format.largest : std::numeric_limits<double>::infinity();
  if (std::abs(x) >= 2 * format.largest) return std::copysign(too_large, x);

  // The type's values around x are `spacing` apart: a power of two, taken from x's exponent bits. Between 2⁵² and 2⁵³
  // spacings a double holds whole spacings only, so going there and back rounds: to the nearest even one, as the
  // processor's sums do.
  const double power = std::bit_cast<double>(std::bit_cast<uint64_t>(x) & 0x7FF0'0000'0000'0000);
  const double spacing = std::max(power, format.smallest_normal) * format.spacing_at_1;
  const double far = spacing * 0x1.8p52;
  const double nearest = (x + far) - far;
  return std::abs(nearest) > format.largest ? std::copysign(too_large, x) : std::copysign(nearest, x);
}

}  // namespace flash
