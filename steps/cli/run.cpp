// `flashsteps run`: one step on the caller's own tensors.
#include <iostream>

#include "cli/commands.h"
#include "cli/files.h"
#include "cli/npy.h"
#include "cli/options.h"
#include "cli/verify.h"
#include "harness/inputs.h"
#include "harness/runner.h"

namespace flash::cli {
namespace {

struct RunOptions {
  std::string step;
  std::string q, k, v, grad_out, out;
  ProblemOptions problem;
  DeviceOption device;
};

std::string shape_text(const Array4& a) {
  std::string text = "[";
  for (size_t i = 0; i < 4; i++) text += (i ? ", " : "") + std::to_string(a.shape[i]);
  return text + "]";
}

// Q's and K's shapes make the problem; V and dO must fit them.
Problem problem_of(const RunOptions& o, const Array4& Q, const Array4& K, const Array4& V, const Array4* dO) {
  for (const Array4* a : {&Q, &K})
    for (size_t n : a->shape)
      if (n > 2147483647) throw Error("a dimension of " + std::to_string(n) + " is too large; at most 2147483647");
  if (K.shape[0] != Q.shape[0] || K.shape[3] != Q.shape[3])
    throw Error("--k: its shape " + shape_text(K) + " must agree with --q " + shape_text(Q) + " in batch and head dim");
  if (V.shape != K.shape) throw Error("--v: its shape " + shape_text(V) + " must be that of --k, " + shape_text(K));
  if (dO && dO->shape != Q.shape)
    throw Error("--grad-out: its shape " + shape_text(*dO) + " must be that of --q, " + shape_text(Q));
  Problem p;
  p.B = int(Q.shape[0]);
  p.Hq = int(Q.shape[1]);
  p.Hkv = int(K.shape[1]);
  p.Nq = int(Q.shape[2]);
  p.Nk = int(K.shape[2]);
  p.D = int(Q.shape[3]);
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

int run(const RunOptions& o) {
  const Pass pass = o.grad_out.empty() ? Pass::forward : Pass::backward;
  const RegisteredStep& step = only_step(o.step, pass);
  std::vector<std::string> names = {"o.npy", "lse.npy"};
  if (pass == Pass::backward) names.insert(names.end(), {"dq.npy", "dk.npy", "dv.npy"});
  require_writable_in(o.out, names);
  double bytes = 0;
  for (const std::string& path : {o.q, o.k, o.v, o.grad_out}) {
    std::error_code unknown;
    const auto size = std::filesystem::file_size(path, unknown);
    if (!unknown) bytes += 6.0 * double(size);  // as float32: read, widened, rounded, for upload; results as large
  }
  require_host_memory("reading these files", bytes, "use smaller ones");
  const Array4 Q = read_npy(o.q), K = read_npy(o.k), V = read_npy(o.v);
  const Array4 dO = pass == Pass::backward ? read_npy(o.grad_out) : Array4{};
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
  const auto rounded = [&](const std::vector<double>& values) {
    std::vector<double> result(values.size());
    for (size_t i = 0; i < values.size(); i++) result[i] = round_to(input_dtype(p), values[i]);
    return result;
  };
  HostTensors tensors;
  tensors.Q = rounded(Q.values);
  tensors.K = rounded(K.values);
  tensors.V = rounded(V.values);
  tensors.dO = rounded(dO.values);
  std::string story = step.id + " on " + chosen.sentence + ": " + describe(p);
  if (pass == Pass::backward && !forward_of(step)) {
    const RegisteredStep& forward = forward_before(step, p, chosen.device->kind());
    story += ", with O and LSE from " + forward.id;
    const Target forward_target = *target_for(forward, chosen.device->kind(), false);
    const HostTensors made = run_step(*chosen.device, forward_target, forward, Pass::forward, p, tensors).tensors;
    tensors.O = made.O;
    tensors.LSE = made.LSE;
  }
  HostTensors results = run_step(*chosen.device, *target, step, pass, p, tensors).tensors;
  if (results.O.empty()) results.O = tensors.O, results.LSE = tensors.LSE;

  const auto sizes = [](const Array4& a) { return std::vector<size_t>(a.shape.begin(), a.shape.end()); };
  const std::filesystem::path folder(o.out);
  std::vector<OutputFile> files = {{folder / "o.npy", npy_bytes(sizes(Q), results.O)},
                                   {folder / "lse.npy", npy_bytes({Q.shape[0], Q.shape[1], Q.shape[2]}, results.LSE)}};
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
