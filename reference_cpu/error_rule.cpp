#include "reference_cpu/error_rule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <sstream>
#include <variant>

#include "harness/error.h"
#include "harness/interrupt.h"
#include "harness/round.h"
#include "reference_cpu/dropout.h"
#include "reference_cpu/parallel.h"

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
bool same_kind(double x, double ref, NonFinite non_finite) {
  if (non_finite == NonFinite::alike) return std::isfinite(x) == std::isfinite(ref);
  if (non_finite == NonFinite::spreads) return std::isfinite(ref) || !std::isfinite(x);
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
void BaselineErrors::add(const Output<BaselineScalar>& baseline, const Output<OracleScalar>& oracle) {
  Distance distance;
  for (size_t i = 0; i < oracle.values.size(); ++i) {
    const OracleScalar ref = oracle.values[i];
    const BaselineScalar value = baseline.values.at(i);
    // A baseline that overflows has no say: its error there is no licence to be wrong.
    if (std::isfinite(ref) && std::isfinite(value)) distance.add(value - (long double)ref, i);
  }
  sum2 = std::max(sum2, distance.sum2);
  max = std::max(max, distance.max);
}

template <class OracleScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle, const BaselineErrors& baselines,
              DType type, const std::function<std::string(size_t)>& name_element, NonFinite non_finite) {
  const auto name = [&](size_t i) { return name_element ? name_element(i) : "element " + std::to_string(i); };
  Verdict verdict;
  const std::vector<OracleScalar>& reference = oracle.values;
  if (x.size() != reference.size()) {
    verdict.error = verdict.max_error = std::numeric_limits<double>::infinity();
    verdict.reason =
        "has " + std::to_string(x.size()) + " elements, the oracle has " + std::to_string(reference.size());
    return verdict;
  }

  Distance of_x;
  long double norm2 = 0;
  size_t wrong_kind = 0, first_wrong = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    throw_if_interrupted_at(i);
    const OracleScalar ref = reference[i];
    if (!same_kind(x[i], rounded_to(type, double(ref)), non_finite) && wrong_kind++ == 0) first_wrong = i;
    if (!std::isfinite(ref)) continue;
    norm2 += (long double)ref * ref;
    if (std::isfinite(x[i])) of_x.add(x[i] - (long double)ref, i);
  }

  const long double norm = norm2 > 0 ? std::sqrt(norm2) : 1;
  const double unit = type == DType::fp64 ? 0x1p-53 : 0x1p-24;
  verdict.error = double(std::sqrt(of_x.sum2) / norm);
  verdict.allowed = double((2 * std::sqrt(baselines.sum2) + kUnits * unit * oracle.noise_norm) / norm);
  verdict.max_error = of_x.max;
  verdict.max_allowed = 2 * baselines.max + kUnits * unit * oracle.noise_max;

  const std::string hint =
      oracle.beyond_claim
          ? "; with scores of this size P = exp(S - LSE) has no accuracy in fp32, see page 06, Huge scores"
          : "";
  if (wrong_kind > 0) {
    verdict.reason = name(first_wrong) + " is " + text(x[first_wrong]) + " where the oracle has " +
                     text(reference[first_wrong]) +
                     (fits(type, double(reference[first_wrong])) ? "" : ", which " + name_of(type) + " cannot hold") +
                     " (" + std::to_string(wrong_kind) + " of " + std::to_string(x.size()) +
                     " elements are NaN or infinite on one side only)" + hint;
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
        text(reference[of_x.worst]) + hint;
  }
  return verdict;
}

template Verdict judge(const std::vector<double>&, const Output<double>&, const BaselineErrors&, DType,
                       const std::function<std::string(size_t)>&, NonFinite);
template Verdict judge(const std::vector<double>&, const Output<long double>&, const BaselineErrors&, DType,
                       const std::function<std::string(size_t)>&, NonFinite);
template void BaselineErrors::add(const Output<float>&, const Output<double>&);
template void BaselineErrors::add(const Output<double>&, const Output<long double>&);

// ---------------------------------------------------------------------------------------------------------------------

namespace {

// The errors of the baselines drawn so far, named like the members of Results.
struct ErrorsOfResults {
  BaselineErrors O, LSE, dQ, dK, dV;
};

template <class OracleScalar, class BaselineScalar>
struct Pair {
  Results<OracleScalar> oracle;
  std::function<Results<BaselineScalar>(int)> baseline;  // computes the one of this number
  ErrorsOfResults errors{};
  int drawn = 0;
};

// Where baseline number i has a tensor's numbers between two powers of two: a factor from 1 to 2, for the first one 1.
// The fractions of the multiples of an irrational number spread evenly, however many there are; each tensor has its own
// number, so that errors of two that add up have their chance to meet.
struct Places {
  double step;
  double operator()(int i) const { return std::exp2(std::fmod(i * step, 1)); }
};
constexpr Places places_of_Q{0.41421356237}, places_of_K{0.73205080757}, places_of_V{0.23606797750},  // √2, √3, √5
    places_of_P{0.64575131106};                                                                       // √7

enum class Side { query, key };  // which of Q and K an output has the rows of

// A row with random signs, times the Hadamard matrix over its root of D.
void rotate(double* row, const std::vector<double>& signs) {
  const size_t D = signs.size();
  for (size_t i = 0; i < D; ++i) row[i] *= signs[i];
  for (size_t bit = 1; bit < D; bit *= 2)
    for (size_t i = 0; i < D; ++i) {
      if (i & bit) continue;
      const double sum = row[i] + row[i | bit];
      row[i | bit] = row[i] - row[i | bit];
      row[i] = sum;
    }
}

// ±1/√D, drawn for a baseline.
std::vector<double> random_signs(int D, int baseline) {
  std::vector<double> signs(static_cast<size_t>(D));
  for (size_t i = 0; i < signs.size(); ++i)
    signs[i] = (philox4x32_10({uint32_t(i), 0, 0, 0}, {uint32_t(baseline), 0x62617365})[0] & 1 ? -1 : 1) /
               std::sqrt(double(D));
  return signs;
}

// A tensor rounded to e4m3 and back, `largest` being what its largest number becomes. NaN and ∞ remain. Rows are
// rotated before if there are signs.
std::vector<double> rounded_to_e4m3(std::vector<double> tensor, int D, double largest, const std::vector<double>& signs,
                                    int threads) {
  constexpr size_t kRows = 256;  // of a piece of work
  const size_t row = static_cast<size_t>(D), pieces = (tensor.size() + kRows * row - 1) / (kRows * row);
  const auto each_piece = [&](const auto& work) {
    parallel_for(pieces, threads, [&](size_t i) {
      const size_t first = i * kRows * row;
      work(tensor.begin() + first, tensor.begin() + std::min(tensor.size(), first + kRows * row));
    });
  };
  if (!signs.empty())
    each_piece([&](auto begin, auto end) {
      for (; begin != end; begin += row) rotate(&*begin, signs);
    });
  double most = 0;
  for (const double x : tensor) most = std::isfinite(x) ? std::max(most, std::abs(x)) : most;
  const double scale = most > 0 ? most / largest : 1;
  each_piece([scale](auto begin, auto end) {
    std::transform(begin, end, begin,
                   [scale](double x) { return std::isfinite(x) ? rounded_to(DType::e4m3, x / scale) * scale : x; });
  });
  return tensor;
}

}  // namespace

Inputs rounded_to_e4m3(const Inputs& inputs, int D, int baseline, int threads) {
  const bool rotate = baseline % 2 == 1 && std::has_single_bit(unsigned(D)) && inputs.dO.empty();
  const std::vector<double> signs = rotate ? random_signs(D, baseline) : std::vector<double>();
  const auto rounded = [&](const std::vector<double>& tensor, const Places& places, const std::vector<double>& turns) {
    return rounded_to_e4m3(tensor, D, format_of(DType::e4m3).largest / places(baseline), turns, threads);
  };
  return {.Q = rounded(inputs.Q, places_of_Q, signs),
          .K = rounded(inputs.K, places_of_K, signs),
          .V = rounded(inputs.V, places_of_V, {}),
          .dO = inputs.dO};
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

  // Computes baselines until there are `count`.
  void draw_baselines(int count) {
    std::visit(
        [&](auto& pair) {
          for (; pair.drawn < count; ++pair.drawn) {
            const auto results = pair.baseline(pair.drawn);
            pair.errors.O.add(results.O, pair.oracle.O);
            pair.errors.LSE.add(results.LSE, pair.oracle.LSE);
            pair.errors.dQ.add(results.dQ, pair.oracle.dQ);
            pair.errors.dK.add(results.dK, pair.oracle.dK);
            pair.errors.dV.add(results.dV, pair.oracle.dV);
          }
        },
        results);
  }

  // Judges a whole tensor, by more baselines if need be; `pick` takes the output out of Results. Where NaN or ∞ stand
  // in the wrong place no baseline helps.
  template <class Pick>
  Verdict judge_output(const std::string& name, const std::vector<double>& x, Side side, size_t width, DType type,
                       NonFinite non_finite, Pick pick) {
    const auto judged = [&] { return judge_drawn(name, x, side, width, type, non_finite, pick); };
    Verdict verdict = judged();
    if (verdict.pass || !std::isfinite(verdict.error)) return verdict;
    draw_baselines(kSomeBaselines);
    verdict = judged();
    if (verdict.pass || verdict.error > kNarrowly * verdict.allowed ||
        verdict.max_error > kNarrowly * verdict.max_allowed)
      return verdict;
    draw_baselines(kBaselines);
    return judged();
  }

  // Judges by the baselines that there are.
  template <class Pick>
  Verdict judge_drawn(const std::string& name, const std::vector<double>& x, Side side, size_t width, DType type,
                      NonFinite non_finite, Pick pick) const {
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
          return judge(selected(x, side, width), pick(pair.oracle), pick(pair.errors), type, name_element, non_finite);
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
          for (const auto x : pick(pair.oracle).values) {
            throw_if_interrupted_at(values.size());
            values.push_back(rounded_to(type, double(x)));
          }
          return values;
        },
        results);
  }
};

Oracle::Oracle(const Problem& problem, std::shared_ptr<const Inputs> inputs, const Selection& selection, int threads)
    : answers_(std::make_unique<Answers>()) {
  answers_->problem = problem;
  answers_->selection = selection;
  answers_->with_gradient = inputs->dO.size() == problem.q_elements();
  if (problem.dtype == DType::fp64) {
    Pair<long double, double> pair{attention<long double>(problem, *inputs, selection, DType::fp64, threads), {}};
    pair.baseline = [=](int i) {
      return attention<double>(problem, *inputs, selection, DType::fp64, threads, places_of_P(i));
    };
    answers_->results = std::move(pair);
  } else {
    Pair<double, float> pair{attention<double>(problem, *inputs, selection, DType::fp64, threads), {}};
    pair.baseline = [=](int i) {
      const auto on = [&](const Inputs& given) {
        return attention<float>(problem, given, selection, problem.dtype, threads, places_of_P(i));
      };
      return problem.dtype == DType::e4m3 ? on(rounded_to_e4m3(*inputs, problem.D, i, threads)) : on(*inputs);
    };
    answers_->results = std::move(pair);
  }
  answers_->draw_baselines(problem.dtype == DType::e4m3 ? kE4m3Baselines : 1);
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

Verdict Oracle::judge_O(const std::vector<double>& x, NonFinite non_finite) const {
  return answers_->judge_output(
      "O", x, Side::query, answers_->problem.D, output_dtype(answers_->problem), non_finite,
      [](const auto& results) -> auto& { return results.O; });
}

Verdict Oracle::judge_LSE(const std::vector<double>& x, NonFinite non_finite) const {
  return answers_->judge_output(
      "LSE", x, Side::query, 1, lse_type(answers_->problem.dtype), non_finite,
      [](const auto& results) -> auto& { return results.LSE; });
}

Verdict Oracle::judge_dQ(const std::vector<double>& x, NonFinite non_finite) const {
  answers_->need_gradient();
  return answers_->judge_output(
      "dQ", x, Side::query, answers_->problem.D, answers_->problem.dtype, non_finite,
      [](const auto& results) -> auto& { return results.dQ; });
}

Verdict Oracle::judge_dK(const std::vector<double>& x, NonFinite non_finite) const {
  answers_->need_gradient();
  return answers_->judge_output(
      "dK", x, Side::key, answers_->problem.D, answers_->problem.dtype, non_finite,
      [](const auto& results) -> auto& { return results.dK; });
}

Verdict Oracle::judge_dV(const std::vector<double>& x, NonFinite non_finite) const {
  answers_->need_gradient();
  return answers_->judge_output(
      "dV", x, Side::key, answers_->problem.D, answers_->problem.dtype, non_finite,
      [](const auto& results) -> auto& { return results.dV; });
}

}  // namespace flash::reference
