// The random tester: its numbers are the same on every machine, its cases are what they should be, it finds a planted
// fault and cuts it down, and the command that it prints repeats the case.
#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/draws.h"
#include "cli/random_problems.h"
#include "cli/report.h"
#include "cli/values.h"
#include "command.h"
#include "harness/device.h"
#include "harness/error.h"
#include "harness/inputs.h"
#include "harness/round.h"

TEST_SUITE_BEGIN("random");

namespace {
using namespace flash;
using namespace flash::cli;
using namespace flash::tests;

Problem shape(DType dtype, int heads = 2, int N = 40, int D = 32) {
  Problem p;
  p.Hq = p.Hkv = heads, p.Nq = p.Nk = N, p.D = D, p.scale = default_scale(D), p.dtype = dtype;
  return p;
}

Item item_of(const RegisteredStep& step, const RandomCase& drawn, Pass pass) {
  return {&step, pass, *target_for(step, DeviceKind::cpu, false), drawn.problem, drawn.values};
}

}  // namespace

// The expected numbers here are those of a Python program that shares nothing with this one.
TEST_CASE("draws are Philox words, in this order") {
  Draws draws(0x0123456789abcdef, 7, 2);
  for (const uint32_t word : {0xba607e92u, 0x17d2a61cu, 0xa226e793u, 0x61fac290u, 0xa9b41520u, 0x3ffe77a9u})
    CHECK(draws.word() == word);
  Draws again(0x0123456789abcdef, 7, 2);
  CHECK(again.long_word() == 0xba607e9217d2a61cu);
  Draws digits(5, 6, 0);
  for (const int digit : {2, 0, 0, 9, 2, 0, 1, 3, 5, 9, 5, 6}) CHECK(digits.below(10) == digit);
}

TEST_CASE("values are the same on every machine") {
  const Problem p = shape(DType::fp32);
  const auto with = [&](Values values) { return tensors_of(p, 12345, values); };
  const HostTensors normal = with(Values::normal);
  CHECK(std::vector<double>(normal.Q.begin(), normal.Q.begin() + 4) ==
        std::vector<double>{0.7507109642028809, 0.24665117263793945, -0.6799039840698242, 0.263185977935791});
  CHECK(normal.V[1000] == -1.2379164695739746);

  const HostTensors outliers = with(Values::outliers);
  std::map<size_t, double> changed;
  for (size_t i = 0; i < 200; i++)
    if (outliers.V[i] != normal.V[i]) changed[i] = outliers.V[i];
  CHECK(changed ==
        std::map<size_t, double>{{39, -21.463973999023438}, {92, -5.482696533203125}, {119, 8.540397644042969}});

  CHECK(with(Values::huge).K[7] == std::ldexp(normal.K[7], 32));
  CHECK(with(Values::tiny).K[7] == std::ldexp(normal.K[7], -30));
  CHECK(with(Values::constant).Q == std::vector<double>(p.q_elements(), -0.25));
  const std::vector<double> zeros = with(Values::zeros).Q;
  for (size_t i = 0; i < 8; i++) {
    CHECK(zeros[i] == 0);
    CHECK(std::signbit(zeros[i]) != (i == 0 || i == 4 || i == 6));
  }
  for (const double x : with(Values::denormal).K) CHECK(std::fabs(x) < 0x1p-126);
  CHECK(with(Values::denormal).K[7] == double(float(normal.K[7] * 0x1p-129)));

  const HostTensors nan = with(Values::nan), inf = with(Values::inf);
  for (const size_t i : {size_t(1320), size_t(804), size_t(830)}) CHECK(std::isnan(nan.Q[i]));
  CHECK(inf.Q[1320] == -INFINITY);
  CHECK(inf.Q[78] == -INFINITY);
  CHECK(inf.Q[1720] == INFINITY);
  CHECK(nan.K == normal.K);
  CHECK(nan.V == normal.V);

  for (const Values values : all_values()) {  // compared as bits: NaN is to equal NaN
    const HostTensors whole = with(values), without = tensors_of(p, 12345, values, false);
    CHECK(encode(DType::fp64, without.Q) == encode(DType::fp64, whole.Q));
    CHECK(encode(DType::fp64, without.K) == encode(DType::fp64, whole.K));
    CHECK(encode(DType::fp64, without.V) == encode(DType::fp64, whole.V));
    CHECK(without.dO.empty());
  }
}

TEST_CASE("values are representable in every type, and of their kind") {
  for (const DType dtype : {DType::fp64, DType::fp32, DType::fp16, DType::bf16, DType::e4m3})
    for (const Values values : all_values()) {
      INFO(flash::name_of(dtype) << " " << flash::cli::name_of(values));
      CHECK(values_named(flash::cli::name_of(values)) == values);
      const HostTensors t = tensors_of(shape(dtype), 3, values);
      int other = 0, not_finite = 0;
      for (const auto* x : {&t.Q, &t.K, &t.V, &t.dO})
        for (const double v : *x) {
          not_finite += !std::isfinite(v);
          other += std::isfinite(v) && rounded_to(input_dtype(shape(dtype)), v) != v;
        }
      CHECK(other == 0);
      if (are_finite(values)) CHECK(not_finite == 0);
      if (!are_finite(values)) CHECK((not_finite > 0 && not_finite <= 3));
    }
  CHECK_THROWS_AS(values_named("wild"), Error);
}

TEST_CASE("cases: the same for a number, what the step supports, and all there should be among a few hundred") {
  for (const RegisteredStep& step : all_steps())
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (!step.has(pass)) continue;
      INFO(step.id);
      std::set<int> head_dims, lengths;
      std::set<Values> values;
      std::set<bool> causal, drops, grouped, empty;
      int longest_queries = 0, longest_keys = 0;
      for (uint32_t i = 0; i < 400; i++) {
        const RandomCase drawn = random_case(step.info(), pass, 5, i, {}, {});
        const Problem& p = drawn.problem;
        const auto why = why_unsupported(step, p, pass);
        CHECK_MESSAGE(!why, *why);
        const RandomCase again = random_case(step.info(), pass, 5, i, {}, {});
        CHECK(describe(again.problem) == describe(p));
        CHECK(again.problem.seed == p.seed);
        CHECK(double(p.query_heads()) * std::max(1, p.Nq) * std::max(1, p.Nk) * p.D <= 3e6);
        head_dims.insert(p.D), lengths.insert(p.Nq), values.insert(drawn.values);
        causal.insert(p.causal), drops.insert(p.dropout > 0), grouped.insert(p.Hkv < p.Hq), empty.insert(p.Nk == 0);
        longest_queries = std::max(longest_queries, p.Nq), longest_keys = std::max(longest_keys, p.Nk);
      }
      CHECK(head_dims.size() >= std::min<size_t>(8, step.info().head_dims.size()));
      CHECK(lengths.size() > 60);
      CHECK(longest_queries > 1024);
      CHECK(longest_keys > 2048);
      CHECK(values.size() == all_values().size());
      CHECK(causal.size() == 2);
      CHECK(empty.size() == 2);
      CHECK(drops.size() == (step.info().dropout ? 2 : 1));
      CHECK(grouped.size() == (step.info().kv_heads ? 2 : 1));
    }
}

TEST_CASE("what the command line gives is kept to, and another seed draws other cases") {
  const RegisteredStep& step = *select_steps({"02/forward"}).front();
  ProblemOptions given;
  given.seq = 77, given.head_dim = 50, given.causal = true;
  std::set<double> scales;
  int different = 0;
  for (uint32_t i = 0; i < 100; i++) {
    const RandomCase drawn = random_case(step.info(), Pass::forward, 1, i, given, Values::tiny);
    CHECK(drawn.problem.Nq == 77);
    CHECK(drawn.problem.Nk == 77);
    CHECK(drawn.problem.D == 50);
    CHECK(drawn.problem.causal);
    CHECK(drawn.values == Values::tiny);
    scales.insert(drawn.problem.scale);
    different += random_case(step.info(), Pass::forward, 2, i, given, {}).problem.seed != drawn.problem.seed;
  }
  CHECK(scales.size() > 3);
  CHECK(different == 100);
}

TEST_CASE("key heads alone draw query heads that are a multiple") {
  const RegisteredStep& step = *select_steps({"05/forward"}).front();
  for (const int kv_heads : {0, 1, 7, 2147483647}) {
    ProblemOptions given;
    given.kv_heads = kv_heads;
    if (kv_heads > 7) given.batch = 1;
    std::set<int> groups;
    for (uint32_t i = 0; i < 60; i++) {
      const Problem p = random_case(step.info(), Pass::forward, 1, i, given, {}).problem;
      CHECK(p.Hkv == kv_heads);
      if (kv_heads > 0) groups.insert(p.Hq / kv_heads);
    }
    CHECK(groups.size() == (kv_heads == 0 ? 0 : kv_heads > 7 ? 1 : 4));
  }
}

TEST_CASE("a failing case is cut down to the least that fails") {
  const RegisteredStep& step = *select_steps({"06/backward"}).front();
  Item item = item_of(step, {shape(DType::fp32, 6, 150, 128), Values::outliers}, Pass::backward);
  item.problem.B = 3, item.problem.Hkv = 2, item.problem.causal = true, item.problem.dropout = 0.5;
  item.problem.seed = 1234, item.problem.scale = 0.7;
  int asked = 0;
  const Item least = smallest_failing(item, [&](const Item& i) {
    asked++;
    CHECK(!why_unsupported(step, i.problem, i.pass));
    return i.problem.Nk >= 18 && i.problem.causal && i.values == Values::outliers;
  });
  CHECK(asked <= 120);
  CHECK(repeat_command(least, {}) ==
        "flashsteps check 06_recompute_backward/backward --pass backward --batch 1 --heads 1 --kv-heads 1 --seq 1 "
        "--seq-k 18 --head-dim 32 --dtype fp32 --causal --scale=1.4 --values outliers");
}

TEST_CASE("the command that is printed repeats the case to the last digit") {
  for (const char* prefix : {"01", "05/forward"}) {
    const RegisteredStep& step = *select_steps({prefix}).front();
    for (uint32_t number = 0; number < 12; number++) {
      const Item item = item_of(step, random_case(step.info(), Pass::forward, 9, number, {}, {}), Pass::forward);
      const std::string command = repeat_command(item, {0, true});
      INFO(command);
      const Ran ran = flashsteps(command.substr(command.find("check")) + " --no-observe --format json");
      REQUIRE(ran.code == 0);
      const auto rows = nlohmann::json::parse(ran.out);
      REQUIRE(rows.size() == 2);
      const Problem& p = item.problem;
      CHECK(rows[0]["batch"] == p.B);
      CHECK(rows[0]["seq_k"] == p.Nk);
      CHECK(rows[0]["scale"] == p.scale);
      CHECK(rows[0]["dropout"] == p.dropout);
      // The same inputs give the same error and allowance, to the last digit.
      const Outcome here = verify(cpu_device(), item.target, step, Pass::forward, Question(p, false, 0, item.values));
      for (const auto& row : rows) {
        const reference::Verdict& verdict = here.outputs.at(row["output"].get<std::string>());
        CHECK(row["error"] == verdict.error);
        CHECK(row["allowed"] == verdict.allowed);
      }
    }
  }
}

TEST_CASE("a forward pass is judged the same whether a backward pass is checked beside it or not") {
  for (const char* prefix : {"05/register", "07/split_q", "08/fp8"}) {
    const RegisteredStep& step = *select_steps({prefix}).front();
    Problem p;
    p.B = 1, p.Hq = p.Hkv = 1, p.Nq = 165, p.Nk = 11, p.D = 64, p.scale = default_scale(64);
    p.dtype = step.info().dtypes.front(), p.seed = 1819363593;
    const Target target = *target_for(step, DeviceKind::cpu, false);
    const auto judged = [&](bool with_gradient) {
      return verify(cpu_device(), target, step, Pass::forward, Question(p, with_gradient, 0, Values::outliers)).outputs;
    };
    const auto alone = judged(false), beside = judged(true);
    INFO(step.id);
    for (const char* output : {"O", "LSE"}) {
      CHECK(alone.at(output).pass);
      CHECK(beside.at(output).pass);
      CHECK(alone.at(output).allowed == beside.at(output).allowed);
      CHECK(alone.at(output).max_allowed == beside.at(output).max_allowed);
    }
  }
}

TEST_CASE("an infinity that meets a weight too small for a float may become NaN; at the usual scale it may not") {
  const RegisteredStep& step = *select_steps({"05/forward"}).front();
  static const RunPass forward = step.builds.at(Target::cpu).forward;
  Step spoiling = step.builds.at(Target::cpu);
  spoiling.forward = [](const Problem& p, const Tensors& t, Stream stream) {
    forward(p, t, stream);
    for (size_t i = 0; i < p.q_elements(); i++)
      if (std::isinf(static_cast<float*>(t.O)[i])) static_cast<float*>(t.O)[i] = NAN;
  };
  const RegisteredStep wrong{step.id, {{Target::cpu, spoiling}}};
  Problem p;
  p.B = 1, p.Hq = p.Hkv = 2, p.Nq = 40, p.Nk = 44, p.D = 64, p.causal = true, p.seed = 3;
  for (const double scale : {3.0, -3.0, default_scale(64)}) {
    p.scale = scale;
    const Question question(p, false, 0, Values::inf);
    REQUIRE(
        std::any_of(question.inputs().O.begin(), question.inputs().O.end(), [](double x) { return std::isinf(x); }));
    INFO(scale);
    CHECK(verify(cpu_device(), Target::cpu, step, Pass::forward, question).pass);
    CHECK(verify(cpu_device(), Target::cpu, wrong, Pass::forward, question).pass == (scale != default_scale(64)));
  }

  Step infinite = step.builds.at(Target::cpu);
  infinite.forward = [](const Problem& p, const Tensors& t, Stream stream) {
    forward(p, t, stream);
    for (size_t i = 0; i < p.q_elements(); i++)
      if (std::isnan(static_cast<float*>(t.O)[i])) static_cast<float*>(t.O)[i] = INFINITY;
  };
  p.scale = 3;  // no such leave the other way round
  const Question question(p, false, 0, Values::nan);
  CHECK(verify(cpu_device(), Target::cpu, step, Pass::forward, question).pass);
  CHECK(!verify(cpu_device(), Target::cpu, {step.id, {{Target::cpu, infinite}}}, Pass::forward, question).pass);
}

TEST_CASE("a fault of a step is found, however rare, and reported with its command") {
  // Right for all but one in some hundred cases: where a row of 33 or more keys is masked.
  static const Step& right = select_steps({"02/forward"}).front()->builds.at(Target::cpu);
  Step wrong = right;
  wrong.forward = [](const Problem& p, const Tensors& t, Stream stream) {
    right.forward(p, t, stream);
    if (p.causal && p.Nq > 2 && p.Nk > 32) static_cast<float*>(t.O)[p.D] += 0.001f;
  };
  const RegisteredStep step{"99_test/wrong", {{Target::cpu, wrong}}};
  const auto fails = [&](const Item& item) {
    return !verify(cpu_device(), item.target, step, item.pass, Question(item.problem, false, 0, item.values)).pass;
  };
  int failed = 0;
  Report report(Format::table, {});
  for (uint32_t i = 0; i < 60; i++) {
    const Item item = item_of(step, random_case(step.info(), Pass::forward, 4, i, {}, Values::normal), Pass::forward);
    const bool meant = item.problem.causal && item.problem.Nq > 2 && item.problem.Nk > 32 && item.problem.B > 0;
    CHECK(fails(item) == meant);
    if (!meant || failed++ > 0) continue;
    const Item least = smallest_failing(item, fails);
    CHECK(least.problem.Nk == 33);
    CHECK(least.problem.Nq == 3);
    CHECK(least.problem.D == 1);
  }
  CHECK(failed > 3);
}

TEST_CASE("some random cases of every kernel on the CPU device") {
  for (const RegisteredStep& step : all_steps())
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      if (!step.has(pass)) continue;
      for (uint32_t number = 0; number < 25; number++) {
        const Item item = item_of(step, random_case(step.info(), pass, 2, number, {}, {}), pass);
        INFO(repeat_command(item, {0, true}));
        const Outcome outcome =
            verify(cpu_device(), item.target, step, pass, Question(item.problem, true, 0, item.values));
        CHECK_MESSAGE(outcome.fault.empty(), outcome.fault);
        for (const auto& output : outcome.outputs)
          CHECK_MESSAGE(output.second.pass, output.first << ": " << output.second.reason);
      }
    }
}

TEST_CASE("--random and --values on the command line") {
  const std::string command = "check 02 05/forward --random 30 --seed 3 --device cpu --no-observe";
  const Ran table = flashsteps(command);
  CHECK(table.code == 0);
  const Ran json = flashsteps(command + " --format json");
  CHECK(json.code == 0);
  const auto rows = nlohmann::json::parse(json.out);
  CHECK(rows.size() == 30 * 2 + 30 * 3 + 30 * 2);
  CHECK(flashsteps(command + " --format json").out == json.out);
  CHECK(flashsteps(command + "1 --format json").out != json.out);
  CHECK(flashsteps("check 05 --device cpu --seq 40 --values nan").code == 0);
  CHECK(flashsteps("check 05 --device cpu --random 5 --values huge --head-dim 64 --no-observe").code == 0);
  expect_refused("check 02 --random 0", {"--random", "1 to 1000000"});
  expect_refused("check 02 --random -5", {"--random"});
  expect_refused("check 02 --random 1 --dtype fp16", {"fp16", "supported: fp32"});
  expect_refused("check 02 --values wild", {"--values", "normal, outliers, huge"});
}

TEST_SUITE_END();
