// `flashsteps check`: steps against the oracle, at a given shape or over a grid of awkward ones.
#include <algorithm>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "cli/awkward.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/verify.h"

namespace flash::cli {
namespace {

struct CheckOptions {
  StepOption steps;
  ProblemOptions problem;
  PassOption pass;
  DeviceOption device;
  FormatOption format;
  int sample = 0;
  bool no_observe = false;
};

// One comparison to make.
struct Item {
  const RegisteredStep* step;
  Pass pass;
  Target target;
  Problem problem;
};

// All comparisons that the command line asks for, made before the first one runs.
class Plan {
 public:
  Plan(const CheckOptions& options, const Device& device) : options_(options), device_(device) {
    std::vector<std::string> prefixes = options.steps.prefixes;
    if (prefixes.empty()) {
      add_steps({});
      if (items_.empty()) throw Error(refusal_);
    }
    // Whoever names a step wants it checked: each prefix must come to something.
    for (const std::string& prefix : prefixes) {
      const size_t before = items_.size();
      refusal_.clear();
      add_steps({prefix});
      if (items_.size() == before && !refusal_.empty()) throw Error(refusal_);
    }
  }

  const std::vector<Item>& items() const { return items_; }

 private:
  void refuse(const std::string& why) {
    if (refusal_.empty()) refusal_ = why;
  }

  void add_steps(const std::vector<std::string>& prefixes) {
    for (const RegisteredStep* step : select_steps(prefixes)) {
      if (!added_.insert(step->id).second) continue;  // two prefixes may mean the same step
      // Host code runs beside either device, unless a GPU was asked for by name.
      std::optional<Target> target = target_for(*step, device_.kind(), !options_.no_observe);
      if (!target && options_.device.choice == DeviceChoice::automatic)
        target = target_for(*step, DeviceKind::cpu, !options_.no_observe);
      if (!target) {
        refuse(step->id + " has no code for the GPU in this build; use --device cpu");
        continue;
      }
      for (Pass pass : options_.pass.passes()) {
        if (options_.pass.name == "both" && !step->has(pass)) continue;
        for (const Problem& p : problems_for(*step)) {
          if (const auto why = why_unsupported(*step, p, pass))
            refuse(*why);
          else
            items_.push_back({step, pass, *target, p});
        }
      }
    }
  }

  std::vector<Problem> problems_for(const RegisteredStep& step) const {
    std::vector<Problem> problems;
    if (options_.problem.has_shape()) {
      Problem start;
      start.Hq = start.Hkv = 2;
      start.Nq = start.Nk = 128;
      problems.push_back(options_.problem.apply(start));
    } else {
      // A step that takes any head dim is asked some that are no multiple of anything, too.
      std::vector<int> dims = step.info().head_dims;
      if (dims.size() > 8) dims = {1, 32, 50, 64, 128, dims.back()};
      for (int D : dims)
        for (const Problem& awkward : awkward_problems(D)) problems.push_back(options_.problem.apply(awkward));
    }
    if (options_.problem.dtype || options_.problem.quantises()) return problems;
    std::vector<Problem> in_each_type;
    for (DType type : step.info().dtypes)
      for (Problem p : problems) {
        p.dtype = type;
        in_each_type.push_back(p);
      }
    return in_each_type;
  }

  const CheckOptions& options_;
  const Device& device_;
  std::vector<Item> items_;
  std::set<std::string> added_;  // ids
  std::string refusal_;
};

// The command that repeats one check.
std::string repeat_command(const Item& item, const CheckOptions& o) {
  const Problem& p = item.problem;
  std::ostringstream text;
  text << "flashsteps check " << item.step->id << " --pass " << name_of(item.pass) << " --batch " << p.B << " --heads "
       << p.Hq << " --kv-heads " << p.Hkv << " --seq " << p.Nq << " --seq-k " << p.Nk << " --head-dim " << p.D
       << " --dtype " << flash::name_of(p.dtype);
  if (p.causal) text << " --causal";
  if (p.deterministic) text << " --deterministic";
  if (p.quantisation.from != DType::bf16) text << " --from " << flash::name_of(p.quantisation.from);
  if (!p.quantisation.tile_scales) text << " --tensor-scales";
  if (!p.quantisation.rotation) text << " --no-rotation";
  text.precision(17);
  if (p.scale != default_scale(p.D)) text << " --scale " << p.scale;
  if (p.dropout > 0) text << " --dropout " << p.dropout;
  if (p.seed) text << " --seed " << p.seed;
  if (o.sample) text << " --sample " << o.sample;
  if (o.device.choice == DeviceChoice::cpu) text << " --device cpu";
  return text.str();
}

Row row_of(const Item& item, const std::string& output, const reference::Verdict& verdict) {
  const Problem& p = item.problem;
  return {{"step", item.step->id},
          {"device", item.target == Target::gpu ? "gpu" : "cpu"},
          {"pass", name_of(item.pass)},
          {"dtype", flash::name_of(p.dtype)},
          {"batch", p.B},
          {"heads", p.Hq},
          {"kv_heads", p.Hkv},
          {"seq", p.Nq},
          {"seq_k", p.Nk},
          {"head_dim", p.D},
          {"causal", p.causal},
          {"scale", p.scale},
          {"dropout", p.dropout},
          {"output", output},
          {"error", verdict.error},
          {"allowed", verdict.allowed},
          {"max_error", verdict.max_error},
          {"max_allowed", verdict.max_allowed},
          {"ok", verdict.pass},
          {"reason", verdict.reason}};
}

// A step's line in the table: how many problems, and the closest call among them.
struct Tally {
  int problems = 0, failed = 0;
  double error = 0, allowed = 0;
  std::string worst = "-";
  double ratio = -1;

  void add(const Outcome& outcome) {
    problems++;
    failed += !outcome.pass;
    for (const auto& [name, v] : outcome.outputs) {
      const double r = v.allowed > 0 ? v.error / v.allowed : v.error > 0 ? 1e300 : 0;
      if (r > ratio) ratio = r, error = v.error, allowed = v.allowed, worst = name;
    }
  }
};

class Check {
 public:
  explicit Check(const CheckOptions& options)
      : options_(options), chosen_(choose_device(options.device.choice)), plan_(options, *chosen_.device) {}

  int run() {
    for (size_t i = 0; i < plan_.items().size(); i++) {
      const Item& item = plan_.items()[i];
      progress_.show(std::to_string(i + 1) + "/" + std::to_string(plan_.items().size()) + " " + item.step->id + ": " +
                     describe(item.problem));
      check_one(item);
    }
    return report();
  }

 private:
  void check_one(const Item& item) {
    const Problem& p = item.problem;
    Device& device = item.target == Target::gpu ? *chosen_.device : cpu_device();
    const Outcome outcome = verify(device, item.target, *item.step, item.pass, question_for(p));
    tallies_[{item.step->id, name_of(item.pass), flash::name_of(p.dtype)}].add(outcome);
    for (const auto& [output, verdict] : outcome.outputs) rows_.push_back(row_of(item, output, verdict));
    if (!outcome.fault.empty()) {
      reference::Verdict none;
      none.reason = outcome.fault;
      rows_.push_back(row_of(item, "", none));
      for (const char* field : {"error", "allowed", "max_error", "max_allowed"}) rows_.back()[field] = nullptr;
    }
    if (outcome.pass) return;
    std::ostringstream text;
    text << "FAILED  " << item.step->id << " " << name_of(item.pass) << ", " << describe(p) << "\n";
    for (const auto& [output, verdict] : outcome.outputs)
      if (!verdict.pass) text << "        " << verdict.reason << "\n";
    if (!outcome.fault.empty()) text << "        " << outcome.fault << "\n";
    text << "        again: " << repeat_command(item, options_) << "\n";
    failures_.push_back(text.str());
  }

  // Questions are kept for the steps to come; those with large tensors one at a time.
  const Question& question_for(const Problem& p) {
    const std::string key = describe(p) + std::to_string(p.seed);
    auto it = questions_.find(key);
    if (it != questions_.end()) return it->second;
    if (p.q_elements() + p.kv_elements() > 200000) questions_.clear();
    return questions_.try_emplace(key, p, asks_for_gradient(), options_.sample).first->second;
  }

  bool asks_for_gradient() const {
    return std::any_of(plan_.items().begin(), plan_.items().end(),
                       [](const Item& item) { return item.pass == Pass::backward; });
  }

  int report() {
    progress_.show("");
    bool all_pass = true;
    std::vector<Row> table;
    for (const auto& [key, t] : tallies_) {
      all_pass = all_pass && t.failed == 0;
      const auto& [step, pass, dtype] = key;
      table.push_back({{"step", step},
                       {"pass", pass},
                       {"dtype", dtype},
                       {"problems", t.problems},
                       {"failed", t.failed},
                       {"worst", t.worst},
                       {"error", t.ratio < 0 ? Row(nullptr) : Row(t.error)},
                       {"allowed", t.ratio < 0 ? Row(nullptr) : Row(t.allowed)},
                       {"", t.failed ? "FAILED" : "ok"}});
    }
    if (options_.format.format == Format::table) {
      std::cout << chosen_.sentence << "\n\n";
      print_rows(std::cout, Format::table, table);
      size_t shown = 0;
      for (const std::string& failure : failures_)
        if (shown++ < 20) std::cout << (shown == 1 ? "\n" : "") << failure;
      if (shown > 20) std::cout << "… and " << shown - 20 << " more; --format csv lists all\n";
    } else {
      print_rows(std::cout, options_.format.format, rows_);
    }
    return all_pass ? 0 : 1;
  }

  const CheckOptions& options_;
  ChosenDevice chosen_;
  Plan plan_;
  std::map<std::string, Question> questions_;
  std::map<std::tuple<std::string, std::string, std::string>, Tally> tallies_;
  std::vector<Row> rows_;
  std::vector<std::string> failures_;
  Progress progress_;
};

}  // namespace

Command add_check(CLI::App& command) {
  auto o = std::make_shared<CheckOptions>();
  o->steps.add_to(command);
  o->problem.add_shape_to(command);
  o->problem.add_rest_to(command);
  o->pass.add_to(command);
  const CLI::Option* sample =
      command.add_option("--sample", o->sample, "Compare about this many rows of each output, for long sequences");
  command.add_flag("--no-observe", o->no_observe, "On the CPU device: do not watch memory accesses; faster");
  o->device.add_to(command);
  o->format.add_to(command);
  return [o, sample] {
    if (sample->count() > 0 && o->sample < 1) throw Error("--sample: must be at least 1");
    return Check(*o).run();
  };
}

}  // namespace flash::cli
