// The error rule: how far a step's result may be from the oracle's.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reference_cpu/attention.h"

namespace flash::reference {

// Where a result must be NaN or infinite.
enum class NonFinite {
  same,  // NaN, +∞ and −∞ exactly where the oracle has them
  alike,  // where the oracle has one of them: in a gradient, whether an ∞ among the inputs ends as ∞ or as ∞ − ∞ = NaN
          // depends on the order of the sums, and IEEE allows either; as it allows NaN where a weight that meets ∞ is 0
  spreads,  // there, and perhaps elsewhere: a NaN or ∞ may also reach rows of its tile that do not see it
};

// One output's comparison. Passes when both errors are within their bounds and NaN, +∞ and −∞ stand where the rule
// allows them.
struct Verdict {
  bool pass = false;
  double error = 0, allowed = 0;  // ‖x − ref‖ / ‖ref‖ (absolute where ‖ref‖ = 0), over the finite elements of ref
  double max_error = 0, max_allowed = 0;  // largest |x − ref|
  std::string reason;                     // why it fails, in one line, with the place of the worst element
};

// Units of rounding that are allowed beyond twice the baseline's error, on the oracle's noise scale. A unit is 2⁻²⁴,
// half the distance from 1 to the next fp32, since that is what every step's sums are kept in; 2⁻⁵³ for fp64.
constexpr double kUnits = 2;

// How far baselines are from the oracle, over the elements that are finite in both: of each kind of error the largest.
struct BaselineErrors {
  long double sum2 = 0;  // ‖baseline − ref‖²
  double max = 0;        // largest |baseline − ref|

  template <class OracleScalar, class BaselineScalar>
  void add(const Output<BaselineScalar>& baseline, const Output<OracleScalar>& oracle);
};

// `x` against the oracle. Each error may be at most twice the baselines', plus kUnits. Written so that a NaN can never
// pass. `type` is the one that x's elements were stored in: where that cannot hold the oracle's value, ∞ is the right
// answer. `name_element` is how the reason speaks of the element of an index.
template <class OracleScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle, const BaselineErrors& baselines,
              DType type, const std::function<std::string(size_t)>& name_element = {},
              NonFinite non_finite = NonFinite::same);

// The same with one baseline.
template <class OracleScalar, class BaselineScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle, const Output<BaselineScalar>& baseline,
              DType type, const std::function<std::string(size_t)>& name_element = {},
              NonFinite non_finite = NonFinite::same) {
  BaselineErrors errors;
  errors.add(baseline, oracle);
  return judge(x, oracle, errors, type, name_element, non_finite);
}

// How many baselines there are at most. One is one draw from the errors that its arithmetic can make, and where a
// result hangs on a handful of roundings, or on many that are the same because the numbers are, it may be a lucky one:
// nobody could keep within twice of nothing. So a result that fails by the first is judged by some more, which have
// their numbers elsewhere between two powers of two (see `grid` of attention()), and one that then fails narrowly, by
// all. Where there are many roundings all draws err alike, and that changes nothing.
constexpr int kSomeBaselines = 8, kBaselines = 64;
constexpr double kNarrowly = 2;  // an error of so many times what is allowed, at most

// Those of e4m3 are unfused attention on Q, K and V that have been rounded to e4m3 with one scale each, the largest
// number becoming 448 or a little less. Three bits make luck common (a large number of Q may always meet a small one of
// K), so the first judgement is by some already, twice as many. Q and K of the odd ones are rotated at random, which
// leaves all scores as they are; but not gradients, so where there is a dO none are, nor where D is no power of two.
// `threads`: 0 for one a core.
constexpr int kE4m3Baselines = 16;
Inputs rounded_to_e4m3(const Inputs& inputs, int D, int baseline, int threads = 0);

// The oracle's and the baseline's answer to a problem, computed once and compared with any number of steps. The oracle
// works in double and the baseline in float with the problem's dtype as storage; for fp64 they are long double and
// double.
class Oracle {
 public:
  // `threads`: 0 for one a core; the answers are the same to the last bit. The inputs are kept for further baselines.
  Oracle(const Problem& problem, std::shared_ptr<const Inputs> inputs, const Selection& selection = {},
         int threads = 0);
  Oracle(const Problem& problem, Inputs inputs, const Selection& selection = {}, int threads = 0)
      : Oracle(problem, std::make_shared<const Inputs>(std::move(inputs)), selection, threads) {}
  ~Oracle();
  Oracle(Oracle&&) noexcept;

  // O and LSE as a backward pass gets them: the oracle's, rounded to the problem's output_dtype (LSE to fp32, or fp64
  // where that is the dtype). Needs everything selected.
  std::vector<double> O() const;
  std::vector<double> LSE() const;

  // Whole output tensors of a step (only the selected rows are looked at). Gradients need a dO. One call at a time: a
  // result that fails by the first baselines has more of them drawn.
  Verdict judge_O(const std::vector<double>& x, NonFinite non_finite = NonFinite::same) const;
  Verdict judge_LSE(const std::vector<double>& x, NonFinite non_finite = NonFinite::same) const;
  Verdict judge_dQ(const std::vector<double>& x, NonFinite non_finite = NonFinite::same) const;
  Verdict judge_dK(const std::vector<double>& x, NonFinite non_finite = NonFinite::same) const;
  Verdict judge_dV(const std::vector<double>& x, NonFinite non_finite = NonFinite::same) const;

 private:
  struct Answers;
  std::unique_ptr<Answers> answers_;
};

}  // namespace flash::reference
