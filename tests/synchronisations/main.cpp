// Takes each synchronisation out of the chapters' kernels in turn and sees whether the checks then fail: every barrier,
// wait, commit and fence in the course is there for a reason that can be shown.
//
//     synchronisations_needed [--sample N] [--verbose] [FILE]...     FILE: a prefix such as 05_kernel_fusion/forward
//
// A site passes when its step, on the CPU device and watched, fails at one of the problems below, by a finding or by a
// wrong result. Those of which nothing can be seen are in not_needed.txt, each with the reason; one that is listed
// there and does fail is an error too. Exit code 1 if any site is not as it should be.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/verify.h"
#include "harness/registry.h"
#include "kept.h"
#include "simt/executor.h"

namespace {
using namespace flash;

struct Site {
  int number;
  std::string file;  // "05_kernel_fusion/forward.cu"
  int line;
  std::string text;
};

const std::vector<Site> sites = {
#include "sites.inc"
};

int taken_out = -1;

// The reasons in not_needed.txt, by file and text of the line: "FILE | TEXT OF THE CALL | WHICH OF THEM | REASON".
std::map<std::string, std::string> read_reasons() {
  std::map<std::string, std::string> reasons;
  std::ifstream file(FLASHSTEPS_NOT_NEEDED);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t end = line.rfind(" | ");
    reasons[line.substr(0, end)] = line.substr(end + 3);
  }
  return reasons;
}

// A site's name in not_needed.txt, which does not change when lines are added above it.
std::string key_of(const Site& site) {
  int which = 1;
  for (const Site& other : sites)
    if (other.file == site.file && other.text == site.text && other.number < site.number) which++;
  return site.file + " | " + site.text + " | " + std::to_string(which);
}

// Steps that a file's kernels are part of: its own, or all of the chapter for a header.
std::vector<const RegisteredStep*> steps_of(const std::string& file) {
  std::vector<const RegisteredStep*> steps;
  const std::string stem = file.substr(0, file.rfind('.'));
  const bool header = file.ends_with(".h");
  for (const RegisteredStep& step : all_steps())
    if (header ? step.chapter() == file.substr(0, file.find('/')) : step.id == stem) steps.push_back(&step);
  return steps;
}

// Several tiles in each direction; with and without mask, more keys than queries and fewer, grouped heads, dropout,
// negative scale; scores so large that kernels take their careful ways.
std::vector<Problem> problems_for(const RegisteredStep& step) {
  const Step& info = step.info();
  std::vector<Problem> problems;
  for (int D : info.head_dims) {
    if (info.head_dims.size() > 8 && D != 64) continue;
    for (int kind = 0; kind < (D == 64 ? 4 : 3); kind++) {
      Problem p;
      p.D = D, p.scale = default_scale(D), p.dtype = info.dtypes[size_t(kind) % info.dtypes.size()];
      p.Nq = kind == 1 ? 140 : 300, p.Nk = kind == 2 ? 140 : 300;
      p.causal = kind > 0;
      p.deterministic = kind == 2;
      if (kind == 3) p.B = 2, p.causal = false, p.scale *= 1000;
      if (kind > 0) p.Hq = 2, p.Hkv = info.kv_heads ? 1 : 2;
      if (kind == 1 && info.dropout) p.dropout = 0.2;
      if (kind == 2) p.scale = -p.scale;
      problems.push_back(p);
    }
  }
  return problems;
}

const cli::Question& question_for(const Problem& p) {
  static std::map<std::string, cli::Question> questions;
  return questions.try_emplace(describe(p), p, true).first->second;
}

// One check of one step.
struct Trial {
  const RegisteredStep* step;
  Pass pass;
  Problem problem;
  simt::Order order;
};

// What the check says, in one line; nothing if it passes.
std::optional<std::string> failure_in(const Trial& trial) {
  simt::options().order = trial.order;
  const cli::Outcome outcome =
      cli::verify(cpu_device(), Target::cpu_observed, *trial.step, trial.pass, question_for(trial.problem));
  if (!outcome.fault.empty()) return outcome.fault.substr(0, outcome.fault.find('\n'));
  for (const auto& [name, verdict] : outcome.outputs)
    if (!verdict.pass) return name + ": " + verdict.reason;
  return std::nullopt;
}

// The checks of the steps, the quick ones first, each in both orders of threads.
std::vector<Trial> trials_of(const std::vector<const RegisteredStep*>& steps) {
  std::vector<Trial> trials;
  for (simt::Order order : {simt::Order::forward, simt::Order::backward})
    for (const RegisteredStep* step : steps)
      for (const Problem& p : problems_for(*step))
        for (Pass pass : {Pass::forward, Pass::backward})
          if (!why_unsupported(*step, p, pass)) trials.push_back({step, pass, p, order});
  std::stable_partition(trials.begin(), trials.end(), [](const Trial& trial) { return trial.problem.B == 1; });
  return trials;
}

}  // namespace

bool synchronisations::kept(int site) { return site != taken_out; }

int main(int argc, char** argv) {
  int sample = int(sites.size());
  bool verbose = false;
  std::vector<std::string> prefixes;
  for (int i = 1; i < argc; i++) {
    if (!std::strcmp(argv[i], "--sample") && i + 1 < argc)
      sample = std::max(1, std::atoi(argv[++i]));
    else if (!std::strcmp(argv[i], "--verbose"))
      verbose = true;
    else
      prefixes.push_back(argv[i]);
  }
  const std::map<std::string, std::string> reasons = read_reasons();
  const int stride = std::max(1, (int(sites.size()) + sample - 1) / sample);
  int tried = 0, wrong = 0, unneeded = 0;
  for (const Site& site : sites) {
    const bool wanted =
        prefixes.empty() || std::any_of(prefixes.begin(), prefixes.end(),
                                        [&](const std::string& prefix) { return site.file.starts_with(prefix); });
    if (!wanted || (prefixes.empty() && site.number % stride != 0)) continue;
    std::optional<std::string> failure, untouched;
    for (const Trial& trial : trials_of(steps_of(site.file))) {
      taken_out = site.number;
      failure = failure_in(trial);
      taken_out = -1;
      if (failure) untouched = failure_in(trial);  // with all in their places it must pass
      if (failure) break;
    }
    const auto reason = reasons.find(key_of(site));
    const bool as_expected = !untouched && failure.has_value() == (reason == reasons.end());
    tried++, wrong += !as_expected, unneeded += !failure;
    if (as_expected && !verbose) continue;
    std::cout << (as_expected ? "ok      " : "WRONG   ") << site.file << ":" << site.line << " " << site.text
              << "\n        ";
    if (untouched)
      std::cout << "fails with all in their places: " << *untouched;
    else if (failure)
      std::cout << "without it: " << *failure << (reason != reasons.end() ? " (but not_needed.txt lists it)" : "");
    else if (reason != reasons.end())
      std::cout << "nothing to be seen without it: " << reason->second;
    else
      std::cout << "nothing fails without it. Take it out, or list it in not_needed.txt as\n        " << key_of(site)
                << " | reason";
    std::cout << std::endl;
  }
  std::cout << tried << " of " << sites.size() << " synchronisations taken out, one at a time: " << tried - unneeded
            << " noticed, " << unneeded << " not; " << wrong << " otherwise than expected\n";
  return wrong ? 1 : 0;
}
