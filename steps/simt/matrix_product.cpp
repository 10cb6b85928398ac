#include "simt/matrix_product.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace simt {
namespace {

using Floats = float __attribute__((vector_size(32)));

void load(Floats& x, const float* from) { std::memcpy(&x, from, sizeof x); }
void store(float* to, const Floats& x) { std::memcpy(to, &x, sizeof x); }

// half_value() without branches, so that the compiler makes vectors of it.
float half_to_float(uint16_t bits) {
  const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13, exponent = bits & 0x7c00;
  const float subnormal = float_of(magnitude + (113u << 23)) - float_of(113u << 23);
  const uint32_t normal = magnitude + (exponent == 0x7c00 ? 224u << 23 : 112u << 23);
  return float_of(uint32_t(bits & 0x8000) << 16 | (exponent == 0 ? bits_of(subnormal) : normal));
}

std::array<float, 256> e4m3_values() {
  std::array<float, 256> values;
  for (unsigned bits = 0; bits < 256; ++bits) values[bits] = e4m3_value(uint8_t(bits));
  return values;
}

}  // namespace

void to_floats(Element type, const void* elements, float* values, size_t count) {
  static const std::array<float, 256> e4m3 = e4m3_values();
  const auto* halves = static_cast<const uint16_t*>(elements);
  switch (type) {
    case Element::half:
      for (size_t i = 0; i < count; ++i) values[i] = half_to_float(halves[i]);
      return;
    case Element::bfloat16:
      for (size_t i = 0; i < count; ++i) values[i] = bfloat16_value(halves[i]);
      return;
    case Element::e4m3:
      for (size_t i = 0; i < count; ++i) values[i] = e4m3[static_cast<const uint8_t*>(elements)[i]];
      return;
  }
}

void multiply_add(const float* a, const float* b, float* d, int m, int n, int k) {
  for (int row = 0; row < m; row += 4)
    for (int column = 0; column < n; column += 8) {
      Floats sum[4];
      for (int i = 0; i < 4; ++i) load(sum[i], d + (row + i) * n + column);
      for (int j = 0; j < k; ++j) {
        Floats right;
        load(right, b + j * n + column);
        for (int i = 0; i < 4; ++i) sum[i] += a[(row + i) * k + j] * right;
      }
      for (int i = 0; i < 4; ++i) store(d + (row + i) * n + column, sum[i]);
    }
}

}  // namespace simt
