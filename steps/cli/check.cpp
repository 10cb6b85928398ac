// `flashsteps check`: steps against the oracle, at a given shape or over a grid of awkward ones.
#include <algorithm>
#include <iostream>
#include <map>
#include <set>

#include "cli/awkward.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/random_problems.h"
#include "cli/report.h"
#include "cli/verify.h"
#include "harness/interrupt.h"
#include "reference_cpu/parallel.h"

namespace flash::cli {
namespace {

struct CheckOptions {
  StepOption steps;
  ProblemOptions problem;
  PassOption pass;
  DeviceOption device;
  FormatOption format;
  std::optional<int> given_sample, given_random;
  int sample = 0;  // of rows; 0: all
  int random = 0;  // how many drawn cases for each pass of each step; 0: none
  std::optional<Values> values;
  bool no_observe = false;

  HowRun how_run() const { return {sample, device.choice == DeviceChoice::cpu}; }
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

  // What there is no room for.
  const std::vector<std::string>& left_out() const { return left_out_; }

  // One for each comparison; for a random check, one for each pass of each step.
  const std::vector<Item>& items() const { return items_; }

  // Case `number` for a step of a random check, whose items have no problem yet.
  Item drawn(const Item& item, uint32_t number) const {
    const RandomCase one =
        random_case(item.step->info(), item.pass, options_.problem.seed, number, options_.problem, options_.values);
    return {item.step, item.pass, item.target, one.problem, one.values};
  }

 private:
  void refuse(const std::string& why) {
    if (refusal_.empty()) refusal_ = why;
  }

  // Why a comparison cannot be made: what the step does not support, or has no room for, which is said in any case.
  std::optional<std::string> why_not(const Item& item) {
    if (const auto why = why_unsupported(*item.step, item.problem, item.pass)) return why;
    const Device& device = item.target == Target::gpu ? device_ : cpu_device();
    const auto too_large = [&](Target target, const char* advice) {
      return why_too_large(device, target, *item.step, item.pass, item.problem, advice);
    };
    const bool may_unwatch =
        item.target == Target::cpu_observed && item.step->builds.count(Target::cpu) && !too_large(Target::cpu, "");
    const auto why =
        too_large(item.target, may_unwatch ? "choose a smaller problem, or --no-observe" : "choose a smaller problem");
    if (why) left_out_.push_back(*why);
    return why;
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
        if (options_.random > 0) {
          const auto why = why_not(drawn({step, pass, *target, {}}, 0));
          why ? refuse(*why) : items_.push_back({step, pass, *target, {}});
          continue;
        }
        for (const Problem& p : problems_for(*step)) {
          const Item item{step, pass, *target, p, options_.values.value_or(Values::normal)};
          const auto why = why_not(item);
          why ? refuse(*why) : items_.push_back(item);
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
  std::vector<std::string> left_out_;
};

class Check {
 public:
  explicit Check(const CheckOptions& options)
      : options_(options),
        chosen_(choose_device(options.device.choice)),
        plan_(options, *chosen_.device),
        report_(options.format.format, options.how_run()) {}

  int run() {
    if (options_.random > 0)
      run_random();
    else
      run_all(plan_.items());
    progress_.show("");
    for (const std::string& why : plan_.left_out()) std::cerr << "left out: " << why << "\n";
    return report_.print(std::cout, chosen_.sentence) ? 0 : 1;
  }

 private:
  static constexpr uint32_t kDrawnAtOnce = 64;
  static constexpr int kShrunk = 10;  // failures that are cut down

  // Draws some cases for all steps, makes the questions with a core each, asks them; then the next ones.
  void run_random() {
    const auto cases = uint32_t(options_.random);
    left_ = size_t(cases) * plan_.items().size();
    for (uint32_t first = 0; first < cases; first += kDrawnAtOnce) {
      std::vector<Item> items;
      for (uint32_t number = first; number < std::min(cases, first + kDrawnAtOnce); number++)
        for (const Item& item : plan_.items()) items.push_back(plan_.drawn(item, number));
      make_questions(items);
      if (!run_all(items)) return;
    }
  }

  // False if the device was lost on the way.
  bool run_all(const std::vector<Item>& items) {
    if (options_.random == 0) left_ = items.size();
    for (const Item& item : items) {
      throw_if_interrupted();
      progress_.show(std::to_string(left_--) + " to go, " + item.step->id + ": " + describe(item.problem));
      if (why_unsupported(*item.step, item.problem, item.pass)) continue;  // drawn, with something given beside it
      if (check_one(item) || !device_of(item).lost()) continue;
      report_.stop_after_loss(left_);
      return false;
    }
    return true;
  }

  // Whether it passed.
  bool check_one(const Item& item) {
    const Outcome outcome = answer(item, question_for(item));
    report_.add(item, outcome);
    if (outcome.pass || options_.random == 0 || shrunk_++ >= kShrunk || device_of(item).lost()) return outcome.pass;
    const Item least = smallest_failing(item, [&](const Item& other) {
      progress_.show("looking for the least failing case: " + describe(other.problem));
      return !answer(other, new_question(other)).pass;
    });
    report_.add_smallest(least, answer(least, new_question(least)));
    return false;
  }

  Device& device_of(const Item& item) const { return item.target == Target::gpu ? *chosen_.device : cpu_device(); }

  Outcome answer(const Item& item, const Question& question) {
    return verify(device_of(item), item.target, *item.step, item.pass, question);
  }

  static std::string key_of(const Item& item) {
    return describe(item.problem) + " " + std::to_string(item.problem.seed) + name_of(item.values);
  }

  Question new_question(const Item& item, int threads = 0) const {
    return Question(item.problem, asks_for_gradient_, options_.sample, item.values, threads);
  }

  // Questions are kept for the steps to come; those with large tensors one at a time.
  const Question& question_for(const Item& item) {
    const auto it = questions_.find(key_of(item));
    if (it != questions_.end()) return it->second;
    if (item.problem.q_elements() + item.problem.kv_elements() > 200000) questions_.clear();
    return questions_.try_emplace(key_of(item), new_question(item)).first->second;
  }

  void make_questions(const std::vector<Item>& items) {
    questions_.clear();
    std::map<std::string, const Item*> fresh;
    for (const Item& item : items)
      if (!why_unsupported(*item.step, item.problem, item.pass)) fresh.emplace(key_of(item), &item);
    std::vector<std::pair<std::string, const Item*>> list(fresh.begin(), fresh.end());
    std::vector<std::optional<Question>> made(list.size());
    reference::parallel_for(list.size(), 0, [&](size_t i) { made[i].emplace(new_question(*list[i].second, 1)); });
    for (size_t i = 0; i < list.size(); i++) questions_.try_emplace(list[i].first, std::move(*made[i]));
  }

  const CheckOptions& options_;
  ChosenDevice chosen_;
  Plan plan_;
  const bool asks_for_gradient_ = std::any_of(plan_.items().begin(), plan_.items().end(),
                                              [](const Item& item) { return item.pass == Pass::backward; });
  Report report_;
  std::map<std::string, Question> questions_;
  int shrunk_ = 0;
  size_t left_ = 0;  // comparisons to be made
  Progress progress_;
};

}  // namespace

Command add_check(CLI::App& command) {
  auto o = std::make_shared<CheckOptions>();
  o->steps.add_to(command);
  o->problem.add_shape_to(command);
  o->problem.add_rest_to(command);
  o->pass.add_to(command);
  add_number(command, "--sample", o->given_sample, "Compare about this many rows of each output, for long sequences",
             kSamples);
  add_number(command, "--random", o->given_random,
             "Check this many drawn cases for each pass of each step; --seed draws others", Bounds{1, 1000000});
  command
      .add_option_function<std::string>(
          "--values", [o = o.get()](const std::string& word) { o->values = values_named(word); },
          "What the inputs are like: normal, outliers, huge, tiny, constant, zeros, denormal, nan, inf")
      ->type_name("")
      ->expected(0, 1);
  command.add_flag("--no-observe", o->no_observe, "On the CPU device: do not watch memory accesses; faster");
  o->device.add_to(command);
  o->format.add_to(command);
  return [o] {
    o->sample = o->given_sample.value_or(0);
    o->random = o->given_random.value_or(0);
    return Check(*o).run();
  };
}

}  // namespace flash::cli
