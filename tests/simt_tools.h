// What the tests of the CPU executor share: arrays in its memory, its options, rounding by other means.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "simt/executor.h"

namespace simt_tools {

// An array in device memory.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : count_(count), data_(static_cast<T*>(simt::allocate(count * sizeof(T)))) {}
  explicit Array(const std::vector<T>& host) : Array(host.size()) {
    simt::write(data_, host.data(), count_ * sizeof(T));
  }
  ~Array() { simt::free(data_); }
  Array(const Array&) = delete;

  T* get() const { return data_; }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    simt::read(host.data(), data_, count_ * sizeof(T));
    return host;
  }

 private:
  size_t count_;
  T* data_;
};

// Restores the executor's options at the end of a test.
struct KeepOptions {
  simt::Options before = simt::options();
  ~KeepOptions() { simt::options() = before; }
};

inline std::vector<float> ramp(size_t count, float step = 0.25f) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = float(i % 97) * step - 5.0f;
  return x;
}

// The nearest number with `precision` bits and exponents from `lowest` to `highest`, ties to even; independent of the
// bit tricks under test.
inline double nearest(double x, int precision, int lowest, int highest) {
  if (std::isnan(x) || std::isinf(x) || x == 0.0) return x;
  const int exponent = std::max(std::ilogb(x), lowest);
  const double unit = std::ldexp(1.0, exponent - precision + 1);
  const double rounded = std::nearbyint(x / unit) * unit;
  return std::abs(rounded) >= std::ldexp(1.0, highest + 1) ? std::copysign(INFINITY, x) : rounded;
}

}  // namespace simt_tools
