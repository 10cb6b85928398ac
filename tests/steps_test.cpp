// Every step of every chapter, on the CPU device: against the oracle over the awkward grid, plain and observed, and
// against values from another implementation.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "cli/awkward.h"
#include "cli/verify.h"
#include "golden.h"
#include "harness/inputs.h"
#include "harness/registry.h"
#include "harness/round.h"
#include "simt/executor.h"

TEST_SUITE_BEGIN("steps");

namespace {
using namespace flash;

// The builds of a step that run on the CPU device.
std::vector<Target> cpu_targets(const RegisteredStep& step) {
  std::vector<Target> targets;
  for (const auto& [target, build] : step.builds)
    if (target != Target::gpu) targets.push_back(target);
  return targets;
}

// Two or three head dims of those that a step takes.
std::vector<int> some_head_dims(const Step& step) {
  if (step.head_dims.size() <= 3) return step.head_dims;
  return {1, 50, 64};
}

void expect_right(const RegisteredStep& step, Target target, Pass pass, const cli::Question& question) {
  INFO(step.id << ", " << describe(question.problem()));
  const cli::Outcome outcome = cli::verify(cpu_device(), target, step, pass, question);
  CHECK_MESSAGE(outcome.fault.empty(), outcome.fault);
  for (const auto& output : outcome.outputs)
    CHECK_MESSAGE(output.second.pass, output.first << ": " << output.second.reason);
}

// A question with values of the test's own.
template <class Change>
HostTensors changed_inputs(const Problem& p, Change change) {
  HostTensors t = random_tensors(p, 3);
  change(t);
  return t;
}

// Judges one pass of a step on given inputs.
void expect_right_on(const RegisteredStep& step, Pass pass, const Problem& p, const HostTensors& inputs) {
  if (why_unsupported(step, p, pass)) return;
  INFO(step.id << ", " << describe(p));
  const reference::Oracle oracle(p, {inputs.Q, inputs.K, inputs.V, inputs.dO});
  for (Target target : cpu_targets(step)) {
    HostTensors t = inputs;
    if (pass == Pass::backward && !forward_of(step)) t.O = oracle.O(), t.LSE = oracle.LSE();
    t = run_step(cpu_device(), target, step, pass, p, t).tensors;
    const auto expect = [](const char* name, const reference::Verdict& v) {
      CHECK_MESSAGE(v.pass, name << ": " << v.reason);
    };
    if (pass == Pass::forward) {
      expect("O", oracle.judge_O(t.O));
      expect("LSE", oracle.judge_LSE(t.LSE));
    } else {
      expect("dQ", oracle.judge_dQ(t.dQ));
      expect("dK", oracle.judge_dK(t.dK));
      expect("dV", oracle.judge_dV(t.dV));
    }
  }
}

// In a gradient, whether an ∞ among the inputs ends as ∞ or as ∞ − ∞ = NaN depends on the order of the sums, and
// IEEE allows either; which elements stay finite does not.
void expect_finite_where_the_oracle_is(const RegisteredStep& step, const Problem& p, const HostTensors& inputs) {
  if (why_unsupported(step, p, Pass::backward)) return;
  INFO(step.id << ", " << describe(p));
  const auto oracle = reference::attention<double>(p, {inputs.Q, inputs.K, inputs.V, inputs.dO});
  HostTensors t = inputs;
  if (!forward_of(step)) t.O = oracle.O.values, t.LSE = oracle.LSE.values;
  t = run_step(cpu_device(), *target_for(step, DeviceKind::cpu, false), step, Pass::backward, p, t).tensors;
  const auto differing = [](const std::vector<double>& x, const reference::Output<double>& expected) {
    int count = 0;
    for (size_t i = 0; i < x.size(); i++) count += std::isfinite(x[i]) != std::isfinite(expected.values[i]);
    return count;
  };
  CHECK(differing(t.dQ, oracle.dQ) == 0);
  CHECK(differing(t.dK, oracle.dK) == 0);
  CHECK(differing(t.dV, oracle.dV) == 0);
}

// What is not finite in the oracle's gradients must not look finite.
void expect_not_hidden(const RegisteredStep& step, const Problem& p, const HostTensors& inputs) {
  if (why_unsupported(step, p, Pass::backward)) return;
  INFO(step.id << ", " << describe(p));
  const auto oracle = reference::attention<double>(p, {inputs.Q, inputs.K, inputs.V, inputs.dO});
  HostTensors t = inputs;
  t.O = oracle.O.values, t.LSE = oracle.LSE.values;
  t = run_step(cpu_device(), *target_for(step, DeviceKind::cpu, false), step, Pass::backward, p, t).tensors;
  const auto hidden = [](const std::vector<double>& x, const reference::Output<double>& expected) {
    int count = 0;
    for (size_t i = 0; i < x.size(); i++) count += std::isfinite(x[i]) && !std::isfinite(expected.values[i]);
    return count;
  };
  CHECK(hidden(t.dQ, oracle.dQ) == 0);
  CHECK(hidden(t.dK, oracle.dK) == 0);
  CHECK(hidden(t.dV, oracle.dV) == 0);
}

void every_step(const std::function<void(const RegisteredStep&, Pass)>& act) {
  for (const RegisteredStep& step : all_steps())
    for (Pass pass : {Pass::forward, Pass::backward})
      if (step.has(pass)) act(step, pass);
}
void every_step_and_type(const std::function<void(const RegisteredStep&, Pass, DType)>& act) {
  every_step([&](const RegisteredStep& step, Pass pass) {
    for (DType type : step.info().dtypes) act(step, pass, type);
  });
}

}  // namespace

TEST_CASE("every kernel is built for both devices' targets on this machine") {
  for (const RegisteredStep& step : all_steps()) {
    INFO(step.id);
    CHECK((step.builds.count(Target::host) ||
           (step.builds.count(Target::cpu) && step.builds.count(Target::cpu_observed))));
  }
}

TEST_CASE("the awkward grid: errors within the rule, nothing found by the observer") {
  std::map<std::string, cli::Question> questions;
  int checked = 0;
  every_step([&](const RegisteredStep& step, Pass pass) {
    for (int D : some_head_dims(step.info()))
      for (Problem p : cli::awkward_problems(D))
        for (DType type : step.info().dtypes) {
          p.dtype = type;
          p.seed = 11;
          if (why_unsupported(step, p, pass)) continue;
          const cli::Question& question = questions.try_emplace(describe(p), p, true).first->second;
          for (Target target : cpu_targets(step)) expect_right(step, target, pass, question), checked++;
        }
  });
  CHECK(checked > 100);
}

TEST_CASE("values that PyTorch computed in float64") {
  for (const auto& golden : testing::read_golden(FLASHSTEPS_TEST_DATA "/golden.csv"))
    every_step_and_type([&](const RegisteredStep& step, Pass pass, DType type) {
      Problem p = golden.problem;
      p.dtype = type;
      if (why_unsupported(step, p, pass)) return;
      INFO(step.id << " on " << golden.name << ", " << name_of(type));
      const reference::Inputs inputs = testing::golden_inputs(golden);
      const reference::Oracle oracle(p, inputs);
      HostTensors t = inputs;
      if (pass == Pass::backward && !forward_of(step)) t.O = oracle.O(), t.LSE = oracle.LSE();
      t = run_step(cpu_device(), *target_for(step, DeviceKind::cpu, false), step, pass, p, t).tensors;
      const std::map<std::string, std::pair<const std::vector<double>*, reference::Verdict>> results =
          pass == Pass::forward
              ? std::map<std::string,
                         std::pair<const std::vector<double>*, reference::Verdict>>{{"O", {&t.O, oracle.judge_O(t.O)}},
                                                                                    {"LSE",
                                                                                     {&t.LSE, oracle.judge_LSE(t.LSE)}}}
              : std::map<std::string, std::pair<const std::vector<double>*, reference::Verdict>>{
                    {"dQ", {&t.dQ, oracle.judge_dQ(t.dQ)}},
                    {"dK", {&t.dK, oracle.judge_dK(t.dK)}},
                    {"dV", {&t.dV, oracle.judge_dV(t.dV)}}};
      for (const testing::GoldenValue& value : golden.values) {
        const auto it = results.find(value.tensor);
        if (it == results.end() || value.kind != "at") continue;
        const auto& [tensor, verdict] = it->second;
        const double x = (*tensor)[value.index];
        INFO(value.tensor << "[" << value.index << "]: " << x << ", PyTorch has " << value.value);
        if (std::isfinite(value.value))
          CHECK(std::fabs(x - value.value) <= verdict.max_allowed);
        else
          CHECK(x == value.value);
      }
    });
}

TEST_CASE("one key with a score of -524288: O = V, not 0") {
  every_step([](const RegisteredStep& step, Pass pass) {
    if (pass == Pass::backward) return;
    Problem p;
    p.D = 128, p.scale = 1;
    p.dtype = step.info().dtypes.front();
    if (why_unsupported(step, p, pass)) return;
    HostTensors t;
    t.Q.assign(128, 64.0), t.K.assign(128, -64.0), t.V.assign(128, 1.0);
    t = run_step(cpu_device(), *target_for(step, DeviceKind::cpu, false), step, pass, p, t).tensors;
    INFO(step.id);
    CHECK(t.O == std::vector<double>(128, 1.0));
    // e4m3 rounds each factor of the rotated dot product by up to 1/16 of it (Cauchy and Schwarz do the rest).
    const double allowed = p.dtype == DType::e4m3 ? 524288.0 * (17.0 / 16 * 17 / 16 - 1) : 0;
    REQUIRE(t.LSE.size() == 1);
    CHECK(std::fabs(t.LSE[0] + 524288.0) <= allowed);
  });
}

TEST_CASE("a single token: O = V, dQ = dK = 0, dV = dO") {
  every_step([](const RegisteredStep& step, Pass pass) {
    for (int D : {16, 64}) {
      Problem p;
      p.D = D, p.scale = default_scale(D);
      p.dtype = step.info().dtypes.front();
      if (why_unsupported(step, p, pass)) continue;
      const HostTensors inputs = changed_inputs(p, [](HostTensors& t) {
        for (auto* x : {&t.Q, &t.K, &t.V})
          for (double& v : *x) v *= 3;
        t.dO.assign(t.dO.size(), 1.0);
      });
      HostTensors t = inputs;
      for (auto* x : {&t.Q, &t.K, &t.V})
        for (double& v : *x) v = rounded_to(input_dtype(p), v);
      expect_right_on(step, pass, p, t);
    }
  });
}

TEST_CASE("scores that differ widely between neighbours, and rows of every width about a warp's, all scores negative") {
  every_step([](const RegisteredStep& step, Pass pass) {
    const int D = some_head_dims(step.info()).back();
    for (int width : {1, 2, 3, 17, 31, 32, 33}) {
      Problem p;
      p.Nq = 3, p.Nk = width, p.D = D, p.scale = default_scale(D), p.dtype = step.info().dtypes.front();
      HostTensors t = random_tensors(p, 5);
      for (double& v : t.Q) v = 1;
      for (size_t i = 0; i < t.K.size(); i++)  // key j scores about −(j · 37 mod 101), up or down by 100 from the last
        t.K[i] = -double(i / size_t(D) * 37 % 101) / (D * p.scale);
      for (double& v : t.K) v = rounded_to(input_dtype(p), v);
      expect_right_on(step, pass, p, t);
    }
  });
}

TEST_CASE("a NaN or an infinity reaches exactly the rows that see it") {
  every_step([](const RegisteredStep& step, Pass pass) {
    const int D = some_head_dims(step.info()).back();
    for (double bad : {double(NAN), double(INFINITY), -double(INFINITY)})
      for (int which : {0, 1, 2, 3}) {
        Problem p;
        p.Hq = p.Hkv = 2, p.Nq = 35, p.Nk = 37, p.D = D, p.scale = default_scale(D), p.causal = true;
        p.dtype = step.info().dtypes.front();
        HostTensors t = random_tensors(p, 9);
        auto& tensor = which == 0 ? t.Q : which == 1 ? t.K : which == 2 ? t.V : t.dO;
        if (which == 3 && pass == Pass::forward) continue;
        tensor[size_t(20 * D + D / 2)] = bad;
        INFO("in " << which << " value " << bad);
        if (pass == Pass::backward && step.info().spreads_nonfinite)
          expect_not_hidden(step, p, t);
        else if (std::isnan(bad) || pass == Pass::forward)
          expect_right_on(step, pass, p, t);
        else
          expect_finite_where_the_oracle_is(step, p, t);
      }
  });
}

TEST_CASE("a NaN reaches rows whose weight for it is too small for a float, and none that dropped it") {
  every_step([](const RegisteredStep& step, Pass pass) {
    const int D = some_head_dims(step.info()).back();
    for (const bool in_V : {true, false}) {
      if (!in_V && pass == Pass::forward) continue;
      Problem p;
      p.Hq = p.Hkv = 2, p.Nq = 35, p.Nk = 37, p.D = D, p.causal = true;
      p.scale = 30 * default_scale(D);  // distances of 100 and more within a row
      p.dtype = step.info().dtypes.front();
      if (step.info().dropout) p.dropout = 0.3, p.seed = 2;
      HostTensors t = random_tensors(p, 2);
      for (int row : {3, 20, 40, 60}) (in_V ? t.V : t.dO)[size_t(row * D + row % D)] = NAN;
      INFO("in " << (in_V ? "V" : "dO"));
      if (pass == Pass::backward && step.info().spreads_nonfinite)
        expect_not_hidden(step, p, t);
      else
        expect_right_on(step, pass, p, t);
    }
  });
}

TEST_CASE("a GPU with less shared memory gets tiles that fit: a T4 with 64 KB a block, sm_86 and sm_89 with 99") {
  for (const auto& [sm, kilobytes] : {std::pair(75, 64), std::pair(86, 99)}) {
    simt::options().shared_bytes = size_t(kilobytes) << 10;
    every_step([sm = sm](const RegisteredStep& step, Pass pass) {
      for (int D : some_head_dims(step.info())) {
        Problem p;
        p.Nq = 70, p.Nk = 75, p.D = D, p.scale = default_scale(D), p.causal = true;
        p.dtype = step.info().dtypes.front();
        if (step.info().min_sm > sm || why_unsupported(step, p, pass)) continue;
        for (const bool other : {false, true}) {  // what has kernels of its own, in some steps
          p.deterministic = other && pass == Pass::backward;
          p.dropout = other && step.info().dropout ? 0.1 : 0;
          const cli::Question question(p, true);
          for (Target target : cpu_targets(step)) expect_right(step, target, pass, question);
        }
      }
    });
  }
  simt::options() = simt::Options{};
}

TEST_CASE("the same bits from run to run") {
  every_step([](const RegisteredStep& step, Pass pass) {
    const int D = some_head_dims(step.info()).back();
    Problem p;
    p.B = 2, p.Hq = p.Hkv = 2, p.Nq = 45, p.Nk = 50, p.D = D, p.scale = default_scale(D);
    p.dtype = step.info().dtypes.front();
    if (why_unsupported(step, p, pass)) return;
    HostTensors inputs = random_tensors(p, 13);
    inputs.O = inputs.dO;
    inputs.LSE.assign(p.query_rows(), 4.0);
    const Target target = *target_for(step, DeviceKind::cpu, false);
    const HostTensors first = run_step(cpu_device(), target, step, pass, p, inputs).tensors;
    const HostTensors second = run_step(cpu_device(), target, step, pass, p, inputs).tensors;
    CHECK((first.O.size() + first.dQ.size()) > 0);
    CHECK(first.O == second.O);
    CHECK(first.dQ == second.dQ);
    CHECK(first.dK == second.dK);
    CHECK(first.dV == second.dV);
  });
}

TEST_SUITE_END();
