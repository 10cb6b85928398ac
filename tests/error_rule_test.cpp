// The error rule: passes what is right to rounding, and nothing else.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "harness/error.h"
#include "harness/round.h"
#include "random_inputs.h"
#include "reference_cpu/error_rule.h"

namespace flash::reference {
namespace {

using testing::random_inputs;
using testing::random_numbers;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Problem small_problem(DType dtype, int N = 96, int D = 32) {
  Problem problem;
  problem.B = 1;
  problem.Hq = 2;
  problem.Hkv = 2;
  problem.Nq = problem.Nk = N;
  problem.D = D;
  problem.scale = 1 / std::sqrt(double(D));
  problem.causal = true;
  problem.dtype = dtype;
  return problem;
}

// Inputs that the problem's dtype can hold.
Inputs inputs_for(const Problem& problem, uint64_t seed, double gain = 1) {
  Inputs inputs = random_inputs(problem, seed, gain);
  for (auto* tensor : {&inputs.Q, &inputs.K, &inputs.V, &inputs.dO}) {
    for (double& x : *tensor) x = rounded_to(problem.dtype, x);
  }
  return inputs;
}

// Attention as plain loops in Scalar, all sums from the last term to the first, outputs rounded to the dtype: correct,
// and as different from the oracle's code as can be. One key/value head for every query head, no dropout. `kStored`:
// with weights and dS rounded to the dtype, as tensor cores take them, those of O as exp(S − the row's maximum so far),
// and D made of the O that is stored.
struct Plain {
  std::vector<double> O, LSE, dQ, dK, dV;
};
template <class Scalar, bool kStored = false>
Plain plain_attention(const Problem& problem, const Inputs& inputs) {
  const int N = problem.Nq, M = problem.Nk, D = problem.D;
  Plain results;
  for (size_t h = 0; h < problem.query_heads(); ++h) {
    const auto Q = [&](int i, int e) { return Scalar(inputs.Q[(h * N + i) * D + e]); };
    const auto K = [&](int j, int e) { return Scalar(inputs.K[(h * M + j) * D + e]); };
    const auto V = [&](int j, int e) { return Scalar(inputs.V[(h * M + j) * D + e]); };
    const auto dO = [&](int i, int e) { return Scalar(inputs.dO[(h * N + i) * D + e]); };
    std::vector<Scalar> dQ(N * D), dK(M * D), dV(M * D);
    for (int i = 0; i < N; ++i) {
      const int seen = problem.causal ? std::max(0, i + 1 + M - N) : M;
      std::vector<Scalar> P(seen), dP(seen), O(D);
      Scalar m = -std::numeric_limits<Scalar>::infinity(), l = 0, delta = 0;
      for (int j = seen - 1; j >= 0; --j) {
        for (int e = D - 1; e >= 0; --e) P[j] += Q(i, e) * K(j, e), dP[j] += dO(i, e) * V(j, e);
        P[j] *= Scalar(problem.scale);
        m = std::max(m, P[j]);
      }
      const auto stored = [&](Scalar x) { return kStored ? Scalar(rounded_to(problem.dtype, double(x))) : x; };
      Scalar running = -std::numeric_limits<Scalar>::infinity();
      for (int j = seen - 1; j >= 0; --j) {
        running = std::max(running, P[j]);
        const Scalar weight = stored(std::exp(P[j] - running)) * std::exp(running - m);
        for (int e = 0; e < D; ++e) O[e] += weight * V(j, e);  // divided by l afterwards, as fused kernels do
        l += P[j] = std::exp(P[j] - m);
      }
      for (int e = D - 1; e >= 0; --e) delta += dO(i, e) * stored(O[e] /= seen > 0 ? l : 1);
      for (int j = seen - 1; j >= 0; --j) {
        const Scalar dS = stored(P[j] / l * (dP[j] - delta)) * Scalar(problem.scale);
        for (int e = 0; e < D; ++e) {
          dQ[i * D + e] += dS * K(j, e);
          dK[j * D + e] += dS * Q(i, e);
          dV[j * D + e] += stored(P[j] / l) * dO(i, e);
        }
      }
      for (const Scalar x : O) results.O.push_back(rounded_to(problem.dtype, x));
      results.LSE.push_back(double(m + std::log(l)));
    }
    for (const Scalar x : dQ) results.dQ.push_back(rounded_to(problem.dtype, x));
    for (const Scalar x : dK) results.dK.push_back(rounded_to(problem.dtype, x));
    for (const Scalar x : dV) results.dV.push_back(rounded_to(problem.dtype, x));
  }
  return results;
}

void check_all_pass(const Oracle& oracle, const Plain& results) {
  for (const Verdict& verdict : {oracle.judge_O(results.O), oracle.judge_LSE(results.LSE), oracle.judge_dQ(results.dQ),
                                 oracle.judge_dK(results.dK), oracle.judge_dV(results.dV)}) {
    INFO(verdict.reason);
    CHECK(verdict.pass);
    CHECK(verdict.error <= verdict.allowed);
    CHECK(verdict.max_error <= verdict.max_allowed);
  }
}

// An oracle and a baseline of a million normal elements with errors of about 10⁻³.
struct Million {
  Output<double> oracle;
  Output<float> baseline;
  std::vector<double> x;
  Million() {
    oracle.values = random_numbers(1 << 20, 1);
    for (const double ref : oracle.values) {
      baseline.values.push_back(float(rounded_to(DType::fp16, ref * 1.0003)));
      x.push_back(rounded_to(DType::fp16, ref * 0.9997));
    }
    oracle.noise_norm = 1024;
    oracle.noise_max = 5;
  }
  Verdict verdict() const { return judge(x, oracle, baseline, DType::fp16); }
};

TEST_SUITE_BEGIN("error_rule");

TEST_CASE("correct results in another order of summation pass") {
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
    for (const int N : {1, 2, 3, 17, 33, 96, 129}) {
      CAPTURE(N);
      CAPTURE(name_of(dtype));
      const Problem problem = small_problem(dtype, N);
      const Inputs inputs = inputs_for(problem, 100 + N);
      check_all_pass(Oracle(problem, inputs), plain_attention<float>(problem, inputs));
    }
  }
  const Problem problem = small_problem(DType::fp64);
  const Inputs inputs = inputs_for(problem, 3);
  check_all_pass(Oracle(problem, inputs), plain_attention<double>(problem, inputs));
}

TEST_CASE("a backward pass on tensor cores, made of the O that was stored, passes in small cases too") {
  for (const DType dtype : {DType::fp16, DType::bf16})
    for (uint64_t seed = 0; seed < 200; seed++) {
      CAPTURE(name_of(dtype));
      CAPTURE(seed);
      Problem problem = small_problem(dtype, 5, 128);  // three rows see a key or two: few errors, and none averages out
      problem.Hq = problem.Hkv = 1;
      problem.Nk = 2;
      const Inputs inputs = inputs_for(problem, seed);
      const Oracle oracle(problem, inputs);
      const Plain results = plain_attention<float, true>(problem, inputs);
      for (const Verdict& verdict : {oracle.judge_dQ(results.dQ), oracle.judge_dK(results.dK)}) {
        INFO(verdict.reason);
        CHECK(verdict.pass);
      }
    }
}

TEST_CASE("a baseline that was lucky is not the measure") {
  // One value is much larger than the others: all of O hangs on how its weight happens to be rounded.
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    CAPTURE(name_of(dtype));
    const double ulp = dtype == DType::fp16 ? 0x1p-10 : 0x1p-7;
    for (uint64_t seed = 0; seed < 500; ++seed) {
      CAPTURE(seed);
      Problem problem = small_problem(dtype, 1, 4);
      problem.Hq = problem.Hkv = 1, problem.Nk = 6;
      Inputs inputs = inputs_for(problem, seed, 2);
      for (int e = 0; e < 4; ++e) inputs.V[e] *= 64;
      const Oracle oracle(problem, inputs);
      Plain results = plain_attention<float, true>(problem, inputs);
      for (const Verdict& verdict : {oracle.judge_O(results.O), oracle.judge_dV(results.dV)}) {
        INFO(verdict.reason);
        CHECK(verdict.pass);
      }
      // One rounding of a weight and one of the result are an ulp at most, and twice that is allowed.
      for (double& x : results.dV) x *= 1 + 4 * ulp;
      CHECK(!oracle.judge_dV(results.dV).pass);
    }
  }
}

TEST_CASE("where roundings are many, further baselines allow no more") {
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
    CAPTURE(name_of(dtype));
    const Problem problem = small_problem(dtype);
    const Inputs inputs = inputs_for(problem, 31);
    const Oracle oracle(problem, inputs);
    Plain results = plain_attention<float>(problem, inputs);
    const Verdict right = oracle.judge_dV(results.dV);
    for (double& x : results.dV) x *= 1.1;
    const Verdict wrong = oracle.judge_dV(results.dV);  // judged by all
    CHECK(right.pass);
    CHECK(!wrong.pass);
    CHECK(wrong.allowed >= right.allowed);
    CHECK(wrong.allowed < 1.2 * right.allowed);
    CHECK(wrong.max_allowed < 2 * right.max_allowed);
  }
}

TEST_CASE("other draws of the baseline's rounding are as far from the truth as the first, and no farther") {
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16}) {
    CAPTURE(name_of(dtype));
    Problem problem = small_problem(dtype);
    problem.Hkv = 1, problem.Nk = 70, problem.dropout = 0.25, problem.seed = 3;
    const Inputs inputs = inputs_for(problem, 32);
    const Results<double> truth = attention<double>(problem, inputs);
    const auto distance = [](const Output<float>& x, const Output<double>& ref) {
      double sum = 0;
      for (size_t i = 0; i < ref.values.size(); ++i)
        if (std::isfinite(ref.values[i])) sum += std::pow(double(x.values[i]) - ref.values[i], 2);
      return std::sqrt(sum);
    };
    const Results<float> first = attention<float>(problem, inputs, {}, dtype);
    for (const double grid : {1.2, 1.5, 1.9}) {
      CAPTURE(grid);
      const Results<float> other = attention<float>(problem, inputs, {}, dtype, 0, grid);
      for (auto output :
           {&Results<float>::O, &Results<float>::LSE, &Results<float>::dQ, &Results<float>::dK, &Results<float>::dV})
        CHECK((other.*output).values != (first.*output).values);
      CHECK(distance(other.O, truth.O) == doctest::Approx(distance(first.O, truth.O)).epsilon(0.25));
      CHECK(distance(other.dQ, truth.dQ) == doctest::Approx(distance(first.dQ, truth.dQ)).epsilon(0.25));
      CHECK(distance(other.dK, truth.dK) == doctest::Approx(distance(first.dK, truth.dK)).epsilon(0.25));
      CHECK(distance(other.dV, truth.dV) == doctest::Approx(distance(first.dV, truth.dV)).epsilon(0.25));
      CHECK(distance(other.LSE, truth.LSE) < 2 * distance(first.LSE, truth.LSE));
    }
  }
}

TEST_CASE("fp64 is not judged as leniently as fp32") {
  const Problem problem = small_problem(DType::fp64);
  const Inputs inputs = inputs_for(problem, 3);
  const Plain single = plain_attention<float>(problem, inputs);
  const Oracle oracle(problem, inputs);
  CHECK(!oracle.judge_O(single.O).pass);
  CHECK(!oracle.judge_dK(single.dK).pass);
}

TEST_CASE("empty rows must be exactly empty") {
  Problem problem = small_problem(DType::fp32, 40);
  problem.Nk = 30;
  const Inputs inputs = inputs_for(problem, 4);
  const Oracle oracle(problem, inputs);
  Plain results = plain_attention<float>(problem, inputs);
  check_all_pass(oracle, results);
  CHECK(results.LSE[3] == -kInfinity);
  results.LSE[3] = -1e30;  // what a large finite number instead of −∞ gives
  CHECK(!oracle.judge_LSE(results.LSE).pass);
  results.LSE[3] = kInfinity;
  CHECK(!oracle.judge_LSE(results.LSE).pass);
  results.LSE[3] = kNaN;
  CHECK(!oracle.judge_LSE(results.LSE).pass);
}

TEST_CASE("gradients that are zero but for rounding pass, and must be that small") {
  // One key: dP = D whatever the inputs, so dQ = dK = 0 and dV = dO.
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    const Problem problem = small_problem(dtype, 1, 16);
    Inputs inputs = inputs_for(problem, 5, 3);
    std::fill(inputs.dO.begin(), inputs.dO.end(), 1);
    const Oracle oracle(problem, inputs);
    Plain results = plain_attention<float>(problem, inputs);
    check_all_pass(oracle, results);
    for (double& x : results.dQ) x = 1e-7;
    check_all_pass(oracle, results);
    results.dQ[5] = 1e-4;
    CHECK(!oracle.judge_dQ(results.dQ).pass);
  }
}

TEST_CASE("one NaN, or nothing but NaN, fails") {
  const Problem problem = small_problem(DType::bf16);
  const Inputs inputs = inputs_for(problem, 6);
  const Oracle oracle(problem, inputs);
  Plain results = plain_attention<float>(problem, inputs);
  results.O[777] = kNaN;
  Verdict verdict = oracle.judge_O(results.O);
  CHECK(!verdict.pass);
  CHECK(verdict.reason.find("O[b 0, head 0, row 24, column 9] is nan") != std::string::npos);
  CHECK(!oracle.judge_O(std::vector<double>(results.O.size(), kNaN)).pass);
  CHECK(!oracle.judge_dV(std::vector<double>(results.dV.size(), kNaN)).pass);
  CHECK(!oracle.judge_LSE(std::vector<double>(results.LSE.size(), kInfinity)).pass);
  CHECK(!oracle.judge_O(std::vector<double>(results.O.size(), 0)).pass);
}

TEST_CASE("NaN and infinities must stand where the oracle has them") {
  Output<double> oracle{{1, kNaN, kInfinity, -kInfinity, 2}, 1, 1};
  const Output<float> baseline{{1, 0, 0, 0, 2}, 0, 0};
  const auto passes = [&](std::vector<double> x) { return judge(x, oracle, baseline, DType::fp32).pass; };
  CHECK(passes({1, kNaN, kInfinity, -kInfinity, 2}));
  CHECK(!passes({1, kNaN, -kInfinity, kInfinity, 2}));
  CHECK(!passes({1, kInfinity, kInfinity, -kInfinity, 2}));
  CHECK(!passes({1, kNaN, kNaN, -kInfinity, 2}));
  CHECK(!passes({1, 0, kInfinity, -kInfinity, 2}));
  CHECK(!passes({1, kNaN, 3e38, -kInfinity, 2}));
  CHECK(!passes({kNaN, 1, kInfinity, -kInfinity, 2}));
}

TEST_CASE("in gradients NaN may stand for an infinity, and where it spreads, elsewhere too, but never be hidden") {
  const Output<double> oracle{{1, kNaN, kInfinity, 2}, 1, 1};
  const Output<float> baseline{{1, 0, 0, 2}, 0, 0};
  const auto passes = [&](std::vector<double> x, NonFinite rule) {
    return judge(x, oracle, baseline, DType::fp32, {}, rule).pass;
  };
  CHECK(passes({1, kInfinity, kNaN, 2}, NonFinite::alike));
  CHECK(!passes({1, kInfinity, kNaN, 2}, NonFinite::same));
  CHECK(!passes({kNaN, kNaN, kInfinity, 2}, NonFinite::alike));
  CHECK(passes({kNaN, kNaN, kInfinity, 2}, NonFinite::spreads));
  for (const NonFinite rule : {NonFinite::same, NonFinite::alike, NonFinite::spreads}) {
    CHECK(passes({1, kNaN, kInfinity, 2}, rule));
    CHECK(!passes({1, 0, kInfinity, 2}, rule));
    CHECK(!passes({1, kNaN, 3e38, 2}, rule));
    CHECK(!passes({1, kNaN, kInfinity, 2.1}, rule));
  }
}

TEST_CASE("scores so large that P has no accuracy do not make a wrong gradient right") {
  // Scores of some 10⁶, where exp(S − LSE) with an fp32 LSE is off by a factor.
  Problem problem = small_problem(DType::fp32, 40, 64);
  problem.scale = 1e5;
  const Inputs inputs = inputs_for(problem, 21);
  const Oracle oracle(problem, inputs);
  const Results<double> truth = attention<double>(problem, inputs);
  CHECK(truth.dV.beyond_claim);
  CHECK(oracle.judge_dV(truth.dV.values).pass);
  std::vector<double> off = truth.dV.values;
  for (double& x : off) x *= 1.15;
  const Verdict verdict = oracle.judge_dV(off);
  CHECK(!verdict.pass);
  CHECK(verdict.allowed < 0.04);
  CHECK(verdict.reason.find("no accuracy in fp32") != std::string::npos);
  for (const double wrong : {kNaN, kInfinity}) {
    off[3] = wrong;
    CHECK(oracle.judge_dV(off).reason.find("no accuracy in fp32") != std::string::npos);
  }

  problem.scale = 1;
  CHECK(Oracle(problem, inputs).judge_dV(off).reason.find("no accuracy in fp32") == std::string::npos);
  CHECK(!attention<double>(problem, inputs).dV.beyond_claim);
}

TEST_CASE("numbers too small for their squares are compared, too") {
  Output<long double> oracle{{1e-2000L, -3e-2000L}, 0, 0};
  const Output<double> baseline{{0, 0}, 0, 0};
  CHECK(judge({0, 0}, oracle, baseline, DType::fp64).pass);  // as far off as the baseline
  CHECK(!judge({0, 1e-300}, oracle, baseline, DType::fp64).pass);
}

TEST_CASE("what the type cannot hold is infinite; a baseline that overflows gives no licence") {
  const Output<double> oracle{{70000, 3}, 1, 1};
  const Output<float> baseline{{std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}, 0, 0};
  CHECK(judge({kInfinity, 3}, oracle, baseline, DType::fp16).pass);
  const Verdict lost = judge({kNaN, 3}, oracle, baseline, DType::fp16);
  CHECK(!lost.pass);
  CHECK(lost.reason.find("the oracle has 70000, which fp16 cannot hold") != std::string::npos);
  CHECK(judge({kNaN, 3}, oracle, baseline, DType::fp32).reason.find("cannot hold") == std::string::npos);
  CHECK(!judge({-kInfinity, 3}, oracle, baseline, DType::fp16).pass);
  CHECK(!judge({kInfinity, 3}, oracle, baseline, DType::fp32).pass);
  CHECK(!judge({70000, kNaN}, oracle, baseline, DType::fp32).pass);
  CHECK(!judge({70000, 3.1}, oracle, baseline, DType::fp32).pass);
  CHECK(judge({70000, 3}, oracle, baseline, DType::fp32).pass);
}

TEST_CASE("one wrong element in a million fails") {
  Million million;
  CHECK(million.verdict().pass);
  const size_t place = 765432;
  const double right = million.x[place];
  million.x[place] += 0.05;
  const Verdict verdict = million.verdict();
  CHECK(!verdict.pass);
  CHECK(verdict.error <= verdict.allowed);  // it takes the largest error to see it
  CHECK(verdict.reason.find("element 765432") != std::string::npos);
  million.x[place] = kNaN;
  CHECK(!million.verdict().pass);
  million.x[place] = right;
  CHECK(million.verdict().pass);
}

TEST_CASE("a small error everywhere fails too") {
  Million million;
  for (double& x : million.x) x += 0.0015;
  const Verdict verdict = million.verdict();
  CHECK(!verdict.pass);
  CHECK(verdict.error > verdict.allowed);
  CHECK(verdict.max_error <= verdict.max_allowed);  // it takes the norm to see it
}

TEST_CASE("e4m3: one lucky baseline is not the measure") {
  // One query and one key of equal numbers. With the first scale they are 448, exactly; with the others they are not.
  Problem problem;
  problem.D = 64, problem.scale = default_scale(64), problem.dtype = DType::e4m3;
  Inputs inputs;
  inputs.Q.assign(64, 1.5), inputs.K.assign(64, 0.75), inputs.V.assign(64, 1.0);
  CHECK(std::fabs(rounded_to_e4m3(inputs, 64, 0).Q[0] - 1.5) < 1e-15);
  for (int i = 2; i < kBaselines; i += 2) {
    const double rounded = rounded_to_e4m3(inputs, 64, i).Q[5];
    CHECK(std::fabs(rounded - 1.5) <= 1.5 / 16);
    CHECK(std::fabs(rounded - 1.5) > 1e-6);
  }
  const Oracle oracle(problem, inputs);
  const Verdict verdict = oracle.judge_LSE(oracle.LSE());
  CHECK(verdict.pass);
  CHECK(verdict.max_allowed > 0.1);  // the score is 9, two roundings of up to 1/16 of it and twice that
  CHECK(verdict.max_allowed < 2 * 9 * (17.0 / 16 * 17 / 16 - 1));
  CHECK(!oracle.judge_LSE({9.0 * 17 / 16 * 17 / 16 * 17 / 16}).pass);

  // Odd ones are rotated: rows keep their lengths and their dot products, to what rounding leaves of them.
  Inputs normal = inputs_for(problem, 5);
  normal.dO.clear();
  const Inputs turned = rounded_to_e4m3(normal, 64, 3);
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  CHECK(dot(turned.Q, turned.Q) == doctest::Approx(dot(normal.Q, normal.Q)).epsilon(0.03));
  CHECK(std::fabs(dot(turned.Q, turned.K) - dot(normal.Q, normal.K)) < 0.03 * 64);
  CHECK(std::fabs(turned.Q[0] - normal.Q[0]) > 0.1 * std::fabs(normal.Q[0]));
  CHECK(std::fabs(turned.V[0] - normal.V[0]) <= std::fabs(normal.V[0]) / 16);
  Inputs outlier = normal;
  outlier.Q[7] = 1000;
  double largest = 0;
  for (const double x : rounded_to_e4m3(outlier, 64, 3).Q) largest = std::max(largest, std::fabs(x));
  CHECK(largest < 150);  // 1000 / 8, and the rest

  Inputs odd;
  odd.Q = {NAN, INFINITY, -448, 1, 0}, odd.K = {0, 0, 0}, odd.V = {1e-300};
  const Inputs rounded = rounded_to_e4m3(odd, 5, 0);
  CHECK(std::isnan(rounded.Q[0]));
  CHECK(rounded.Q[1] == INFINITY);
  CHECK(rounded.Q[2] == doctest::Approx(-448));
  CHECK(rounded.Q[3] == doctest::Approx(1));
  CHECK(rounded.K == odd.K);
  CHECK(rounded.V[0] == doctest::Approx(1e-300));
}

TEST_CASE("an unrelated array fails in every precision") {
  // Correlation 0.1 with the truth, the right size.
  for (const DType dtype : {DType::fp32, DType::fp16, DType::bf16, DType::e4m3}) {
    CAPTURE(name_of(dtype));
    const Problem problem = small_problem(dtype, 128);
    const Inputs inputs = inputs_for(problem, 7);
    const Oracle oracle(problem, inputs);
    const Inputs others = inputs_for(problem, 8);
    const Results<double> truth = attention<double>(problem, inputs), unrelated = attention<double>(problem, others);
    const auto mixed = [](const Output<double>& a, const Output<double>& b) {
      std::vector<double> x;
      for (size_t i = 0; i < a.values.size(); ++i) x.push_back(0.1 * a.values[i] + 0.995 * b.values[i]);
      return x;
    };
    CHECK(oracle.judge_dQ(truth.dQ.values).pass);
    CHECK(!oracle.judge_O(mixed(truth.O, unrelated.O)).pass);
    CHECK(!oracle.judge_LSE(mixed(truth.LSE, unrelated.LSE)).pass);
    CHECK(!oracle.judge_dQ(mixed(truth.dQ, unrelated.dQ)).pass);
    CHECK(!oracle.judge_dK(mixed(truth.dK, unrelated.dK)).pass);
    CHECK(!oracle.judge_dV(mixed(truth.dV, unrelated.dV)).pass);
  }
}

TEST_CASE("the allowance grows with the storage's coarseness, and is never loose") {
  struct Expectation {
    DType dtype;
    double low, high;
  };
  for (const Expectation& expected : {Expectation{DType::fp32, 1e-8, 3e-6}, Expectation{DType::fp16, 1e-4, 3e-3},
                                      Expectation{DType::bf16, 1e-3, 2e-2}, Expectation{DType::e4m3, 1e-2, 0.2}}) {
    CAPTURE(name_of(expected.dtype));
    const Problem problem = small_problem(expected.dtype, 128, 64);
    const Inputs inputs = inputs_for(problem, 9);
    const Oracle oracle(problem, inputs);
    const Verdict verdict = oracle.judge_O(oracle.O());
    CHECK(verdict.pass);
    CHECK(verdict.allowed > expected.low);
    CHECK(verdict.allowed < expected.high);
  }
}

TEST_CASE("a wrong size fails") {
  const Problem problem = small_problem(DType::fp32, 8);
  const Inputs inputs = inputs_for(problem, 10);
  const Oracle oracle(problem, inputs);
  std::vector<double> O = oracle.O();
  CHECK(oracle.judge_O(O).pass);
  O.pop_back();
  CHECK(!oracle.judge_O(O).pass);
  CHECK(!oracle.judge_O({}).pass);
  CHECK(!judge({1}, Output<double>{{1, 2}, 1, 1}, Output<float>{{1, 2}, 0, 0}, DType::fp32).pass);
}

TEST_CASE("nothing to compare passes") {
  Problem problem = small_problem(DType::fp32, 8);
  problem.Nq = 0;
  const Oracle oracle(problem, inputs_for(problem, 11));
  CHECK(oracle.judge_O({}).pass);
  CHECK(oracle.judge_LSE({}).pass);
  const std::vector<double> zeros(problem.kv_elements());
  CHECK(oracle.judge_dK(zeros).pass);
  CHECK(!oracle.judge_dV(std::vector<double>(zeros.size(), 1)).pass);
}

TEST_CASE("only selected rows are looked at, and named by their place in the whole") {
  const Problem problem = small_problem(DType::fp32, 64);
  const Inputs inputs = inputs_for(problem, 12);
  const Oracle oracle(problem, inputs, {.everything = false, .query_rows = {2, 100}, .key_rows = {70}});
  Plain results = plain_attention<float>(problem, inputs);
  check_all_pass(oracle, results);
  results.dK[3] = kNaN;
  results.O[3] = kNaN;
  check_all_pass(oracle, results);
  results.O[100 * 32 + 7] += 1;
  const Verdict verdict = oracle.judge_O(results.O);
  CHECK(!verdict.pass);
  CHECK(verdict.reason.find("O[b 0, head 1, row 36, column 7]") != std::string::npos);
  results.LSE[100] += 1;
  CHECK(oracle.judge_LSE(results.LSE).reason.find("LSE[b 0, head 1, row 36]") != std::string::npos);
  results.dK[70 * 32] = kNaN;
  CHECK(!oracle.judge_dK(results.dK).pass);
  CHECK_THROWS_AS(oracle.O(), Error);
}

TEST_CASE("gradients cannot be judged without dO") {
  const Problem problem = small_problem(DType::fp32, 8);
  Inputs inputs = inputs_for(problem, 13);
  inputs.dO.clear();
  const Oracle oracle(problem, inputs);
  CHECK(oracle.judge_O(oracle.O()).pass);
  CHECK(oracle.judge_LSE(oracle.LSE()).pass);
  CHECK_THROWS_AS(oracle.judge_dQ(std::vector<double>(problem.q_elements())), Error);
}

TEST_SUITE_END();

}  // namespace
}  // namespace flash::reference
