#include "golden.h"

#include <cmath>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace flash::testing {
namespace {

// Splits a line at its commas.
std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> fields;
  std::istringstream in(line);
  for (std::string field; std::getline(in, field, ',');) fields.push_back(field);
  return fields;
}

// `count` inputs by the formula of data/README.md.
std::vector<double> golden_numbers(size_t count, uint32_t salt, double gain) {
  std::vector<double> numbers(count);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t u = uint32_t(i) * 2654435761u + salt * 40503u;
    numbers[i] = (int(u >> 24) - 128) / 64.0 * gain;
  }
  return numbers;
}

}  // namespace

std::vector<GoldenCase> read_golden(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) throw std::runtime_error("golden values: cannot read " + path);

  std::vector<GoldenCase> cases;
  while (std::getline(file, line)) {
    const std::vector<std::string> field = split(line);
    if (field.size() != 13) throw std::runtime_error("golden values: not 13 columns: " + line);
    if (cases.empty() || cases.back().name != field[0]) {
      Problem problem;
      problem.B = std::stoi(field[1]);
      problem.Hq = problem.Hkv = std::stoi(field[2]);
      problem.Nq = std::stoi(field[3]);
      problem.Nk = std::stoi(field[4]);
      problem.D = std::stoi(field[5]);
      problem.scale = field[6].empty() ? 1 / std::sqrt(double(problem.D)) : std::stod(field[6]);
      problem.causal = field[7] == "1";
      cases.push_back({field[0], problem, std::stod(field[8]), {}});
    }
    const size_t index = field[11].empty() ? 0 : std::stoull(field[11]);
    cases.back().values.push_back({field[9], field[10], index, std::stod(field[12])});
  }
  return cases;
}

reference::Inputs golden_inputs(const GoldenCase& golden) {
  const Problem& problem = golden.problem;
  return {golden_numbers(problem.q_elements(), 1, golden.gain), golden_numbers(problem.kv_elements(), 2, golden.gain),
          golden_numbers(problem.kv_elements(), 3, golden.gain), golden_numbers(problem.q_elements(), 4, 1)};
}

double measure(const GoldenValue& value, const std::vector<double>& tensor) {
  if (value.kind == "at") return tensor.at(value.index);
  long double sum = 0, squares = 0;
  for (const double x : tensor) {
    if (!std::isfinite(x)) continue;
    sum += x;
    squares += (long double)x * x;
  }
  if (value.kind == "sum") return double(sum);
  if (value.kind == "norm") return double(std::sqrt(squares));
  throw std::runtime_error("golden values: unknown kind " + value.kind);
}

}  // namespace flash::testing
