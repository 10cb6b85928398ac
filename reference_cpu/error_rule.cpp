#include "reference_cpu/error_rule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>
#include <variant>

#include "harness/error.h"
#include "reference_cpu/dropout.h"
#include "reference_cpu/round.h"

namespace flash::reference {
namespace {

// How far an array is from the oracle's, over the elements that are finite in both. Sums are long double so that
// squares of large numbers do not overflow.
struct Distance {
  long double sum2 = 0;
  double max = 0;
  size_t worst = 0;  // where the maximum is

  void add(long double difference, size_t where) {
    sum2 += difference * difference;
    if (std::abs(difference) > max) {
      max = double(std::abs(difference));
      worst = where;
    }
  }
};

// Whether x may stand where the oracle has `ref`, as far as being finite, NaN, +∞ or −∞ goes.
bool same_kind(double x, double ref, NonFinite rule) {
  if (rule == NonFinite::alike) return std::isfinite(x) == std::isfinite(ref);
  if (rule == NonFinite::spreads) return std::isfinite(ref) || !std::isfinite(x);
  if (std::isnan(x) || std::isnan(ref)) return std::isnan(x) && std::isnan(ref);
  if (std::isinf(x) || std::isinf(ref)) return x == ref;
  return true;
}

// Whether the type can hold a finite number without making an infinity of it.
bool fits(DType type, double x) { return !std::isfinite(x) || std::isfinite(rounded_to(type, x)); }

// A number short enough for a message.
std::string text(long double x) {
  if (std::isnan(x)) return "nan";  // which has no sign that would mean anything
  std::ostringstream out;
  out.precision(6);
  out << x;
  return out.str();
}

// The type that LSE is kept in.
DType lse_type(DType type) { return type == DType::fp64 ? DType::fp64 : DType::fp32; }

}  // namespace

template <class OracleScalar, class BaselineScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle,
              const std::vector<const Output<BaselineScalar>*>& baselines, DType type,
              const std::function<std::string(size_t)>& name_element, const Rule& rule) {
  const auto name = [&](size_t i) { return name_element ? name_element(i) : "element " + std::to_string(i); };
  Verdict verdict;
  const std::vector<OracleScalar>& reference = oracle.values;
  for (const Output<BaselineScalar>* baseline : baselines) {
    if (x.size() == reference.size() && baseline->values.size() == reference.size()) continue;
    verdict.error = verdict.max_error = std::numeric_limits<double>::infinity();
    verdict.reason = "has " + std::to_string(x.size()) + " elements, the oracle has " +
                     std::to_string(reference.size()) + " and the baseline " + std::to_string(baseline->values.size());
    return verdict;
  }

  Distance of_x;
  std::vector<Distance> of_baselines(baselines.size());
  long double norm2 = 0;
  size_t wrong_kind = 0, first_wrong = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const OracleScalar ref = reference[i];
    if (!same_kind(x[i], rounded_to(type, double(ref)), rule.non_finite) && wrong_kind++ == 0) first_wrong = i;
    if (!std::isfinite(ref)) continue;
    norm2 += (long double)ref * ref;
    if (std::isfinite(x[i])) of_x.add(x[i] - (long double)ref, i);
    // A baseline that overflows has no say: its error there is no licence to be wrong.
    for (size_t b = 0; b < baselines.size(); ++b) {
      const BaselineScalar value = baselines[b]->values[i];
      if (std::isfinite(value)) of_baselines[b].add(value - (long double)ref, i);
    }
  }
  Distance of_baseline;
  for (const Distance& distance : of_baselines) {
    of_baseline.sum2 = std::max(of_baseline.sum2, distance.sum2);
    of_baseline.max = std::max(of_baseline.max, distance.max);
  }

  const long double norm = norm2 > 0 ? std::sqrt(norm2) : 1;
  const double unit = type == DType::fp64 ? 0x1p-53 : 0x1p-24;
  verdict.error = double(std::sqrt(of_x.sum2) / norm);
  verdict.allowed = double((2 * std::sqrt(of_baseline.sum2) + rule.units * unit * oracle.noise_norm) / norm);
  verdict.max_error = of_x.max;
  verdict.max_allowed = 2 * of_baseline.max + rule.units * unit * oracle.noise_max;

  if (wrong_kind > 0) {
    verdict.reason = name(first_wrong) + " is " + text(x[first_wrong]) + " where the oracle has " +
                     text(reference[first_wrong]) +
                     (fits(type, double(reference[first_wrong])) ? "" : ", which " + name_of(type) + " cannot hold") +
                     " (" + std::to_string(wrong_kind) + " of " + std::to_string(x.size()) +
                     " elements are NaN or infinite on one side only)";
    // The finite rest may look fine: say in figures, too, that this is not.
    verdict.error = verdict.max_error = std::numeric_limits<double>::infinity();
    return verdict;
  }
  const bool error_is_small = verdict.error <= verdict.allowed,
             largest_is_small = verdict.max_error <= verdict.max_allowed;
  verdict.pass = error_is_small && largest_is_small;
  if (!verdict.pass) {
    verdict.reason =
        (error_is_small ? "largest error " + text(verdict.max_error) + ", allowed " + text(verdict.max_allowed)
                        : "relative error " + text(verdict.error) + ", allowed " + text(verdict.allowed)) +
        "; worst is " + name(of_x.worst) + ": " + text(x[of_x.worst]) + ", the oracle has " +
        text(reference[of_x.worst]);
    if (oracle.beyond_claim)
      verdict.reason += "; with scores of this size P = exp(S - LSE) has no accuracy in fp32, see page 06, Huge scores";
  }
  return verdict;
}

template <class OracleScalar, class BaselineScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle, const Output<BaselineScalar>& baseline,
              DType type, const std::function<std::string(size_t)>& name_element, const Rule& rule) {
  return judge(x, oracle, std::vector<const Output<BaselineScalar>*>{&baseline}, type, name_element, rule);
}

template Verdict judge(const std::vector<double>&, const Output<double>&, const Output<float>&, DType,
                       const std::function<std::string(size_t)>&, const Rule&);
template Verdict judge(const std::vector<double>&, const Output<long double>&, const Output<double>&, DType,
                       const std::function<std::string(size_t)>&, const Rule&);

// ---------------------------------------------------------------------------------------------------------------------

namespace {

template <class OracleScalar, class BaselineScalar>
struct Pair {
  Results<OracleScalar> oracle;
  std::vector<Results<BaselineScalar>> baselines;
};

// The rows of a tensor with random signs, times the Hadamard matrix over its root of D.
std::vector<double> rotated(const std::vector<double>& tensor, int D, int seed) {
  std::vector<double> x(tensor.size());
  std::vector<double> sign(static_cast<size_t>(D));
  for (size_t i = 0; i < sign.size(); ++i)
    sign[i] =
        (philox4x32_10({uint32_t(i), 0, 0, 0}, {uint32_t(seed), 0x62617365})[0] & 1 ? -1 : 1) / std::sqrt(double(D));
  for (size_t i = 0; i < x.size(); ++i) x[i] = tensor[i] * sign[i % sign.size()];
  for (size_t row = 0; row < x.size(); row += sign.size())
    for (size_t bit = 1; bit < sign.size(); bit *= 2)
      for (size_t i = row; i < row + sign.size(); ++i) {
        if ((i - row) & bit) continue;
        const double sum = x[i] + x[i | bit];
        x[i | bit] = x[i] - x[i | bit];
        x[i] = sum;
      }
  return x;
}

// A tensor rounded to e4m3 and back, `largest` being what its largest number becomes. NaN and ∞ remain.
std::vector<double> rounded_to_e4m3(const std::vector<double>& tensor, double largest) {
  double most = 0;
  for (const double x : tensor) most = std::isfinite(x) ? std::max(most, std::abs(x)) : most;
  const double scale = most > 0 ? most / largest : 1;
  std::vector<double> rounded(tensor.size());
  std::transform(tensor.begin(), tensor.end(), rounded.begin(),
                 [scale](double x) { return std::isfinite(x) ? rounded_to(DType::e4m3, x / scale) * scale : x; });
  return rounded;
}

enum class Side { query, key };  // which of Q and K an output has the rows of

}  // namespace

Inputs rounded_to_e4m3(const Inputs& inputs, int D, int baseline) {
  const double largest = format_of(DType::e4m3).largest / std::exp2(double(baseline) / kE4m3Baselines);
  const bool rotate = baseline % 2 == 1 && std::has_single_bit(unsigned(D)) && inputs.dO.empty();
  Inputs rounded;
  rounded.Q = rounded_to_e4m3(rotate ? rotated(inputs.Q, D, baseline) : inputs.Q, largest);
  rounded.K = rounded_to_e4m3(rotate ? rotated(inputs.K, D, baseline) : inputs.K, largest);
  rounded.V = rounded_to_e4m3(inputs.V, largest);
  rounded.dO = inputs.dO;
  return rounded;
}

struct Oracle::Answers {
  Problem problem;
  Selection selection;
  bool with_gradient;
  std::variant<Pair<double, float>, Pair<long double, double>> results;

  // The elements of the selected rows of a whole tensor, whose rows are `width` wide.
  std::vector<double> selected(const std::vector<double>& x, Side side, size_t width) const {
    if (selection.everything) return x;
    std::vector<double> elements;
    for (const int64_t row : side == Side::query ? selection.query_rows : selection.key_rows) {
      elements.insert(elements.end(), x.begin() + row * width, x.begin() + (row + 1) * width);
    }
    return elements;
  }

  // "dK[b 0, head 1, row 17, column 3]" for an element of the selection.
  std::string place(const std::string& name, Side side, size_t width, size_t index) const {
    size_t row = index / width;
    if (!selection.everything) row = side == Side::query ? selection.query_rows[row] : selection.key_rows[row];
    const size_t length = side == Side::query ? problem.Nq : problem.Nk;
    const size_t heads = side == Side::query ? problem.Hq : problem.Hkv;
    return name + "[b " + std::to_string(row / length / heads) + ", head " + std::to_string(row / length % heads) +
           ", row " + std::to_string(row % length) +
           (width == 1 ? "]" : ", column " + std::to_string(index % width) + "]");
  }

  // Judges a whole tensor; `pick` takes the output out of Results.
  template <class Pick>
  Verdict judge_output(const std::string& name, const std::vector<double>& x, Side side, size_t width, DType type,
                       const Rule& rule, Pick pick) const {
    const size_t size = (side == Side::query ? problem.query_rows() : problem.key_rows()) * width;
    Verdict verdict;
    if (x.size() != size) {
      verdict.error = verdict.max_error = std::numeric_limits<double>::infinity();
      verdict.reason = name + " has " + std::to_string(x.size()) + " elements, not " + std::to_string(size);
      return verdict;
    }
    const auto name_element = [&](size_t i) { return place(name, side, width, i); };
    verdict = std::visit(
        [&](const auto& pair) {
          using BaselineOutput = std::remove_cvref_t<decltype(pick(pair.baselines.front()))>;
          std::vector<const BaselineOutput*> baselines;
          for (const auto& results : pair.baselines) baselines.push_back(&pick(results));
          return judge(selected(x, side, width), pick(pair.oracle), baselines, type, name_element, rule);
        },
        results);
    if (!verdict.pass) verdict.reason = name + ": " + verdict.reason;
    return verdict;
  }

  // Throws Error when there is no gradient to judge by.
  void need_gradient() const {
    if (!with_gradient) throw Error("oracle: no gradient was computed; give it dO to judge gradients");
  }

  // The oracle's own output, rounded.
  template <class Pick>
  std::vector<double> rounded(DType type, Pick pick) const {
    if (!selection.everything) throw Error("oracle: only selected rows were computed; O() and LSE() need all of them");
    return std::visit(
        [&](const auto& pair) {
          std::vector<double> values;
          for (const auto x : pick(pair.oracle).values) values.push_back(rounded_to(type, double(x)));
          return values;
        },
        results);
  }
};

Oracle::Oracle(const Problem& problem, const Inputs& inputs, const Selection& selection, int threads)
    : answers_(std::make_unique<Answers>()) {
  answers_->problem = problem;
  answers_->selection = selection;
  answers_->with_gradient = inputs.dO.size() == problem.q_elements();
  if (problem.dtype == DType::fp64) {
    answers_->results =
        Pair<long double, double>{attention<long double>(problem, inputs, selection, DType::fp64, threads),
                                  {attention<double>(problem, inputs, selection, DType::fp64, threads)}};
    return;
  }
  Pair<double, float> pair{attention<double>(problem, inputs, selection, DType::fp64, threads), {}};
  const auto add_baseline = [&](const Inputs& given) {
    pair.baselines.push_back(attention<float>(problem, given, selection, problem.dtype, threads));
  };
  if (problem.dtype == DType::e4m3)
    for (int i = 0; i < kE4m3Baselines; ++i) add_baseline(rounded_to_e4m3(inputs, problem.D, i));
  else
    add_baseline(inputs);
  answers_->results = std::move(pair);
}

Oracle::~Oracle() = default;
Oracle::Oracle(Oracle&&) noexcept = default;

std::vector<double> Oracle::O() const {
  return answers_->rounded(
      output_dtype(answers_->problem), [](const auto& results) -> auto& { return results.O; });
}

std::vector<double> Oracle::LSE() const {
  return answers_->rounded(
      lse_type(answers_->problem.dtype), [](const auto& results) -> auto& { return results.LSE; });
}

Verdict Oracle::judge_O(const std::vector<double>& x, const Rule& rule) const {
  return answers_->judge_output(
      "O", x, Side::query, answers_->problem.D, output_dtype(answers_->problem), rule,
      [](const auto& results) -> auto& { return results.O; });
}

Verdict Oracle::judge_LSE(const std::vector<double>& x, const Rule& rule) const {
  return answers_->judge_output(
      "LSE", x, Side::query, 1, lse_type(answers_->problem.dtype), rule,
      [](const auto& results) -> auto& { return results.LSE; });
}

Verdict Oracle::judge_dQ(const std::vector<double>& x, const Rule& rule) const {
  answers_->need_gradient();
  return answers_->judge_output(
      "dQ", x, Side::query, answers_->problem.D, answers_->problem.dtype, rule,
      [](const auto& results) -> auto& { return results.dQ; });
}

Verdict Oracle::judge_dK(const std::vector<double>& x, const Rule& rule) const {
  answers_->need_gradient();
  return answers_->judge_output(
      "dK", x, Side::key, answers_->problem.D, answers_->problem.dtype, rule,
      [](const auto& results) -> auto& { return results.dK; });
}

Verdict Oracle::judge_dV(const std::vector<double>& x, const Rule& rule) const {
  answers_->need_gradient();
  return answers_->judge_output(
      "dV", x, Side::key, answers_->problem.D, answers_->problem.dtype, rule,
      [](const auto& results) -> auto& { return results.dV; });
}

}  // namespace flash::reference
