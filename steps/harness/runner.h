// Runs one step on tensors in host memory, with every precaution: outputs and workspace are filled with NaN before,
// guard zones around all arrays are verified after.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "harness/device.h"
#include "harness/registry.h"

namespace flash {

// Tensors in host memory, widened to double; empty where not there. Values must already be representable in the
// problem's dtype (see round_to in harness/inputs.h), so that a step and the oracle see the same numbers.
struct HostTensors {
  std::vector<double> Q, K, V;     // always
  std::vector<double> dO;          // for a backward pass
  std::vector<double> O, LSE;      // results of a forward pass; inputs of a backward pass without a forward of its own
  std::vector<double> dQ, dK, dV;  // results of a backward pass
};

// One pass of one step, with its arrays on the device: made once, launched as often as wanted.
//
// A backward pass that reads what its chapter's forward pass saves gets that pass run once, here; any other takes O and
// LSE from `tensors`. Throws Error (unsupported, out of memory) or KernelFault.
class PreparedStep {
 public:
  PreparedStep(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
               const HostTensors& tensors);

  // Launches the pass; on a GPU it may still be running when this returns.
  void launch() const { run_(problem_, tensors_, nullptr); }

  // Waits for the launches, verifies the guard zones and copies the results into `tensors`.
  void finish(HostTensors& tensors) const;

  // Bytes of workspace: the step's, and what the forward pass saved for it.
  size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  void* input(const std::string& name, DType type, size_t elements, const std::vector<double>& values);
  void* output(const std::string& name, DType type, size_t elements);
  void add_workspace(const std::vector<Workspace>& wanted);
  void run_forward_first(const RegisteredStep& forward, Target target);

  Device& device_;
  Problem problem_;
  Pass pass_;
  RunPass run_ = nullptr;
  DType lse_type_;
  std::vector<Buffer> buffers_;
  Tensors tensors_;
  size_t scratch_bytes_ = 0;
};

struct RunReport {
  size_t scratch_bytes = 0;
  std::optional<Traffic> traffic;  // of the asked pass alone
};

// Prepares, launches once and finishes: the results are in `tensors`.
RunReport run_step(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
                   HostTensors& tensors);

// The build of a step that a device runs; nothing if the step has none for it. On the CPU device `observe` asks for the
// build whose memory accesses are reported.
std::optional<Target> target_for(const RegisteredStep& step, DeviceKind device, bool observe);

}  // namespace flash
