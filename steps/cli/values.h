// What the numbers in a checked problem's tensors are like.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "harness/problem.h"
#include "harness/tensors.h"

namespace flash::cli {

enum class Values {
  normal,    // mean 0, variance 1
  outliers,  // normal, and one in 64 is 16 times as large
  huge,      // normal, times the largest power of two that gradients in this precision stand (huge_gain)
  tiny,      // normal, times a small power of two
  constant,  // a tensor's elements are all the same, one of ±¼, ±½, ±¾, ±1
  zeros,     // 0 and −0
  denormal,  // below the smallest normal number of the type
  nan,       // normal, with one to three NaN in one of the tensors
  inf,       // the same with ∞ and −∞
};

std::string name_of(Values values);
Values values_named(const std::string& name);  // throws Error, listing the names there are
const std::vector<Values>& all_values();
bool are_finite(Values values);

// What Values::huge multiplies normal numbers by.
double huge_gain(DType type);

// Q, K, V and, where asked for, dO for a problem, rounded to its input_dtype; a function of nothing but the arguments,
// and Q, K and V the same with dO and without.
HostTensors tensors_of(const Problem& problem, uint64_t seed, Values values, bool with_gradient = true);

}  // namespace flash::cli
