// Inputs for the tests of the oracle, from nothing but the standard library.
#pragma once
#include <cstdint>
#include <random>
#include <vector>

#include "reference_cpu/attention.h"

namespace flash::testing {

// Numbers that look normal: the sum of twelve uniform ones, which every standard library computes alike. As multiples
// of 1/256 below 6 they are exact in fp16.
inline std::vector<double> random_numbers(size_t count, uint64_t seed, double gain = 1) {
  std::mt19937_64 random(seed);
  std::vector<double> numbers(count);
  for (double& x : numbers) {
    int sum = -12 * 128;
    for (int k = 0; k < 12; ++k) sum += int(random() >> 56);
    x = sum / 256.0 * gain;
  }
  return numbers;
}

// Q, K, V and dO of a problem.
inline reference::Inputs random_inputs(const Problem& problem, uint64_t seed, double gain = 1) {
  return {
      random_numbers(problem.q_elements(), 4 * seed, gain), random_numbers(problem.kv_elements(), 4 * seed + 1, gain),
      random_numbers(problem.kv_elements(), 4 * seed + 2, gain), random_numbers(problem.q_elements(), 4 * seed + 3)};
}

}  // namespace flash::testing
