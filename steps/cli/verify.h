// A step's answer to one problem, judged by the oracle. Used by `check` and `tour`.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/values.h"
#include "harness/registry.h"
#include "harness/runner.h"
#include "reference_cpu/error_rule.h"

namespace flash::cli {

// A problem with its inputs and the oracle's answers, computed once for all steps that are asked it.
class Question {
 public:
  // Random inputs. `sample_rows` > 0: the oracle answers for about that many rows of each output only. `threads` work
  // on the answers, 0 for one a core.
  Question(const Problem& problem, bool with_gradient, int sample_rows = 0, Values values = Values::normal,
           int threads = 0);

  const Problem& problem() const { return problem_; }
  Values values() const { return values_; }
  const HostTensors& inputs() const { return *inputs_; }
  const reference::Oracle& oracle() const { return *oracle_; }
  bool everything() const { return everything_; }

 private:
  Problem problem_;
  Values values_;
  std::shared_ptr<HostTensors> inputs_;
  bool everything_ = true;
  std::unique_ptr<reference::Oracle> oracle_;
};

// Throws Error if the host has not that much memory: before the system ends the process for taking it.
void require_host_memory(const std::string& what, double bytes, const std::string& advice = "choose a smaller problem");

// What came of one pass of one step.
struct Outcome {
  bool pass = false;
  std::map<std::string, reference::Verdict> outputs;  // "O", "LSE" or "dQ", "dK", "dV"; empty after a fault
  std::string fault;                                  // what the kernel did that no kernel may do, or asked for
  size_t scratch_bytes = 0;
  std::optional<Traffic> traffic;  // where the kernels are observed
};

// A backward pass without a forward pass of its own gets O and LSE from the oracle; where that has only a sample of
// them, from the nearest forward step before it.
Outcome verify(Device& device, Target target, const RegisteredStep& step, Pass pass, const Question& question);

// The forward pass whose O and LSE a backward pass without one of its own takes: the nearest step before it that can
// solve the problem on this device. Throws Error if there is none.
const RegisteredStep& forward_before(const RegisteredStep& step, const Problem& problem, DeviceKind device);

}  // namespace flash::cli
