// Runs one step on tensors in host memory, with every precaution: outputs and workspace are filled with NaN before,
// guard zones around all arrays are verified after.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "harness/device.h"
#include "harness/registry.h"
#include "harness/tensors.h"

namespace flash {

// One pass of one step, with its arrays on the device: made once, launched as often as wanted.
//
// A backward pass that reads what its chapter's forward pass saves gets that pass run once, here; any other takes O and
// LSE from `forward`, if that is given, or else from `inputs`. Throws Error (unsupported, out of memory) or
// KernelFault, as launching does (LaunchError).
class PreparedStep {
 public:
  PreparedStep(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
               const HostTensors& inputs, const HostTensors* forward = nullptr);

  // Launches the pass; on a GPU it may still be running when this returns.
  void launch() const {
    if (quantise_) launch_quantisation();
    launch_pass();
  }
  // The two parts of it, where a step quantises.
  bool quantises() const { return quantise_ != nullptr; }
  void launch_quantisation() const;
  void launch_pass() const;

  // Waits for the launches and verifies the guard zones; throws KernelFault.
  void check_guards() const;

  // The same, and copies back the results: O and LSE, or dQ, dK and dV; and with
  // these O and LSE too, where the chapter's forward pass was run for them.
  HostTensors finish() const;

  // Bytes of workspace: the step's, and what the forward pass saved for it.
  size_t scratch_bytes() const { return scratch_bytes_; }

 private:
  void* input(const std::string& name, DType type, size_t elements, const std::vector<double>& values);
  void* output(const std::string& name, DType type, size_t elements);
  void add_workspace(const std::vector<Workspace>& wanted);
  void run_forward_first(const RegisteredStep& forward, Target target);

  Device& device_;
  std::string id_;
  Problem problem_;
  Pass pass_;
  RunPass run_ = nullptr, quantise_ = nullptr;
  bool ran_forward_ = false;
  DType lse_type_;
  std::vector<Buffer> buffers_;
  Tensors tensors_;
  size_t scratch_bytes_ = 0;
};

struct StepResult {
  HostTensors tensors;  // see PreparedStep::finish
  size_t scratch_bytes = 0;
  std::optional<Traffic> traffic;  // of the asked pass alone, where its kernels are observed
};

// Prepares, launches once and finishes.
StepResult run_step(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
                    const HostTensors& inputs, const HostTensors* forward = nullptr);

// Bytes that a pass takes of its device's memory, at most at a time: all arrays of a PreparedStep.
double memory_needed(const Device& device, Target target, const RegisteredStep& step, Pass pass,
                     const Problem& problem);

// Why the device has no room for that, as one line with figures that ends in `advice`, and in more of it where the
// step's workspace is to blame; nothing if it has.
std::optional<std::string> why_too_large(const Device& device, Target target, const RegisteredStep& step, Pass pass,
                                         const Problem& problem,
                                         const std::string& advice = "choose a smaller problem");

// The build of a step that a device runs; nothing if the step has none for it. On the CPU device `observe` asks for the
// build whose memory accesses are reported.
std::optional<Target> target_for(const RegisteredStep& step, DeviceKind device, bool observe);

}  // namespace flash
