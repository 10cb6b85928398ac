#include "cli/verify.h"

#include "harness/inputs.h"

namespace flash::cli {

namespace {

// The inputs in double, twice, and what the oracle and the baseline make of them.
void require_host_memory(const Problem& p, bool whole_answers) {
  const double elements = double(p.q_elements()) + double(p.kv_elements());
  const double needed = elements * sizeof(double) * (whole_answers ? 10 : 5);
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
  reference::Inputs inputs{inputs_.Q, inputs_.K, inputs_.V, {}};
  if (with_gradient) inputs.dO = inputs_.dO;
  reference::Selection selection;
  if (sample_rows > 0) {
    selection = reference::sample(problem, sample_rows, 2, problem.seed);
    everything_ = selection.everything;
  }
  oracle_ = std::make_unique<reference::Oracle>(problem, inputs, selection);
}

Outcome verify(Device& device, Target target, const RegisteredStep& step, Pass pass, const Question& question) {
  HostTensors tensors = question.inputs();
  const reference::Oracle& oracle = question.oracle();
  if (pass == Pass::backward && !forward_of(step)) {
    tensors.O = oracle.O();
    tensors.LSE = oracle.LSE();
  }
  Outcome outcome;
  try {
    outcome.report = run_step(device, target, step, pass, question.problem(), tensors);
  } catch (const KernelFault& fault) {
    outcome.fault = fault.what();
    return outcome;
  }
  if (pass == Pass::forward) {
    outcome.outputs = {{"O", oracle.judge_O(tensors.O)}, {"LSE", oracle.judge_LSE(tensors.LSE)}};
  } else {
    outcome.outputs = {{"dQ", oracle.judge_dQ(tensors.dQ)},
                       {"dK", oracle.judge_dK(tensors.dK)},
                       {"dV", oracle.judge_dV(tensors.dV)}};
  }
  outcome.pass = true;
  for (const auto& [name, verdict] : outcome.outputs) outcome.pass = outcome.pass && verdict.pass;
  return outcome;
}

}  // namespace flash::cli
