// The project's own numbers: the same seed gives the same inputs on every machine and with every standard library.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "harness/problem.h"
#include "harness/tensors.h"

namespace flash {

// Bytes of the type for upload, and back.
std::vector<std::byte> encode(DType type, std::span<const double> values);
std::vector<double> decode(DType type, std::span<const std::byte> bytes);

// `count` numbers that are normal to the eye of a test (the sum of 12 uniform ones: mean 0, variance 1, within ±6),
// rounded to the type. `tensor` tells apart the arrays of one seed.
std::vector<double> normal_numbers(size_t count, uint64_t seed, uint32_t tensor, DType type);

// Q, K, V and, where asked for, dO for a problem, normal, rounded to its input_dtype.
HostTensors random_tensors(const Problem& problem, uint64_t seed, bool with_gradient = true);

}  // namespace flash
