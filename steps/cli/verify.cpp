#include "cli/verify.h"

#include "harness/inputs.h"

namespace flash::cli {

namespace {

// Inputs and results in double, what the oracle and the baseline make of them, and the rows' statistics of the oracle.
void require_host_memory(const Problem& p, bool whole_answers) {
  const double elements = double(p.q_elements()) + double(p.kv_elements());
  const double needed = elements * sizeof(double) * (whole_answers ? 9 : 5) + double(p.query_rows()) * 40;
  const double free = double(cpu_device().free_bytes());
  if (needed > free)
    throw Error("checking " + describe(p) + " needs about " + std::to_string(long(needed / 1e9) + 1) +
                " GB of host memory, " + std::to_string(long(free / 1e9)) + " GB are free; choose a smaller problem" +
                (whole_answers ? ", or --sample some rows" : ""));
}

}  // namespace

Question::Question(const Problem& problem, bool with_gradient, int sample_rows) : problem_(problem) {
  require_host_memory(problem, sample_rows == 0);
  inputs_ = random_tensors(problem, problem.seed);
  if (!with_gradient) inputs_.dO.clear();
  reference::Selection selection;
  if (sample_rows > 0) selection = reference::sample(problem, sample_rows, 1, problem.seed);
  everything_ = selection.everything;
  oracle_ = std::make_unique<reference::Oracle>(problem, inputs_, selection);
  if (everything_) {
    inputs_.O = oracle_->O();
    inputs_.LSE = oracle_->LSE();
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

Outcome verify(Device& device, Target target, const RegisteredStep& step, Pass pass, const Question& question) {
  const Problem& p = question.problem();
  const reference::Oracle& oracle = question.oracle();
  Outcome outcome;
  StepResult result;
  try {
    if (pass == Pass::backward && !question.everything() && !forward_of(step)) {
      const RegisteredStep& forward = forward_before(step, p, device.kind());
      HostTensors inputs = question.inputs();
      const HostTensors made =
          run_step(device, *target_for(forward, device.kind(), false), forward, Pass::forward, p, inputs).tensors;
      inputs.O = made.O;
      inputs.LSE = made.LSE;
      result = run_step(device, target, step, pass, p, inputs);
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
  if (pass == Pass::forward) {
    outcome.outputs = {{"O", oracle.judge_O(x.O)}, {"LSE", oracle.judge_LSE(x.LSE)}};
  } else {
    outcome.outputs = {{"dQ", oracle.judge_dQ(x.dQ)}, {"dK", oracle.judge_dK(x.dK)}, {"dV", oracle.judge_dV(x.dV)}};
  }
  outcome.pass = true;
  for (const auto& [name, verdict] : outcome.outputs) outcome.pass = outcome.pass && verdict.pass;
  return outcome;
}

}  // namespace flash::cli
