// Runs one step on tensors in host memory, with every precaution: outputs and workspace are filled with NaN before,
// guard zones around them are verified after.
#pragma once
#include <optional>
#include <vector>

#include "harness/device.h"
#include "harness/registry.h"

namespace flash {

// Tensors in host memory, widened to double; empty where not there. Values must already be representable in the
// problem's dtype (see round_to in harness/inputs.h), so that a step and the oracle see the same numbers.
struct HostTensors {
  std::vector<double> Q, K, V;      // always
  std::vector<double> dO;           // for a backward pass
  std::vector<double> O, LSE;       // results of a forward pass; inputs of a backward pass that has no forward of its own
  std::vector<double> dQ, dK, dV;   // results of a backward pass
};

struct RunReport {
  size_t scratch_bytes = 0;        // workspace of the step, and what its forward pass saved for it
  std::optional<Traffic> traffic;  // of the asked pass alone
};

// Runs `pass` of the step as compiled for `target` and fills in the results in `tensors`. A backward pass that reads
// what its chapter's forward pass saves gets that pass run first (and O, LSE filled in); any other takes O and LSE from
// `tensors`. Throws Error (unsupported, out of memory) or KernelFault.
RunReport run_step(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
                   HostTensors& tensors);

// The step's memory on a device for repeated launches, as `bench` needs them: made once, launched many times.
class PreparedStep {
 public:
  PreparedStep(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
               const HostTensors& tensors);
  void launch() const;                        // the asked pass, asynchronously
  size_t scratch_bytes() const;
  HostTensors download();                     // results of the asked pass; checks the guard zones
 private:
  Buffer& add(const std::string& name, size_t bytes);
  Device& device_;
  Problem problem_;
  Pass pass_;
  RunPass run_;
  std::vector<Buffer> buffers_;
  Tensors addresses_;
  size_t scratch_bytes_ = 0;
};

}  // namespace flash
