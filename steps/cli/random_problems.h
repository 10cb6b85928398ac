// The cases of `flashsteps check --random`: drawn by number, and cut down when one fails.
#pragma once
#include <functional>
#include <vector>

#include "cli/options.h"
#include "cli/report.h"

namespace flash::cli {

// Case `number` of a seed for one pass of one step: a small problem that the step supports, and what its numbers are
// like. Steps that support the same get the same case. What `given` says is kept to.
struct RandomCase {
  Problem problem;
  Values values;
};
RandomCase random_case(const Step& step, Pass pass, uint64_t seed, uint32_t number, const ProblemOptions& given,
                       std::optional<Values> values);

// The smallest item that still fails, as far as changes that make it smaller or plainer, one after the other, lead
// there. `fails` is asked at most `questions` times.
Item smallest_failing(Item item, const std::function<bool(const Item&)>& fails, int questions = 120);

}  // namespace flash::cli
