// The registry of steps: how they are selected, what they support, what they ask for.
#include <doctest/doctest.h>

#include "cli/verify.h"
#include "command.h"
#include "harness/device.h"
#include "harness/inputs.h"
#include "harness/registry.h"
#include "harness/runner.h"
#include "message_of.h"
#include "simt_kernels/simt_kernels.h"

TEST_SUITE_BEGIN("registry");

namespace {
using namespace flash;
using flash::tests::contains, flash::tests::message_of;

Problem small() {
  Problem p;
  p.Hq = p.Hkv = 2;
  p.Nq = 5;
  p.Nk = 7;
  p.D = 8;
  p.scale = default_scale(8);
  return p;
}

}  // namespace

TEST_CASE("steps are found by prefixes; what fits nothing is refused with the list of ids") {
  const auto ids = [](const std::vector<std::string>& prefixes) {
    std::vector<std::string> result;
    for (const RegisteredStep* s : select_steps(prefixes)) result.push_back(s->id);
    return result;
  };
  CHECK(ids({"02"}) == std::vector<std::string>{"02_naive_gpu/forward", "02_naive_gpu/backward"});
  CHECK(ids({"02/f"}) == std::vector<std::string>{"02_naive_gpu/forward"});
  CHECK(ids({"02_naive_gpu/backward", "01"}) ==
        std::vector<std::string>{"01_cpu_attention/attention", "02_naive_gpu/backward"});
  CHECK(ids({}).size() == all_steps().size());
  const std::string refusal = message_of([&] { ids({"77"}); });
  CHECK(contains(refusal, "there is no step '77'"));
  CHECK(contains(refusal, "02_naive_gpu/forward"));
  for (const RegisteredStep& step : all_steps()) {
    CHECK(ids({step.id}) == std::vector<std::string>{step.id});
    CHECK((step.has(Pass::forward) || step.has(Pass::backward)));
    CHECK(!step.info().idea.empty());
  }
}

TEST_CASE("what a step does not support is refused by name, with what it does support") {
  const RegisteredStep& step = *select_steps({"02/forward"}).front();
  Problem p = small();
  CHECK(!why_unsupported(step, p, Pass::forward));
  CHECK(contains(*why_unsupported(step, p, Pass::backward), "02_naive_gpu/forward does not support the backward pass"));
  p.D = 512;
  CHECK(contains(*why_unsupported(step, p, Pass::forward), "head dim 512; supported: 1-256"));
  p = small(), p.dtype = DType::bf16;
  CHECK(contains(*why_unsupported(step, p, Pass::forward), "bf16; supported: fp32"));
  p = small(), p.Hkv = 1;
  CHECK(contains(*why_unsupported(step, p, Pass::forward), "grouped key/value heads"));
  p = small(), p.dropout = 0.1;
  CHECK(contains(*why_unsupported(*select_steps({"01"}).front(), p, Pass::forward), "dropout"));
}

TEST_CASE("a registration that leaves out what a step cannot do without is refused by name") {
  const Step whole = select_steps({"05/forward"}).front()->builds.at(Target::cpu);
  const auto refusal = [&](auto change) {
    Step step = whole;
    change(step);
    return message_of([&] { complete({{"20_mine/forward", {{Target::cpu, whole}, {Target::gpu, step}}}}); });
  };
  CHECK(refusal([](Step&) {}) == "");
  CHECK(contains(refusal([](Step& s) { s.dtypes.clear(); }), "20_mine/forward: its registration has no .dtypes; "));
  CHECK(contains(refusal([](Step& s) { s.head_dims.clear(); }), "no .head_dims; "));
  CHECK(contains(refusal([](Step& s) { s.forward = nullptr; }), "no .forward and no .backward; "));
}

TEST_CASE("a launch that cannot be is the failure of the step that asks for it, and says whose it is") {
  using Kernels = simt_kernels::Kernels<Target::cpu>;
  Problem p = small();
  p.D = 32;
  const RegisteredStep& right = *select_steps({"05/forward"}).front();
  const auto outcome = [&](RunPass forward) {
    RegisteredStep step{"20_mine/forward", {{Target::cpu, right.builds.at(Target::cpu)}}};
    step.builds.at(Target::cpu).forward = forward;
    return cli::verify(cpu_device(), Target::cpu, step, Pass::forward, cli::Question(p, false, 0));
  };
  const cli::Outcome threads = outcome([](const Problem&, const Tensors&, Stream) {
    Kernels::empty({1, 1, 1}, {1025, 1, 1}, 0);
  });
  CHECK(!threads.pass);
  CHECK(threads.outputs.empty());
  CHECK(contains(threads.fault, "20_mine/forward: launch of "));
  CHECK(contains(threads.fault, "1025 threads; from 1 to 1024"));
  const cli::Outcome workspace = outcome([](const Problem&, const Tensors& t, Stream) { t.scratch<float>("S"); });
  CHECK(!workspace.pass);
  CHECK(contains(workspace.fault, "20_mine/forward: there is no workspace 'S'"));
  // What is too much for the device at hand is no step's failure.
  CHECK_THROWS_AS(outcome([](const Problem&, const Tensors&, Stream) { cpu_device().allocate(size_t(1) << 50); }),
                  Error);
  CHECK(outcome(right.builds.at(Target::cpu).forward).pass);
}

TEST_CASE("scratch memory as reported: quadratic in the lengths for chapter 02, three matrices with dropout") {
  const RegisteredStep& forward = *select_steps({"02/forward"}).front();
  const RegisteredStep& backward = *select_steps({"02/backward"}).front();
  Problem p = small();
  const size_t matrix = p.scores() * 4;
  HostTensors tensors = random_tensors(p, 1);
  CHECK(run_step(cpu_device(), Target::cpu, forward, Pass::forward, p, tensors).scratch_bytes == 2 * matrix);
  CHECK(run_step(cpu_device(), Target::cpu, backward, Pass::backward, p, tensors).scratch_bytes == 2 * matrix);
  p.dropout = 0.1;
  CHECK(run_step(cpu_device(), Target::cpu, forward, Pass::forward, p, tensors).scratch_bytes == 3 * matrix);
  CHECK(run_step(cpu_device(), Target::cpu, backward, Pass::backward, p, tensors).scratch_bytes == 3 * matrix);
}

TEST_SUITE_END();
