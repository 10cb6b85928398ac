#include "cli/verify.h"

#include <algorithm>
#include <cmath>

namespace flash::cli {

namespace {

// Inputs and results in double, the oracle's answers where they are whole, and its rows' statistics. (In fp64 an answer
// takes as much as two arrays.)
void require_memory_for_answers(const Problem& p, bool whole, bool with_gradient, int threads) {
  const double arrays = whole ? (with_gradient ? 9 : 6) : (with_gradient ? 4 : 2);
  const double bytes = (double(p.q_elements()) + double(p.kv_elements())) * sizeof(double) * arrays +
                       double(p.query_rows()) * 40 + reference::working_bytes(p, threads);
  require_host_memory("checking " + describe(p), bytes,
                      whole ? "choose a smaller problem, or --sample some rows" : "choose a smaller problem");
}

}  // namespace

void require_host_memory(const std::string& what, double bytes, const std::string& advice) {
  const double free = double(cpu_device().free_bytes());
  if (bytes <= free) return;
  throw Error(what + " needs about " + std::to_string(long(bytes / 1e9) + 1) + " GB of host memory, " +
              std::to_string(long(free / 1e9)) + " GB are free; " + advice);
}

Question::Question(const Problem& problem, bool with_gradient, int sample_rows, Values values, int threads)
    : problem_(problem), values_(values) {
  // The oracle draws other baselines where there is a gradient: they must not depend on what else is checked.
  const bool has_gradient = std::any_of(all_steps().begin(), all_steps().end(), [&](const RegisteredStep& step) {
    const auto& types = step.info().dtypes;
    return step.has(Pass::backward) && std::count(types.begin(), types.end(), problem.dtype);
  });
  with_gradient = with_gradient && has_gradient;
  require_memory_for_answers(problem, sample_rows == 0, with_gradient, threads);
  inputs_ = std::make_shared<HostTensors>(tensors_of(problem, problem.seed, values, with_gradient));
  reference::Selection selection;
  if (sample_rows > 0) selection = reference::sample(problem, sample_rows, 1, problem.seed);
  everything_ = selection.everything;
  oracle_ = std::make_unique<reference::Oracle>(problem, inputs_, selection, threads);
  if (everything_) {
    inputs_->O = oracle_->O();
    inputs_->LSE = oracle_->LSE();
  }
}

const RegisteredStep& forward_before(const RegisteredStep& step, const Problem& p, DeviceKind device) {
  const RegisteredStep* found = nullptr;
  for (const RegisteredStep& other : all_steps()) {
    if (&other == &step) break;
    if (target_for(other, device, false) && !why_unsupported(other, p, Pass::forward)) found = &other;
  }
  if (!found) throw Error(step.id + " needs O and LSE, and no step before it has a forward pass for " + describe(p));
  return *found;
}

namespace {

// Where O or a gradient may be NaN or infinite: gradients of inputs that are not finite have more than one right
// answer, and so has O where a weight is too small for the precision: 0 · ∞ is NaN, what is left of an exact weight
// makes it ∞.
reference::NonFinite non_finite_rule(const RegisteredStep& step, Pass pass, const Question& question) {
  const Problem& p = question.problem();
  if (are_finite(question.values())) return reference::NonFinite::same;
  if (pass == Pass::forward) {
    const bool meets_zero = question.values() == Values::inf && std::abs(p.scale) > default_scale(p.D);
    return meets_zero ? reference::NonFinite::alike : reference::NonFinite::same;
  }
  const bool all_see_all = !p.causal && p.dropout == 0;
  const bool spreads = step.info().spreads_nonfinite && !all_see_all;
  return spreads ? reference::NonFinite::spreads : reference::NonFinite::alike;
}

}  // namespace

Outcome verify(Device& device, Target target, const RegisteredStep& step, Pass pass, const Question& question) {
  const Problem& p = question.problem();
  const reference::Oracle& oracle = question.oracle();
  Outcome outcome;
  StepResult result;
  try {
    if (pass == Pass::backward && !question.everything() && !forward_of(step)) {
      const RegisteredStep& forward = forward_before(step, p, device.kind());
      const HostTensors made =
          run_step(device, *target_for(forward, device.kind(), false), forward, Pass::forward, p, question.inputs())
              .tensors;
      result = run_step(device, target, step, pass, p, question.inputs(), &made);
    } else {
      result = run_step(device, target, step, pass, p, question.inputs());
    }
  } catch (const KernelFault& fault) {
    outcome.fault = fault.what();
    return outcome;
  }
  outcome.scratch_bytes = result.scratch_bytes;
  outcome.traffic = result.traffic;
  const HostTensors& x = result.tensors;
  const reference::NonFinite rule = non_finite_rule(step, pass, question);
  if (pass == Pass::forward) {
    outcome.outputs = {{"O", oracle.judge_O(x.O, rule)}, {"LSE", oracle.judge_LSE(x.LSE)}};
  } else {
    outcome.outputs = {
        {"dQ", oracle.judge_dQ(x.dQ, rule)}, {"dK", oracle.judge_dK(x.dK, rule)}, {"dV", oracle.judge_dV(x.dV, rule)}};
  }
  outcome.pass = true;
  for (const auto& [name, verdict] : outcome.outputs) outcome.pass = outcome.pass && verdict.pass;
  return outcome;
}

}  // namespace flash::cli
