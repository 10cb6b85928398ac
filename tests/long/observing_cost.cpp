// How much longer kernels take on the CPU executor when it observes them: each step's launches, watched and not.
//
//     build/tests/observing_cost [STEP ...] [--seq N] … [--rounds N] [--workers N] [--most X]
//
// The best of some rounds counts, each with new memory: what the observer keeps beside it is made in the time that is
// measured. Ends with 1 if a chapter takes more than --most times as long.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <limits>
#include <map>

#include "cli/options.h"
#include "cli/verify.h"
#include "harness/error.h"
#include "harness/inputs.h"
#include "harness/runner.h"
#include "simt/executor.h"

namespace {
using namespace flash;

struct Options {
  cli::StepOption steps;
  cli::ProblemOptions problem;
  cli::PassOption pass;
  cli::FormatOption format;
  std::optional<int> rounds, workers;
  std::optional<double> most;
};

// Milliseconds for one pass.
struct Times {
  double plain = 0, observed = 0;
  double ratio() const { return observed / plain; }
};

// Runs the pass in both builds in turn, so that a busy machine slows both.
Times measure(const RegisteredStep& step, Pass pass, const Problem& p, int rounds) {
  HostTensors inputs = random_tensors(p, 1);
  if (pass == Pass::backward && !forward_of(step)) {
    const RegisteredStep& forward = cli::forward_before(step, p, DeviceKind::cpu);
    const HostTensors made =
        run_step(cpu_device(), *target_for(forward, DeviceKind::cpu, false), forward, Pass::forward, p, inputs).tensors;
    inputs.O = made.O, inputs.LSE = made.LSE;
  }
  const auto time = [&](Target target) {
    const PreparedStep prepared(cpu_device(), target, step, pass, p, inputs);
    return cpu_device().times_ms(1, [&](int) { prepared.launch(); })[0];
  };
  Times best{std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  for (int round = 0; round < rounds; round++) {
    best.plain = std::min(best.plain, time(Target::cpu));
    best.observed = std::min(best.observed, time(Target::cpu_observed));
  }
  return best;
}

cli::Row row_of(const std::string& step, const std::string& pass, const Times& times) {
  return {{"step", step},
          {"pass", pass},
          {"plain_ms", times.plain},
          {"observed_ms", times.observed},
          {"ratio", times.ratio()}};
}

int compare(const Options& o) {
  simt::options().workers = o.workers.value_or(0);
  std::vector<cli::Row> rows;
  std::map<std::string, Times> chapters;
  for (const RegisteredStep* step : select_steps(o.steps.prefixes))
    for (const Pass pass : o.pass.passes()) {
      Problem p;
      p.Hq = p.Hkv = 2, p.Nq = p.Nk = 256, p.dtype = step->info().dtypes.front();  // the tour's
      p.scale = default_scale(p.D);
      p = o.problem.apply(p);
      if (!step->builds.count(Target::cpu_observed) || !step->has(pass) || why_unsupported(*step, p, pass)) continue;
      const Times times = measure(*step, pass, p, std::max(1, o.rounds.value_or(5)));
      rows.push_back(row_of(step->id, cli::name_of(pass), times));
      chapters[step->chapter()].plain += times.plain;
      chapters[step->chapter()].observed += times.observed;
    }
  if (rows.empty()) throw Error("no step runs such a problem on the CPU");

  Times all;
  bool within = true;
  for (const auto& [chapter, times] : chapters) {
    rows.push_back(row_of(chapter, "", times));
    all.plain += times.plain, all.observed += times.observed;
    within = within && times.ratio() <= o.most.value_or(std::numeric_limits<double>::infinity());
  }
  rows.push_back(row_of("all", "", all));
  cli::print_rows(std::cout, o.format.format, rows, {"step", "pass", "plain ms", "observed ms", "ratio"});
  if (!within) std::cerr << "observing_cost: a chapter takes more than " << *o.most << " times as long\n";
  return within ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"How much longer kernels take on the CPU executor when it observes them."};
  Options o;
  o.steps.add_to(app);
  o.problem.add_shape_to(app);
  o.problem.add_rest_to(app);
  o.pass.add_to(app);
  o.format.add_to(app);
  cli::add_number(app, "--rounds", o.rounds, "Of which the best counts; 5");
  cli::add_number(app, "--workers", o.workers, "OS threads; one a core");
  cli::add_number(app, "--most", o.most, "So many times as long may a chapter take");
  CLI11_PARSE(app, argc, argv);
  try {
    return compare(o);
  } catch (const std::exception& e) {
    std::cerr << "observing_cost: " << e.what() << "\n";
    return 2;
  }
}
