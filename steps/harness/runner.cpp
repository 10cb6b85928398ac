#include "harness/runner.h"

#include <algorithm>
#include <span>

#include "harness/inputs.h"

namespace flash {
namespace {

// How much of an array is in its device format on the host: work for all its cores, and little memory.
constexpr size_t kElementsInTransit = 1 << 21;

std::vector<Workspace> workspace_of(const Step& step, const Problem& problem) {
  return step.workspace ? step.workspace(problem) : std::vector<Workspace>{};
}

DType lse_dtype(const Problem& p) { return p.dtype == DType::fp64 ? DType::fp64 : DType::fp32; }

// Launches, and says whose a wrong launch is, or a workspace that is not there.
void launch_named(const std::string& id, RunPass pass, const Problem& p, const Tensors& tensors) {
  try {
    pass(p, tensors, nullptr);
  } catch (const LaunchError& e) {
    throw LaunchError(id + ": " + e.what());
  } catch (const Error& e) {
    throw Error(id + ": " + e.what());
  }
}

// A pass's workspace of one device: the step's own, and that of the forward pass which is run for it first.
struct Scratch {
  double own = 0, saved = 0, passing = 0;
  double all() const { return own + saved + passing; }
};

Scratch scratch_of(const Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& p) {
  Scratch scratch;
  const RegisteredStep* forward = pass == Pass::backward ? forward_of(step) : nullptr;
  const auto taken = [&](const Workspace& w) {
    return device.taken_bytes(double(w.bytes), target == Target::cpu_observed);
  };
  if (forward != &step)
    for (const Workspace& w : workspace_of(step.builds.at(target), p)) scratch.own += taken(w);
  if (forward)
    for (const Workspace& w : workspace_of(forward->builds.at(target), p))
      (w.saved ? scratch.saved : scratch.passing) += taken(w);
  return scratch;
}

// Whether it is four times as large for sequences twice as long.
bool grows_with_scores(const Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& p) {
  Problem half = p;
  half.Nq = p.Nq / 2, half.Nk = p.Nk / 2;
  return scratch_of(device, target, step, pass, p).all() > 3 * scratch_of(device, target, step, pass, half).all();
}

}  // namespace

double memory_needed(const Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& p) {
  const auto taken = [&](size_t elements, DType type) {
    return device.taken_bytes(double(elements) * double(bytes_of(type)), target == Target::cpu_observed);
  };
  const Scratch scratch = scratch_of(device, target, step, pass, p);
  const double q = taken(p.q_elements(), input_dtype(p)), kv = taken(p.kv_elements(), input_dtype(p));
  const double both = q + 2 * kv + taken(p.q_elements(), output_dtype(p)) + taken(p.query_rows(), lse_dtype(p)) +
                      scratch.own + scratch.saved;
  // What only the forward pass needs is given back before there are gradients.
  return both + (pass == Pass::backward ? std::max(scratch.passing, 2 * q + 2 * kv) : scratch.passing);
}

std::optional<std::string> why_too_large(const Device& device, Target target, const RegisteredStep& step, Pass pass,
                                         const Problem& p, const std::string& advice) {
  try {
    const double needed = memory_needed(device, target, step, pass, p);
    if (needed < 64e6) return std::nullopt;  // most are small, and the system need not be asked
    const double free = double(device.free_bytes());
    if (needed <= free) return std::nullopt;
    const auto gigabytes = [](double bytes) { return std::to_string(long(bytes / 1e9)); };
    return step.id + " needs about " + gigabytes(needed + 1e9) + " GB of " +
           (device.kind() == DeviceKind::gpu ? "GPU memory" : "memory") + " for " + describe(p) + ", " +
           gigabytes(free) + " GB are free; " + advice +
           (grows_with_scores(device, target, step, pass, p) ? std::string(", or ") + kLinearSteps : "");
  } catch (const Error& e) {
    return step.id + ": " + e.what();
  }
}

PreparedStep::PreparedStep(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& p,
                           const HostTensors& host, const HostTensors* made)
    : device_(device), id_(step.id), problem_(p), pass_(pass), lse_type_(lse_dtype(p)) {
  validate(p);
  if (const auto why = why_unsupported(step, p, pass)) throw Error(*why);
  if (const auto why = why_too_large(device, target, step, pass, p)) throw Error(*why);
  const Step& build = step.builds.at(target);
  run_ = pass == Pass::forward ? build.forward : build.backward;
  if (pass == Pass::forward) quantise_ = build.quantise;

  tensors_.Q = input("Q", input_dtype(p), p.q_elements(), host.Q);
  tensors_.K = input("K", input_dtype(p), p.kv_elements(), host.K);
  tensors_.V = input("V", input_dtype(p), p.kv_elements(), host.V);
  if (pass == Pass::forward) {
    add_workspace(workspace_of(build, p));
    tensors_.O = output("O", output_dtype(p), p.q_elements());
    tensors_.LSE = output("LSE", lse_type_, p.query_rows());
    return;
  }
  const RegisteredStep* forward = forward_of(step);
  if (forward != &step) add_workspace(workspace_of(build, p));
  if (forward) {
    run_forward_first(*forward, target);
    ran_forward_ = true;
  } else {
    tensors_.O = input("O", p.dtype, p.q_elements(), made ? made->O : host.O);
    tensors_.LSE = input("LSE", lse_type_, p.query_rows(), made ? made->LSE : host.LSE);
  }
  tensors_.dO = input("dO", p.dtype, p.q_elements(), host.dO);
  tensors_.dQ = output("dQ", p.dtype, p.q_elements());
  tensors_.dK = output("dK", p.dtype, p.kv_elements());
  tensors_.dV = output("dV", p.dtype, p.kv_elements());
}

void* PreparedStep::input(const std::string& name, DType type, size_t elements, const std::vector<double>& values) {
  if (values.size() != elements)
    throw Error(name + ": has " + std::to_string(values.size()) + " elements, the problem needs " +
                std::to_string(elements));
  const Buffer& buffer = buffers_.emplace_back(device_, name, elements * bytes_of(type));
  const std::span all(values);
  for (size_t begin = 0; begin < elements; begin += kElementsInTransit) {
    const std::vector<std::byte> bytes =
        encode(type, all.subspan(begin, std::min(kElementsInTransit, elements - begin)));
    device_.upload(static_cast<std::byte*>(buffer.data()) + begin * bytes_of(type), bytes.data(), bytes.size());
  }
  return buffer.data();
}

void* PreparedStep::output(const std::string& name, DType type, size_t elements) {
  const Buffer& buffer = buffers_.emplace_back(device_, name, elements * bytes_of(type));
  device_.poison(buffer.data(), buffer.bytes());
  return buffer.data();
}

void PreparedStep::add_workspace(const std::vector<Workspace>& wanted) {
  for (const Workspace& w : wanted) {
    tensors_.workspace[w.name] = output("workspace " + w.name, DType::e4m3, w.bytes);
    scratch_bytes_ += w.bytes;
  }
}

// Leaves O, LSE and the saved workspace as a backward pass of this chapter finds them in training.
void PreparedStep::run_forward_first(const RegisteredStep& forward, Target target) {
  const Step& build = forward.builds.at(target);
  std::vector<Workspace> saved;
  std::vector<Buffer> passing;  // what the forward pass needs for itself alone is given back at the end
  Tensors tensors = tensors_;
  for (const Workspace& w : workspace_of(build, problem_)) {
    if (w.saved) {
      saved.push_back(w);
    } else {
      passing.emplace_back(device_, "workspace " + w.name, w.bytes);
      device_.poison(passing.back().data(), w.bytes);
      tensors.workspace[w.name] = passing.back().data();
    }
  }
  add_workspace(saved);
  tensors_.O = output("O", problem_.dtype, problem_.q_elements());
  tensors_.LSE = output("LSE", lse_type_, problem_.query_rows());
  tensors.O = tensors_.O;
  tensors.LSE = tensors_.LSE;
  for (const Workspace& w : saved) tensors.workspace[w.name] = tensors_.workspace[w.name];
  launch_named(forward.id, build.forward, problem_, tensors);
  device_.synchronize();
  for (const Buffer& buffer : passing) buffer.check_guards();
}

void PreparedStep::launch_quantisation() const { launch_named(id_, quantise_, problem_, tensors_); }

void PreparedStep::launch_pass() const { launch_named(id_, run_, problem_, tensors_); }

void PreparedStep::check_guards() const {
  device_.synchronize();
  for (const Buffer& buffer : buffers_) buffer.check_guards();
}

HostTensors PreparedStep::finish() const {
  check_guards();
  const auto fetch = [&](const void* from, DType type, size_t elements) {
    std::vector<double> values;
    values.reserve(elements);
    while (values.size() < elements) {
      std::vector<std::byte> bytes(std::min(kElementsInTransit, elements - values.size()) * bytes_of(type));
      device_.download(bytes.data(), static_cast<const std::byte*>(from) + values.size() * bytes_of(type),
                       bytes.size());
      const std::vector<double> piece = decode(type, bytes);
      values.insert(values.end(), piece.begin(), piece.end());
    }
    return values;
  };
  const Problem& p = problem_;
  HostTensors results;
  if (pass_ == Pass::forward || ran_forward_) {
    results.O = fetch(tensors_.O, output_dtype(p), p.q_elements());
    results.LSE = fetch(tensors_.LSE, lse_type_, p.query_rows());
  }
  if (pass_ == Pass::forward) return results;
  results.dQ = fetch(tensors_.dQ, p.dtype, p.q_elements());
  results.dK = fetch(tensors_.dK, p.dtype, p.kv_elements());
  results.dV = fetch(tensors_.dV, p.dtype, p.kv_elements());
  return results;
}

StepResult run_step(Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& problem,
                    const HostTensors& inputs, const HostTensors* forward) {
  const PreparedStep prepared(device, target, step, pass, problem, inputs, forward);
  device.reset_traffic();
  prepared.launch();
  StepResult result{prepared.finish(), prepared.scratch_bytes(), std::nullopt};
  if (target == Target::cpu_observed) result.traffic = device.traffic();
  return result;
}

std::optional<Target> target_for(const RegisteredStep& step, DeviceKind device, bool observe) {
  const auto has = [&](Target t) { return step.builds.count(t) > 0; };
  if (device == DeviceKind::gpu) return has(Target::gpu) ? std::optional(Target::gpu) : std::nullopt;
  if (has(Target::host)) return Target::host;
  if (observe && has(Target::cpu_observed)) return Target::cpu_observed;
  return has(Target::cpu) ? std::optional(Target::cpu) : std::nullopt;
}

}  // namespace flash
