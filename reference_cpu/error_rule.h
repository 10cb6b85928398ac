// The error rule: how far a step's result may be from the oracle's.
#pragma once
#include <string>
#include <vector>

#include "reference_cpu/attention.h"

namespace flash::reference {

// One output's comparison. Passes when both errors are within their bounds and NaN, +∞ and −∞ stand exactly where the
// oracle has them.
struct Verdict {
  bool pass = false;
  double error = 0, allowed = 0;          // ‖x − ref‖ / ‖ref‖ (absolute where ‖ref‖ = 0), over the finite elements of ref
  double max_error = 0, max_allowed = 0;  // largest |x − ref|
  std::string reason;                     // why it fails, in one line, with the place of the worst element
};

// `x` against the oracle. Each error may be at most twice the baseline's, plus kUnits units of rounding (of fp32, or of
// fp64 where the problem is in fp64) on the oracle's noise scale. Written so that a NaN can never pass.
template <class Oracle, class Baseline>
Verdict judge(const std::vector<double>& x, const Output<Oracle>& oracle, const Output<Baseline>& baseline, DType dtype);

constexpr double kUnits = 4.0;

// The oracle's and the baseline's answer to a problem, computed once and compared with any number of steps.
class Oracle {
 public:
  Oracle(const Problem& problem, const Inputs& inputs, const Selection& selection = {});
  ~Oracle();
  Oracle(Oracle&&) noexcept;

  // O and LSE as a backward pass gets them: the oracle's, rounded to the problem's dtype. Needs everything selected.
  std::vector<double> O() const;
  std::vector<double> LSE() const;

  // Whole output tensors of a step (only the selected rows are looked at).
  Verdict judge_O(const std::vector<double>& x) const;
  Verdict judge_LSE(const std::vector<double>& x) const;
  Verdict judge_dQ(const std::vector<double>& x) const;
  Verdict judge_dK(const std::vector<double>& x) const;
  Verdict judge_dV(const std::vector<double>& x) const;

 private:
  struct Answers;
  Answers* answers_;
};

}  // namespace flash::reference
