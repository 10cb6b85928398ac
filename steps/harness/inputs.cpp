#include "harness/inputs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "harness/interrupt.h"
#include "harness/round.h"

namespace flash {
namespace {

// 2^exponent, where that is a normal double.
double power_of_two(int exponent) { return std::bit_cast<double>(uint64_t(exponent + 1023) << 52); }

// The bits of a value that is representable in a 16- or 8-bit format with `exponent_bits` and `mantissa_bits`.
uint32_t pack(double x, int exponent_bits, int mantissa_bits, int smallest_exponent) {
  const uint32_t sign = std::signbit(x) ? 1u << (exponent_bits + mantissa_bits) : 0u;
  const uint32_t top = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (std::isnan(x)) return sign | top | ((1u << mantissa_bits) - 1);
  if (std::isinf(x)) return sign | top;
  const int exponent = std::max(int(std::bit_cast<uint64_t>(x) >> 52 & 0x7ff) - 1023, smallest_exponent);
  // A subnormal has no leading one: its scaled value stays below 2^mantissa_bits and the exponent field is 0.
  const auto scaled = uint32_t(std::fabs(x) * power_of_two(mantissa_bits - exponent));
  return sign | (uint32_t(exponent - smallest_exponent) * (1u << mantissa_bits) + scaled);
}

double unpack(uint32_t bits, int exponent_bits, int mantissa_bits, int smallest_exponent, bool has_infinity) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const uint32_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1.0 : 1.0;
  const bool top = exponent == (1u << exponent_bits) - 1;
  if (top && has_infinity)
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  if (top && mantissa == (1u << mantissa_bits) - 1) return std::numeric_limits<double>::quiet_NaN();  // e4m3
  const uint32_t whole = exponent ? mantissa + (1u << mantissa_bits) : mantissa;
  return sign * whole * power_of_two(int(std::max(exponent, 1u)) - 1 + smallest_exponent - mantissa_bits);
}

uint32_t bits_from(DType type, double x) {
  switch (type) {
    case DType::fp16:
      return pack(rounded_to(type, x), 5, 10, -14);
    case DType::bf16:
      return pack(rounded_to(type, x), 8, 7, -126);
    default:
      return pack(rounded_to(type, x), 4, 3, -6);
  }
}

double value_of(DType type, uint32_t bits) {
  switch (type) {
    case DType::fp16:
      return unpack(bits, 5, 10, -14, true);
    case DType::bf16:
      return unpack(bits, 8, 7, -126, true);
    default:
      return unpack(bits, 4, 3, -6, false);
  }
}

// Calls `part(begin, end)` for parts of 0 .. count − 1 that together are all of it, on all processors if it is long.
// Throws Interrupted between two parts.
template <class F>
void in_parts(size_t count, F part) {
  const size_t threads = count < 100000 ? 1 : std::max(1u, std::thread::hardware_concurrency());
  const auto work = [&](size_t begin, size_t end) {
    for (; begin < end && !interrupt_requested; begin += kElementsAtOnce)
      part(begin, std::min(end, begin + kElementsAtOnce));
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < threads; t++) others.emplace_back(work, count * t / threads, count * (t + 1) / threads);
  work(0, count / threads);
  for (std::thread& other : others) other.join();
  throw_if_interrupted();
}

template <class T, class F>
void each_as(std::vector<std::byte>& bytes, size_t count, F f) {
  resize_in_pieces(bytes, count * sizeof(T));
  in_parts(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
      const T value = f(i);
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
}

template <class T>
T at(std::span<const std::byte> bytes, size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
  return value;
}

// A well-mixed 64-bit number for each (seed, tensor, position): the finaliser of SplitMix64 (Steele et al. 2014).
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

std::vector<std::byte> encode(DType type, std::span<const double> values) {
  std::vector<std::byte> bytes;
  const size_t n = values.size();
  switch (bytes_of(type)) {
    case 8:
      each_as<double>(bytes, n, [&](size_t i) { return values[i]; });
      break;
    case 4:
      each_as<float>(bytes, n, [&](size_t i) { return float(values[i]); });
      break;
    case 2:
      each_as<uint16_t>(bytes, n, [&](size_t i) { return uint16_t(bits_from(type, values[i])); });
      break;
    default:
      each_as<uint8_t>(bytes, n, [&](size_t i) { return uint8_t(bits_from(type, values[i])); });
      break;
  }
  return bytes;
}

std::vector<double> decode(DType type, std::span<const std::byte> bytes) {
  std::vector<double> values;
  resize_in_pieces(values, bytes.size() / bytes_of(type));
  in_parts(values.size(), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
      switch (bytes_of(type)) {
        case 8:
          values[i] = at<double>(bytes, i);
          break;
        case 4:
          values[i] = at<float>(bytes, i);
          break;
        case 2:
          values[i] = value_of(type, at<uint16_t>(bytes, i));
          break;
        default:
          values[i] = value_of(type, at<uint8_t>(bytes, i));
          break;
      }
    }
  });
  return values;
}

std::vector<double> normal_numbers(size_t count, uint64_t seed, uint32_t tensor, DType type) {
  // Sums of twelve 21-bit numbers are exact integers, so no rounding or library function can differ between machines.
  constexpr double kUnit = 1.0 / (1 << 21);
  const uint64_t stream = mixed(mixed(seed) + tensor);
  std::vector<double> numbers;
  resize_in_pieces(numbers, count);
  // Each number depends on its place alone, so any division among threads gives the same ones.
  in_parts(count, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; i++) {
      int64_t sum = 6;  // twelve halves of a unit: each term then lies in the middle of its step, and the mean is 0
      for (uint64_t draw = 0; draw < 4; draw++) {
        const uint64_t word = mixed(stream + i * 4 + draw);
        sum += int64_t(word & 0x1fffff) + int64_t(word >> 21 & 0x1fffff) + int64_t(word >> 42 & 0x1fffff);
      }
      numbers[i] = rounded_to(type, double(sum) * kUnit - 6.0);
    }
  });
  return numbers;
}

HostTensors random_tensors(const Problem& p, uint64_t seed, bool with_gradient) {
  HostTensors t;
  const DType type = input_dtype(p);
  t.Q = normal_numbers(p.q_elements(), seed, 1, type);
  t.K = normal_numbers(p.kv_elements(), seed, 2, type);
  t.V = normal_numbers(p.kv_elements(), seed, 3, type);
  if (with_gradient) t.dO = normal_numbers(p.q_elements(), seed, 4, type);
  return t;
}

}  // namespace flash
