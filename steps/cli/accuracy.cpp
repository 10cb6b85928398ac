// `flashsteps accuracy`: what numbers of eight bits cost, with and without what is done about it, beside sixteen bits.
// The experiment of FlashAttention-3 (Shah et al. 2024), section 4.3 and table 3: normal numbers, of which one in a
// thousand has another one added that is ten times as large.
#include <cmath>
#include <iostream>

#include "cli/commands.h"
#include "cli/draws.h"
#include "cli/options.h"
#include "cli/verify.h"
#include "harness/inputs.h"
#include "harness/interrupt.h"
#include "harness/round.h"
#include "harness/runner.h"
#include "reference_cpu/attention.h"

namespace flash::cli {
namespace {

struct AccuracyOptions {
  ProblemOptions problem;
  DeviceOption device;
  FormatOption format;
  std::optional<int> given_sample;
  int sample() const { return given_sample.value_or(512); }
};

// N(0, 1) + N(0, 100) · Bernoulli(0.001), as the type holds it.
std::vector<double> numbers_with_outliers(size_t count, uint64_t seed, uint32_t tensor, DType type) {
  std::vector<double> x = normal_numbers(count, seed, tensor, DType::fp64);
  const std::vector<double> more = normal_numbers(count, seed, tensor + 16, DType::fp64);
  Draws draws(seed, tensor, 3);
  for (size_t i = 0; i < count; i++) {
    throw_if_interrupted_at(i);
    x[i] = rounded_to(type, x[i] + (draws.below(1000) == 0 ? 10 * more[i] : 0));
  }
  return x;
}

class Accuracy {
 public:
  explicit Accuracy(const AccuracyOptions& options) : options_(options), chosen_(choose_device(options.device.choice)) {
    const bool gpu = chosen_.device->kind() == DeviceKind::gpu;
    problem_.Hq = problem_.Hkv = gpu ? 16 : 2;
    problem_.Nq = problem_.Nk = gpu ? 4096 : 512;
    problem_.D = 128;
    problem_.scale = default_scale(problem_.D);
    problem_ = options.problem.apply(problem_);
    if (problem_.q_elements() == 0) throw Error("accuracy: without queries there is nothing to compare");
    if (problem_.kv_elements() == 0) throw Error("accuracy: without keys O is 0, and there is nothing to compare");
    selection_ = reference::sample(problem_, options.sample(), 1, problem_.seed);
    selection_.everything = problem_.query_rows() <= size_t(options.sample());
    selection_.key_rows.clear();
    require_memory();
  }

  int run() {
    sixteen_bits();
    eight_bits();
    if (options_.format.format == Format::table)
      std::cout << chosen_.sentence << "\n" << shape_text() << "; inputs N(0, 1) + N(0, 100) * Bernoulli(0.001)\n\n";
    print_rows(std::cout, options_.format.format, rows_);
    if (options_.format.format == Format::table)
      std::cout << "\nrmse: root mean square error of O against fp64, from the inputs as the step is given them; "
                   "relative: to\n"
                   "the root mean square of O.\n";
    return 0;
  }

 private:
  // Q, K and V in double, and beside them at a time: the numbers that one of them is made of; the statistics and blocks
  // of the reference; a step's arrays and its results.
  void require_memory() const {
    const double q = double(problem_.q_elements()), kv = double(problem_.kv_elements());
    const double rows = double(problem_.query_rows());
    double most = std::max(16 * std::max(q, kv), 32 * rows + reference::working_bytes(problem_));
    for (const DType type : {DType::fp16, DType::e4m3}) {
      Problem p = problem_;
      p.dtype = type;
      const RegisteredStep& step = step_for(p);
      const Device& device = *chosen_.device;
      const double arrays = device.kind() == DeviceKind::cpu
                                ? memory_needed(device, *target_for(step, device.kind(), false), step, Pass::forward, p)
                                : 0;
      most = std::max(most, arrays + 8 * q + 8 * rows);
    }
    require_host_memory("accuracy of " + shape_text(), 8 * (q + 2 * kv) + most);
  }

  // Without its type, which differs from row to row.
  std::string shape_text() const {
    std::string text = describe(problem_);
    const std::string type = ", " + flash::name_of(problem_.dtype);
    return text.erase(text.find(type), type.size());
  }

  // With P in memory, which is the baseline of the error rule, and without.
  void sixteen_bits() {
    const Problem p = given(DType::fp16, {});
    add("unfused", p, reference::attention<float>(p, inputs_, selection_, DType::fp16).O.values);
    add_step("fused", p);
  }

  void eight_bits() {
    add_step("tensor scales", given(DType::e4m3, {.tile_scales = false, .rotation = false}));
    add_step("tile scales and rotation", given(DType::e4m3, {}));
    add_step("without tile scales", given(DType::e4m3, {.tile_scales = false}));
    add_step("without rotation", given(DType::e4m3, {.rotation = false}));
  }

  // The problem in this type. Its inputs and the truth about them are made when the type of inputs is a new one.
  Problem given(DType type, const Quantisation& quantisation) {
    Problem p = problem_;
    p.dtype = type;
    p.quantisation = quantisation;
    if (truth_.empty() || input_dtype(p) != inputs_type_) {
      inputs_type_ = input_dtype(p);
      inputs_.Q = numbers_with_outliers(p.q_elements(), p.seed, 1, inputs_type_);
      inputs_.K = numbers_with_outliers(p.kv_elements(), p.seed, 2, inputs_type_);
      inputs_.V = numbers_with_outliers(p.kv_elements(), p.seed, 3, inputs_type_);
      truth_ = reference::attention<double>(p, inputs_, selection_).O.values;
    }
    return p;
  }

  // The last step of the course that does this in one kernel.
  const RegisteredStep& step_for(const Problem& p) const {
    const RegisteredStep* found = nullptr;
    std::string why = "no step has a forward pass in " + flash::name_of(p.dtype);
    for (const RegisteredStep& step : all_steps()) {
      if (!step.has(Pass::forward) || !target_for(step, chosen_.device->kind(), false)) continue;
      const auto refusal = why_unsupported(step, p, Pass::forward);
      if (!refusal) found = &step;
      const auto& types = step.info().dtypes;
      if (refusal && std::find(types.begin(), types.end(), p.dtype) != types.end()) why = *refusal;
    }
    if (!found) throw Error(why);
    return *found;
  }

  void add_step(const std::string& how, const Problem& p) {
    const RegisteredStep& step = step_for(p);
    const Target target = *target_for(step, chosen_.device->kind(), false);
    const std::vector<double> O = run_step(*chosen_.device, target, step, Pass::forward, p, inputs_).tensors.O;
    if (selection_.everything) return add(how, p, O, step.id);
    std::vector<double> selected;
    for (int64_t row : selection_.query_rows)
      selected.insert(selected.end(), O.begin() + row * p.D, O.begin() + (row + 1) * p.D);
    add(how, p, selected, step.id);
  }

  template <class T>
  void add(const std::string& how, const Problem& p, const std::vector<T>& O, const std::string& step = "") {
    double error2 = 0, truth2 = 0;
    for (size_t i = 0; i < truth_.size(); i++) {
      error2 += (double(O[i]) - truth_[i]) * (double(O[i]) - truth_[i]);
      truth2 += truth_[i] * truth_[i];
    }
    rows_.push_back({{"dtype", flash::name_of(p.dtype)},
                     {"how", how},
                     {"step", step.empty() ? Row(nullptr) : Row(step)},
                     {"rmse", std::sqrt(error2 / double(truth_.size()))},
                     {"relative", std::sqrt(error2 / truth2)}});
  }

  const AccuracyOptions& options_;
  ChosenDevice chosen_;
  Problem problem_;
  reference::Selection selection_;
  DType inputs_type_ = DType::fp64;
  HostTensors inputs_;
  std::vector<double> truth_;
  std::vector<Row> rows_;
};

}  // namespace

Command add_accuracy(CLI::App& command) {
  auto o = std::make_shared<AccuracyOptions>();
  o->problem.add_shape_to(command);
  command.add_flag("--causal", o->problem.causal, "Query i sees the keys j <= i + (Nk - Nq)");
  add_seed(command, o->problem.seed, "Seed of the inputs");
  add_number(command, "--sample", o->given_sample, "Compare about this many rows of O; default 512", kSamples);
  o->device.add_to(command);
  o->format.add_to(command);
  return [o] { return Accuracy(*o).run(); };
}

}  // namespace flash::cli
