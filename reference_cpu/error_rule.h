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
          // depends on the order of the sums, and IEEE allows either
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

// What a comparison allows beyond twice the baseline's error.
struct Rule {
  NonFinite non_finite = NonFinite::same;

  // Units of rounding that are always allowed, on the oracle's noise scale. A unit is 2⁻²⁴, half the distance from 1 to
  // the next fp32, since that is what every step's sums are kept in; 2⁻⁵³ for fp64. The scale takes errors as
  // independent; those of n equal terms are not, and come to n / 2 times as much.
  double units = 2;
};

// `x` against the oracle. Each error may be at most twice the baseline's, plus the rule's units of rounding. Written so
// that a NaN can never pass. `type` is the one that x's elements were stored in: where that cannot hold the oracle's
// value, ∞ is the right answer. `name_element` is how the reason speaks of the element of an index.
template <class OracleScalar, class BaselineScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle, const Output<BaselineScalar>& baseline,
              DType type, const std::function<std::string(size_t)>& name_element = {}, const Rule& rule = {});

extern template Verdict judge(const std::vector<double>&, const Output<double>&, const Output<float>&, DType,
                              const std::function<std::string(size_t)>&, const Rule&);
extern template Verdict judge(const std::vector<double>&, const Output<long double>&, const Output<double>&, DType,
                              const std::function<std::string(size_t)>&, const Rule&);

// The same with several baselines; of each kind of error the largest of them counts.
template <class OracleScalar, class BaselineScalar>
Verdict judge(const std::vector<double>& x, const Output<OracleScalar>& oracle,
              const std::vector<const Output<BaselineScalar>*>& baselines, DType type,
              const std::function<std::string(size_t)>& name_element = {}, const Rule& rule = {});

// Baselines of e4m3: unfused attention on Q, K and V that have been rounded to e4m3 with one scale each, the largest
// number becoming 448 or a little less. With so few bits a few numbers may happen to suit a scale, or a score its
// columns: a large number of Q meets a small one of K. A score that comes out exact by chance would allow no error at
// all. So there are sixteen, their scales 2^(1/16) apart, and of the odd ones Q and K are rotated at random, which
// leaves all scores as they are; but not gradients, so where there is a dO none are, nor where D is no power of two.
constexpr int kE4m3Baselines = 16;
Inputs rounded_to_e4m3(const Inputs& inputs, int D, int baseline);

// The oracle's and the baseline's answer to a problem, computed once and compared with any number of steps. The oracle
// works in double and the baseline in float with the problem's dtype as storage; for fp64 they are long double and
// double. For e4m3 there are kE4m3Baselines.
class Oracle {
 public:
  // `threads`: 0 for one a core; the answers are the same to the last bit.
  Oracle(const Problem& problem, const Inputs& inputs, const Selection& selection = {}, int threads = 0);
  ~Oracle();
  Oracle(Oracle&&) noexcept;

  // O and LSE as a backward pass gets them: the oracle's, rounded to the problem's output_dtype (LSE to fp32, or fp64
  // where that is the dtype). Needs everything selected.
  std::vector<double> O() const;
  std::vector<double> LSE() const;

  // Whole output tensors of a step (only the selected rows are looked at). Gradients need a dO.
  Verdict judge_O(const std::vector<double>& x, const Rule& rule = {}) const;
  Verdict judge_LSE(const std::vector<double>& x, const Rule& rule = {}) const;
  Verdict judge_dQ(const std::vector<double>& x, const Rule& rule = {}) const;
  Verdict judge_dK(const std::vector<double>& x, const Rule& rule = {}) const;
  Verdict judge_dV(const std::vector<double>& x, const Rule& rule = {}) const;

 private:
  struct Answers;
  std::unique_ptr<Answers> answers_;
};

}  // namespace flash::reference
