// `flashsteps run`: one step on the caller's own tensors.
#include <algorithm>
#include <array>
#include <iostream>

#include "cli/commands.h"
#include "cli/files.h"
#include "cli/npy.h"
#include "cli/options.h"
#include "cli/verify.h"
#include "harness/interrupt.h"
#include "harness/round.h"
#include "harness/runner.h"

namespace flash::cli {
namespace {

struct RunOptions {
  std::string step;
  std::string q, k, v, grad_out, out;
  ProblemOptions problem;
  DeviceOption device;
};

using Shape = std::array<size_t, 4>;

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < 4; i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// Q's and K's shapes make the problem; V and dO must fit them.
Problem problem_of(const RunOptions& o, const Shape& Q, const Shape& K, const Shape& V, const Shape* dO) {
  for (const Shape* shape : {&Q, &K})
    for (size_t n : *shape)
      if (n > 2147483647) throw Error("a dimension of " + std::to_string(n) + " is too large; at most 2147483647");
  if (K[0] != Q[0] || K[3] != Q[3])
    throw Error("--k: its shape " + shape_text(K) + " must agree with --q " + shape_text(Q) + " in batch and head dim");
  if (V != K) throw Error("--v: its shape " + shape_text(V) + " must be that of --k, " + shape_text(K));
  if (dO && *dO != Q)
    throw Error("--grad-out: its shape " + shape_text(*dO) + " must be that of --q, " + shape_text(Q));
  Problem p;
  p.B = int(Q[0]);
  p.Hq = int(Q[1]);
  p.Hkv = int(K[1]);
  p.Nq = int(Q[2]);
  p.Nk = int(K[2]);
  p.D = int(Q[3]);
  p.scale = p.D > 0 ? default_scale(p.D) : 0;
  return o.problem.apply(p);
}

// The one step of those meant by the prefix that has the pass.
const RegisteredStep& only_step(const std::string& prefix, Pass pass) {
  std::vector<const RegisteredStep*> fitting;
  std::string ids;
  const auto meant = select_steps({prefix});
  for (const RegisteredStep* step : meant) {
    if (!step->has(pass)) continue;
    fitting.push_back(step);
    ids += (ids.empty() ? "" : ", ") + step->id;
  }
  if (fitting.empty())
    throw Error(*why_unsupported(*meant.front(), Problem{}, pass) +
                (pass == Pass::forward ? "; add --grad-out for it" : "; leave out --grad-out, or choose another step"));
  if (fitting.size() > 1) throw Error("'" + prefix + "' means several steps; name one of " + ids);
  return *fitting.front();
}

// Refuses what would not fit. The tensors are held in double, and beside them at a time: the file that one is made of;
// on the CPU the arrays of the step; results and their files.
void require_memory(const Device& device, Target target, const RegisteredStep& step, Pass pass, const Problem& p,
                    const RegisteredStep* forward) {
  if (const auto why = why_too_large(device, target, step, pass, p)) throw Error(*why);
  const bool backward = pass == Pass::backward;
  const double q = double(p.q_elements()), kv = double(p.kv_elements()), o = q + double(p.query_rows());
  const double inputs = 8 * (q + 2 * kv + (backward ? q : 0)), made = forward ? 8 * o : 0;
  const double results = 8 * ((forward ? 0 : o) + (backward ? q + 2 * kv : 0));
  const double file = 8 * std::max(q, kv), files = made + results;
  double arrays = 0;
  if (device.kind() == DeviceKind::cpu) {
    arrays = memory_needed(device, target, step, pass, p);
    if (forward)
      arrays = std::max(arrays,
                        memory_needed(device, *target_for(*forward, device.kind(), false), *forward, Pass::forward, p));
  }
  require_host_memory(step.id + " on these files",
                      inputs + std::max({file, made + results + arrays, made + results + files}), "use smaller ones");
}

int run(const RunOptions& o) {
  const Pass pass = o.grad_out.empty() ? Pass::forward : Pass::backward;
  const RegisteredStep& step = only_step(o.step, pass);
  std::vector<std::string> names = {"o.npy", "lse.npy"};
  if (pass == Pass::backward) names.insert(names.end(), {"dq.npy", "dk.npy", "dv.npy"});
  require_writable_in(o.out, names);
  const Shape Q = npy_shape(o.q), K = npy_shape(o.k), V = npy_shape(o.v);
  const Shape dO = pass == Pass::backward ? npy_shape(o.grad_out) : Shape{};
  Problem p = problem_of(o, Q, K, V, pass == Pass::backward ? &dO : nullptr);
  if (!o.problem.dtype) p.dtype = step.info().dtypes.front();
  if (const auto why = why_unsupported(step, p, pass)) throw Error(*why);

  ChosenDevice chosen = choose_device(o.device.choice);
  std::optional<Target> target = target_for(step, chosen.device->kind(), false);
  if (!target && o.device.choice == DeviceChoice::automatic) {  // host code runs beside either device
    chosen = choose_device(DeviceChoice::cpu);
    target = target_for(step, DeviceKind::cpu, false);
  }
  if (!target) throw Error(step.id + " has no code for the GPU in this build; use --device cpu");
  const RegisteredStep* forward = nullptr;
  if (pass == Pass::backward && !forward_of(step)) forward = &forward_before(step, p, chosen.device->kind());
  require_memory(*chosen.device, *target, step, pass, p, forward);

  const auto rounded = [&](const std::string& path) {
    std::vector<double> values = read_npy(path).values;
    for (size_t i = 0; i < values.size(); i++) {
      throw_if_interrupted_at(i);
      values[i] = rounded_to(input_dtype(p), values[i]);
    }
    return values;
  };
  HostTensors tensors;
  tensors.Q = rounded(o.q);
  tensors.K = rounded(o.k);
  tensors.V = rounded(o.v);
  if (pass == Pass::backward) tensors.dO = rounded(o.grad_out);
  std::string story = step.id + " on " + chosen.sentence + ": " + describe(p);
  if (forward) {
    story += ", with O and LSE from " + forward->id;
    const Target forward_target = *target_for(*forward, chosen.device->kind(), false);
    HostTensors made = run_step(*chosen.device, forward_target, *forward, Pass::forward, p, tensors).tensors;
    tensors.O = std::move(made.O);
    tensors.LSE = std::move(made.LSE);
  }
  HostTensors results = run_step(*chosen.device, *target, step, pass, p, tensors).tensors;
  if (results.O.empty()) results.O = std::move(tensors.O), results.LSE = std::move(tensors.LSE);

  const auto sizes = [](const Shape& shape) { return std::vector<size_t>(shape.begin(), shape.end()); };
  const std::filesystem::path folder(o.out);
  std::vector<OutputFile> files = {{folder / "o.npy", npy_bytes(sizes(Q), results.O)},
                                   {folder / "lse.npy", npy_bytes({Q[0], Q[1], Q[2]}, results.LSE)}};
  if (pass == Pass::backward) {
    files.push_back({folder / "dq.npy", npy_bytes(sizes(Q), results.dQ)});
    files.push_back({folder / "dk.npy", npy_bytes(sizes(K), results.dK)});
    files.push_back({folder / "dv.npy", npy_bytes(sizes(K), results.dV)});
  }
  write_files(files, folder);

  std::cout << story << "\nwrote";
  for (const OutputFile& file : files) std::cout << " " << file.path.string();
  std::cout << "\n";
  return 0;
}

}  // namespace

Command add_run(CLI::App& command) {
  auto o = std::make_shared<RunOptions>();
  command.add_option("STEP", o->step, "The step, by any prefix of its id that means only one")
      ->required()
      ->type_name("");
  add_path(command, "--q", o->q, "Q [B, Hq, Nq, D], a .npy file of float32 or float64")->required();
  add_path(command, "--k", o->k, "K [B, Hkv, Nk, D]")->required();
  add_path(command, "--v", o->v, "V [B, Hkv, Nk, D]")->required();
  add_path(command, "--grad-out", o->grad_out, "dO [B, Hq, Nq, D]: asks for the gradients, too");
  add_path(command, "--out", o->out, "Folder for o.npy, lse.npy (and dq.npy, dk.npy, dv.npy), made if it is not there",
           "folder")
      ->required();
  o->problem.add_rest_to(command);
  o->device.add_to(command);
  return [o] { return run(*o); };
}

}  // namespace flash::cli
