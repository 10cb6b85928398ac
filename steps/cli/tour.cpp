// `flashsteps tour`: the course in a table, a row a kernel and pass.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/verify.h"
#include "harness/inputs.h"
#include "harness/interrupt.h"

namespace flash::cli {
namespace {

struct TourOptions {
  DeviceOption device;
  FormatOption format;
};

// Small enough that the CPU executor watches every memory access of all chapters within a minute.
Problem small_problem() {
  Problem p;
  p.Hq = p.Hkv = 2;
  p.Nq = p.Nk = 256;
  return p;
}

// Large enough to fill a GPU, small enough that chapter 02's N×N matrices fit.
Problem large_problem() {
  Problem p;
  p.B = 4;
  p.Hq = p.Hkv = 16;
  p.Nq = p.Nk = 2048;
  return p;
}

// The precision in which a step is shown: fp32 where it has it, else its first.
DType dtype_shown(const Step& step) {
  for (DType type : step.dtypes)
    if (type == DType::fp32) return type;
  return step.dtypes.front();
}

double median_ms(Device& gpu, const PreparedStep& step) {
  std::vector<double> ms = gpu.times_ms(9, [&](int) { step.launch(); });
  std::sort(ms.begin() + 2, ms.end());  // the first two warm up
  return ms[2 + 3];
}

class Tour {
 public:
  explicit Tour(const TourOptions& options) : options_(options), chosen_(choose_device(options.device.choice)) {}

  int run() {
    const bool table = options_.format.format == Format::table;
    const bool gpu = chosen_.device->kind() == DeviceKind::gpu;
    if (table) std::cout << chosen_.sentence << "\nChecked at " << describe(small_problem()) << "\n";
    if (table && gpu) std::cout << "Timed at " << describe(large_problem()) << "\n";
    for (const RegisteredStep& step : all_steps())
      for (Pass pass : {Pass::forward, Pass::backward})
        if (step.has(pass)) add_row(step, pass);
    progress_.show("");
    if (table) std::cout << "\n";
    print_rows(std::cout, options_.format.format, rows_, titles(gpu));
    for (const std::string& fault : faults_) std::cerr << fault << "\n";
    if (table)
      std::cout
          << "\nerror: largest relative error (Frobenius norm) of the pass's outputs against the fp64 oracle, and\n"
             "what the error rule allows; scratch: memory beside inputs and outputs; HBM bytes: what the kernels\n"
             "ask of global memory, no cache assumed, counted by the CPU executor (it makes one pass, at the checked "
             "shape).\n";
    return all_pass_ ? 0 : 1;
  }

 private:
  static std::vector<std::string> titles(bool gpu) {
    std::vector<std::string> names = {"step", "pass", "dtype", "error", "allowed", "", "scratch KB", "HBM MB"};
    if (gpu) names.insert(names.end(), {"ms", "TFLOP/s", "x 02"});
    return names;
  }

  void add_row(const RegisteredStep& step, Pass pass) {
    throw_if_interrupted();
    progress_.show(step.id + " " + name_of(pass));
    Problem p = small_problem();
    p.dtype = dtype_shown(step.info());
    if (why_unsupported(step, p, pass)) p.D = step.info().head_dims.front(), p.scale = default_scale(p.D);

    // Counted on the CPU executor, and checked there too when there is no GPU.
    const std::optional<Target> observed = target_for(step, DeviceKind::cpu, true);
    Outcome outcome = verify(cpu_device(), observed.value(), step, pass, question_for(p));
    const std::optional<Traffic> traffic = outcome.traffic;
    bool pass_everywhere = note(step, pass, outcome);
    const std::optional<Target> on_gpu = target_for(step, chosen_.device->kind(), false);
    const bool gpu = chosen_.device->kind() == DeviceKind::gpu;
    if (gpu && on_gpu) {
      outcome = verify(*chosen_.device, *on_gpu, step, pass, question_for(p));
      pass_everywhere = note(step, pass, outcome) && pass_everywhere;
    }

    reference::Verdict worst;
    for (const auto& [name, v] : outcome.outputs)
      if (!(v.error <= worst.error) || worst.allowed == 0) worst = v;
    const bool faulty = outcome.outputs.empty();
    Row row = {{"step", step.id},
               {"pass", name_of(pass)},
               {"dtype", flash::name_of(p.dtype)},
               {"error", faulty ? Row(nullptr) : Row(worst.error)},
               {"allowed", faulty ? Row(nullptr) : Row(worst.allowed)},
               {"ok", pass_everywhere},
               {"scratch_kb", double(outcome.scratch_bytes) / 1024},
               {"hbm_mb", traffic ? Row(double(traffic->read_bytes + traffic->write_bytes) / 1e6) : Row(nullptr)}};
    if (gpu) add_speed(row, step, pass, on_gpu);
    rows_.push_back(row);
  }

  void add_speed(Row& row, const RegisteredStep& step, Pass pass, std::optional<Target> target) {
    for (const char* column : {"ms", "tflops", "speedup"}) row[column] = nullptr;
    Problem p = large_problem();
    p.dtype = dtype_shown(step.info());
    if (!target || row["ok"] == false || why_unsupported(step, p, pass)) return;
    progress_.show(step.id + " " + name_of(pass) + ": timing");
    HostTensors tensors = random_tensors(p, p.seed);
    if (pass == Pass::backward && !forward_of(step)) {  // any consistent numbers do: speed does not depend on them
      tensors.O = tensors.dO;
      tensors.LSE.assign(p.query_rows(), std::log(double(p.Nk)));
    }
    double ms;
    try {
      ms = median_ms(*chosen_.device, PreparedStep(*chosen_.device, *target, step, pass, p, tensors));
    } catch (const KernelFault& fault) {  // one that the small problem does not have
      Outcome outcome;
      outcome.fault = std::string("timing: ") + fault.what();
      row["ok"] = note(step, pass, outcome);
      return;
    }
    row["ms"] = ms;
    row["tflops"] = flops(p, pass) / ms / 1e9;
    // Against the first kernel that ran on the GPU in this pass: chapter 02's.
    const double first = first_ms_.try_emplace(name_of(pass), ms).first->second;
    row["speedup"] = first / ms;
  }

  // Remembers what went wrong; whether nothing did.
  bool note(const RegisteredStep& step, Pass pass, const Outcome& outcome) {
    if (outcome.pass) return true;
    all_pass_ = false;
    const std::string where = step.id + " " + name_of(pass) + ": ";
    if (!outcome.fault.empty()) faults_.push_back(where + outcome.fault);
    for (const auto& [name, v] : outcome.outputs)
      if (!v.pass) faults_.push_back(where + v.reason);
    return false;
  }

  const Question& question_for(const Problem& p) { return questions_.try_emplace(describe(p), p, true).first->second; }

  const TourOptions& options_;
  ChosenDevice chosen_;
  std::map<std::string, Question> questions_;
  std::map<std::string, double> first_ms_;
  std::vector<Row> rows_;
  std::vector<std::string> faults_;
  bool all_pass_ = true;
  Progress progress_;
};

}  // namespace

Command add_tour(CLI::App& command) {
  auto o = std::make_shared<TourOptions>();
  o->device.add_to(command);
  o->format.add_to(command);
  return [o] { return Tour(*o).run(); };
}

}  // namespace flash::cli
