// Golden values from another implementation: see data/README.md.
#pragma once
#include <string>
#include <vector>

#include "harness/problem.h"
#include "reference_cpu/attention.h"

namespace flash::testing {

// One number that is known of a result.
struct GoldenValue {
  std::string tensor;  // O, LSE, dQ, dK, dV
  std::string kind;    // sum, norm (over the finite elements), or at (one element)
  size_t index = 0;    // for at
  double value = 0;
};

struct GoldenCase {
  std::string name;
  Problem problem;
  double gain = 1;
  std::vector<GoldenValue> values;
};

// All cases of a golden.csv. Throws std::runtime_error when the file cannot be read.
std::vector<GoldenCase> read_golden(const std::string& path);

// Q, K, V and dO of a case.
reference::Inputs golden_inputs(const GoldenCase& golden);

// What `value` says of a tensor, computed from `tensor`.
double measure(const GoldenValue& value, const std::vector<double>& tensor);

}  // namespace flash::testing
