#include "cli/values.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cli/draws.h"
#include "harness/error.h"
#include "harness/inputs.h"
#include "harness/interrupt.h"
#include "harness/round.h"

namespace flash::cli {
namespace {

struct NamedValues {
  Values values;
  const char* name;
};
constexpr NamedValues kNames[] = {
    {Values::normal, "normal"},     {Values::outliers, "outliers"}, {Values::huge, "huge"},
    {Values::tiny, "tiny"},         {Values::constant, "constant"}, {Values::zeros, "zeros"},
    {Values::denormal, "denormal"}, {Values::nan, "nan"},           {Values::inf, "inf"}};

// Where the type's numbers become denormal, and how far apart they are there.
double smallest_normal(DType type) {
  switch (type) {
    case DType::fp64:
      return std::numeric_limits<double>::min();
    case DType::fp16:
      return 0x1p-14;
    default:
      return 0x1p-126;
  }
}

double tiny_gain(DType type) { return type == DType::fp16 ? 0x1p-6 : 0x1p-30; }

// One tensor, whose elements are normal numbers to begin with. `number` is its number among the problem's.
void change(std::vector<double>& x, DType type, uint64_t seed, uint32_t number, Values values) {
  Draws draws(seed, number, 0);
  const auto each = [&](auto f) {
    for (size_t i = 0; i < x.size(); i++) {
      throw_if_interrupted_at(i);
      x[i] = f(x[i]);
    }
  };
  const auto scale = [&](double gain) { each([&](double v) { return rounded_to(type, v * gain); }); };
  switch (values) {
    case Values::outliers:
      each([&](double v) { return draws.below(64) == 0 ? rounded_to(type, v * 16) : v; });
      break;
    case Values::huge:
      // In fp16 dP = dO · V, and so dS, must stay below 65,504: there dO is as small as the rest is large.
      scale(type == DType::fp16 && number == 4 ? 1 / huge_gain(type) : huge_gain(type));
      break;
    case Values::tiny:
      scale(tiny_gain(type));
      break;
    case Values::constant: {
      const int quarters = 1 + draws.below(4);
      std::fill(x.begin(), x.end(), draws.chance(50) ? quarters / 4.0 : quarters / -4.0);
      break;
    }
    case Values::zeros:
      each([&](double) { return draws.chance(50) ? 0.0 : -0.0; });
      break;
    case Values::denormal:
      scale(smallest_normal(type) / 8);
      each([&](double v) { return std::fabs(v) < smallest_normal(type) ? v : 0; });
      break;
    default:
      break;
  }
}

// Puts one to three values that are no numbers into one of the tensors.
void plant(HostTensors& t, const Problem& p, uint64_t seed, Values values) {
  Draws draws(seed, 0, 1);
  std::vector<double>* tensors[] = {&t.Q, &t.K, &t.V, &t.dO};
  // A row that has no weight left, by dropout or because all its scores are −∞, has several right answers once a NaN
  // or an ∞ is about: does dO · O = NaN · 0 count? Rows that see few keys are kept from becoming such.
  const bool rows_see_many = !p.causal && p.Nk >= 32 && p.dropout <= 0.5;
  int first = 0, count = 4;
  if (!rows_see_many && p.dropout > 0) first = 2, count = 1;                            // V
  if (!rows_see_many && p.dropout == 0 && values == Values::inf) first = 2, count = 2;  // V, dO
  std::vector<double>& x = *tensors[first + draws.below(count)];
  for (int count = 1 + draws.below(3); count > 0 && !x.empty(); count--) {
    double& place = x[size_t(draws.long_word() % x.size())];
    place = values == Values::nan ? std::numeric_limits<double>::quiet_NaN()
                                  : std::copysign(std::numeric_limits<double>::infinity(), draws.chance(50) ? 1 : -1);
    place = rounded_to(input_dtype(p), place);
  }
}

}  // namespace

std::string name_of(Values values) {
  for (const NamedValues& n : kNames)
    if (n.values == values) return n.name;
  throw Error("values: not a value of Values");
}

Values values_named(const std::string& name) {
  std::string known;
  for (const NamedValues& n : kNames) {
    if (name == n.name) return n.values;
    known += (known.empty() ? "" : ", ") + std::string(n.name);
  }
  throw Error("--values: there is no '" + name + "'; choose one of " + known);
}

const std::vector<Values>& all_values() {
  static const std::vector<Values> all = [] {
    std::vector<Values> values;
    for (const NamedValues& n : kNames) values.push_back(n.values);
    return values;
  }();
  return all;
}

bool are_finite(Values values) { return values != Values::nan && values != Values::inf; }

double huge_gain(DType type) { return type == DType::fp16 ? 0x1p10 : 0x1p32; }

HostTensors tensors_of(const Problem& p, uint64_t seed, Values values, bool with_gradient) {
  HostTensors t = random_tensors(p, seed, with_gradient);
  std::vector<double>* tensors[] = {&t.Q, &t.K, &t.V, &t.dO};
  for (uint32_t i = 0; i < 4; i++) change(*tensors[i], input_dtype(p), seed, i + 1, values);
  if (!are_finite(values)) plant(t, p, seed, values);
  return t;
}

}  // namespace flash::cli
