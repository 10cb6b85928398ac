// The oracle against values worked by hand, another implementation, finite differences, and its own definitions.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "golden.h"
#include "harness/error.h"
#include "harness/round.h"
#include "random_inputs.h"
#include "reference_cpu/attention.h"
#include "reference_cpu/dropout.h"

namespace flash::reference {
namespace {

using testing::random_inputs;
using testing::random_numbers;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A problem of one head.
Problem one_head(int Nq, int Nk, int D, double scale = 1, bool causal = false) {
  Problem problem;
  problem.Nq = Nq;
  problem.Nk = Nk;
  problem.D = D;
  problem.scale = scale;
  problem.causal = causal;
  return problem;
}

// A problem with everything in it: batches, grouped heads, unequal lengths, a mask.
Problem full_problem(double dropout = 0) {
  Problem problem = one_head(13, 10, 8, 0.4, true);
  problem.B = 2;
  problem.Hq = 4;
  problem.Hkv = 2;
  problem.dropout = dropout;
  problem.seed = 99;
  return problem;
}

// The largest difference of two arrays; NaN if a NaN is in either, ∞ if the sizes differ.
double difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return kInfinity;
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double d = a[i] == b[i] ? 0 : std::abs(a[i] - b[i]);  // −∞ and −∞ are alike
    largest = d <= largest ? largest : d;
  }
  return largest;
}

double norm(const std::vector<double>& a) { return std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0)); }

bool all_are(double value, const std::vector<double>& a) {
  return std::all_of(a.begin(), a.end(), [value](double x) { return x == value; });
}

const std::vector<double>& tensor_named(const std::string& name, const Results<double>& results) {
  if (name == "O") return results.O.values;
  if (name == "LSE") return results.LSE.values;
  if (name == "dQ") return results.dQ.values;
  if (name == "dK") return results.dK.values;
  REQUIRE(name == "dV");
  return results.dV.values;
}

// Two results, bit by bit but for the sign of NaN.
template <class Scalar>
void check_same(const Output<Scalar>& a, const Output<Scalar>& b) {
  CHECK(a.values == b.values);
  CHECK(a.noise_norm == b.noise_norm);
  CHECK(a.noise_max == b.noise_max);
}
template <class Scalar>
void check_same(const Results<Scalar>& a, const Results<Scalar>& b) {
  check_same(a.O, b.O);
  check_same(a.LSE, b.LSE);
  check_same(a.dQ, b.dQ);
  check_same(a.dK, b.dK);
  check_same(a.dV, b.dV);
}

TEST_SUITE_BEGIN("reference");

// ---------------------------------------------------------------------------------------------------------------------
// By hand and by others

TEST_CASE("two keys by hand, forward and backward") {
  // S = (log 3, 0), so P = (3/4, 1/4). dP = (1, 2), D = 5/4, dS = (−3/16, 3/16).
  const Inputs inputs{.Q = {1, 0}, .K = {std::log(3.0), 5, 0, 7}, .V = {1, 10, 2, 20}, .dO = {1, 0}};
  const auto results = attention<double>(one_head(1, 2, 2), inputs);
  CHECK(difference(results.O.values, {1.25, 12.5}) < 1e-15);
  CHECK(difference(results.LSE.values, {std::log(4.0)}) < 1e-15);
  CHECK(difference(results.dQ.values, {-3.0 / 16 * std::log(3.0), -15.0 / 16 + 21.0 / 16}) < 1e-14);
  CHECK(difference(results.dK.values, {-3.0 / 16, 0, 3.0 / 16, 0}) < 1e-15);
  CHECK(difference(results.dV.values, {0.75, 0, 0.25, 0}) < 1e-15);
}

TEST_CASE("dropout by hand") {
  // P = 1/4 each. What is kept counts 1/(1 − p) = 10 times for p = 0.9, and 10/9 times for p = 0.1.
  for (const double p : {0.1, 0.9}) {
    CAPTURE(p);
    Problem problem = one_head(6, 4, 1, 0);
    problem.dropout = p;
    problem.seed = 3;
    const Inputs inputs{.Q = {1, 1, 1, 1, 1, 1}, .K = {1, 2, 3, 4}, .V = {1, 2, 4, 8}, .dO = {1, 1, 1, 1, 1, 1}};
    const auto results = attention<double>(problem, inputs);
    const DropoutMask mask(problem);
    for (int i = 0; i < 6; ++i) {
      double O = 0;
      for (int j = 0; j < 4; ++j) O += mask.keeps(0, i, j) ? 0.25 / (1 - p) * inputs.V[j] : 0;
      CHECK(results.O.values[i] == doctest::Approx(O).epsilon(1e-14));
      CHECK(results.LSE.values[i] == doctest::Approx(std::log(4.0)).epsilon(1e-15));
    }
  }
}

TEST_CASE("golden values of another implementation") {
  const auto cases = testing::read_golden(FLASHSTEPS_TEST_DATA "/golden.csv");
  CHECK(cases.size() == 11);
  for (const testing::GoldenCase& golden : cases) {
    CAPTURE(golden.name);
    const auto results = attention<double>(golden.problem, testing::golden_inputs(golden));
    for (const testing::GoldenValue& known : golden.values) {
      CAPTURE(known.tensor);
      CAPTURE(known.kind);
      CAPTURE(known.index);
      const std::vector<double>& tensor = tensor_named(known.tensor, results);
      const double value = testing::measure(known, tensor);
      if (std::isinf(known.value)) {
        CHECK(value == known.value);
      } else {
        CHECK(std::abs(value - known.value) <= 1e-11 * (1 + std::abs(known.value)));
      }
    }
  }
}

TEST_CASE("gradients are the slopes of the forward pass") {
  std::vector<Problem> problems = {full_problem(), full_problem(0.3), full_problem(0.9)};
  problems.push_back(one_head(3, 9, 4, -0.7, true));  // longer keys, negative scale
  problems.push_back(one_head(7, 5, 3, 0.5));
  for (const Problem& problem : problems) {
    CAPTURE(problem.dropout);
    CAPTURE(problem.Nk);
    Inputs inputs = random_inputs(problem, 5);
    const auto results = attention<double>(problem, inputs);

    // ⟨dO, O⟩ as a function of one input is the loss whose gradient the backward pass claims to be.
    const auto loss = [&] {
      const auto forward = attention<long double>(problem, {inputs.Q, inputs.K, inputs.V, {}}, {}, DType::fp64, 1);
      return std::inner_product(inputs.dO.begin(), inputs.dO.end(), forward.O.values.begin(), 0.0L);
    };
    const auto check_slopes = [&](std::vector<double>& input, const std::vector<double>& gradient) {
      const double h = 0x1p-18;
      for (size_t i = 0; i < input.size(); i += 1 + input.size() / 60) {
        const double x = input[i];
        input[i] = x + h;
        const long double above = loss();
        input[i] = x - h;
        const long double below = loss();
        input[i] = x;
        CHECK(std::abs(double((above - below) / (2 * h)) - gradient[i]) < 1e-9 * (1 + std::abs(gradient[i])));
      }
    };
    check_slopes(inputs.Q, results.dQ.values);
    check_slopes(inputs.K, results.dK.values);
    check_slopes(inputs.V, results.dV.values);
    CHECK(norm(results.dQ.values) > 0.1);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The definitions

TEST_CASE("causal is aligned bottom right") {
  // With scale 0, O is the mean of the visible values and LSE the logarithm of their number.
  const auto visible = [](int Nq, int Nk) {
    const Problem problem = one_head(Nq, Nk, 1, 0, true);
    std::vector<double> counts;
    for (const double LSE : attention<double>(problem, random_inputs(problem, 1)).LSE.values) {
      counts.push_back(std::round(std::exp(LSE)));
    }
    return counts;
  };
  CHECK(visible(3, 128) == std::vector<double>{126, 127, 128});
  CHECK(visible(5, 2) == std::vector<double>{0, 0, 0, 1, 2});
  CHECK(visible(4, 4) == std::vector<double>{1, 2, 3, 4});
  CHECK(visible(1, 1) == std::vector<double>{1});
  CHECK(visible(2, 0) == std::vector<double>{0, 0});
}

TEST_CASE("a row that sees no key: O = 0, LSE = −∞, no gradient from it and none to it") {
  const Problem problem = one_head(9, 4, 8, 3, true);  // the first five rows are empty
  Inputs inputs = random_inputs(problem, 2, 3);
  const auto results = attention<double>(problem, inputs);
  for (int i = 0; i < 5; ++i) {
    CHECK(results.LSE.values[i] == -kInfinity);
    for (int e = 0; e < 8; ++e) {
      CHECK(results.O.values[i * 8 + e] == 0);
      CHECK(results.dQ.values[i * 8 + e] == 0);
    }
  }
  std::fill(inputs.dO.begin(), inputs.dO.begin() + 5 * 8, 1e6);
  std::fill(inputs.Q.begin(), inputs.Q.begin() + 5 * 8, 1e6);
  const auto changed = attention<double>(problem, inputs);
  CHECK(changed.dK.values == results.dK.values);
  CHECK(changed.dV.values == results.dV.values);
  CHECK(std::isfinite(norm(results.dK.values)));
  CHECK(norm(results.dV.values) > 0);
}

TEST_CASE("no keys, no queries, no heads, no batch") {
  for (const bool causal : {false, true}) {
    Problem no_keys = one_head(3, 0, 4, 1, causal);
    const auto results = attention<double>(no_keys, random_inputs(no_keys, 1));
    CHECK(results.O.values == std::vector<double>(12, 0.0));
    CHECK(results.dQ.values == std::vector<double>(12, 0.0));
    CHECK(results.LSE.values == std::vector<double>(3, -kInfinity));
    CHECK(results.dK.values.empty());

    Problem no_queries = one_head(0, 3, 4, 1, causal);
    const auto nothing = attention<double>(no_queries, random_inputs(no_queries, 1));
    CHECK(nothing.O.values.empty());
    CHECK(nothing.LSE.values.empty());
    CHECK(nothing.dK.values == std::vector<double>(12, 0.0));
    CHECK(nothing.dV.values == std::vector<double>(12, 0.0));
  }
  Problem no_batch = one_head(3, 3, 4);
  no_batch.B = 0;
  CHECK(attention<double>(no_batch, {}).O.values.empty());
  Problem no_heads = one_head(3, 3, 4);
  no_heads.Hq = no_heads.Hkv = 0;
  CHECK(attention<double>(no_heads, {}).dK.values.empty());
}

TEST_CASE("scale may be any finite number") {
  Problem problem = one_head(6, 6, 4, 1, true);
  Inputs inputs = random_inputs(problem, 3);
  Inputs negated = inputs;
  for (double& q : negated.Q) q = -q;
  problem.scale = -1;
  const auto minus = attention<double>(problem, inputs);
  problem.scale = 1;
  const auto plus = attention<double>(problem, negated);
  CHECK(minus.O.values == plus.O.values);
  CHECK(minus.dK.values == plus.dK.values);
  CHECK(difference(minus.O.values, attention<double>(problem, inputs).O.values) > 0.1);

  problem.scale = 0;
  const auto mean = attention<double>(problem, inputs);
  double sum = 0;
  for (int i = 0; i < 6; ++i) {
    sum += inputs.V[i * 4];
    CHECK(mean.O.values[i * 4] == doctest::Approx(sum / (i + 1)).epsilon(1e-14));
  }
  CHECK(all_are(0, mean.dQ.values));
  CHECK(all_are(0, mean.dK.values));
}

TEST_CASE("a score far below anything still wins when it is the only one") {
  const Problem problem = one_head(1, 1, 128);
  const Inputs inputs{.Q = std::vector<double>(128, -64),
                      .K = std::vector<double>(128, 64),
                      .V = std::vector<double>(128, 1),
                      .dO = std::vector<double>(128, 1)};
  for (const DType stored : {DType::fp32, DType::fp16, DType::bf16, DType::e4m3}) {
    const auto results = attention<float>(problem, inputs, {}, stored);
    CHECK(results.O.values == std::vector<float>(128, 1));
    CHECK(results.LSE.values[0] == -524288);
    CHECK(results.dQ.values == std::vector<float>(128, 0));
    CHECK(results.dV.values == std::vector<float>(128, 1));
  }
}

TEST_CASE("very large equal inputs") {
  const Problem problem = one_head(1, 1, 64, 0.125);
  const std::vector<double> large(64, 133120);
  const auto results = attention<float>(problem, {large, large, large, {}}, {}, DType::bf16);
  CHECK(results.O.values == std::vector<float>(64, 133120));
  CHECK(results.dQ.values.empty());
}

TEST_CASE("grouped heads are the repeated heads, and their gradients add up") {
  const Problem grouped = full_problem(0.2);
  Problem repeated = grouped;
  repeated.Hkv = repeated.Hq;
  const Inputs inputs = random_inputs(grouped, 8);
  const size_t head = size_t(grouped.Nk) * grouped.D;
  const auto source = [&](size_t query_head) {  // batch · Hkv + h / 2
    return (query_head / 4 * 2 + query_head % 4 / 2) * head;
  };
  Inputs copies{inputs.Q, {}, {}, inputs.dO};
  for (size_t h = 0; h < grouped.query_heads(); ++h) {
    copies.K.insert(copies.K.end(), inputs.K.begin() + source(h), inputs.K.begin() + source(h) + head);
    copies.V.insert(copies.V.end(), inputs.V.begin() + source(h), inputs.V.begin() + source(h) + head);
  }
  const auto a = attention<double>(grouped, inputs), b = attention<double>(repeated, copies);
  CHECK(a.O.values == b.O.values);
  CHECK(a.LSE.values == b.LSE.values);
  CHECK(a.dQ.values == b.dQ.values);
  std::vector<double> dK(a.dK.values.size()), dV(a.dV.values.size());
  for (size_t h = 0; h < grouped.query_heads(); ++h) {
    for (size_t i = 0; i < head; ++i) {
      dK[source(h) + i] += b.dK.values[h * head + i];
      dV[source(h) + i] += b.dV.values[h * head + i];
    }
  }
  CHECK(difference(a.dK.values, dK) < 1e-14);
  CHECK(difference(a.dV.values, dV) < 1e-14);
}

TEST_CASE("moving all scores of a row, shuffling the keys, equal values: nothing changes") {
  const Problem problem = one_head(20, 33, 8, 0.5);
  const Inputs inputs = random_inputs(problem, 11);
  const auto results = attention<double>(problem, inputs);

  Inputs moved = inputs;  // adding a vector w to every key adds scale·q·w to all scores of a row
  for (size_t i = 0; i < moved.K.size(); ++i) moved.K[i] += double(i % 8) - 3;
  const auto after_move = attention<double>(problem, moved);
  CHECK(difference(after_move.O.values, results.O.values) < 1e-13);
  CHECK(difference(after_move.dQ.values, results.dQ.values) < 1e-12);  // rows of dS sum to 0
  CHECK(difference(after_move.LSE.values, results.LSE.values) > 0.1);

  Inputs shuffled = inputs;
  std::vector<double> dK(inputs.K.size());
  for (int j = 0; j < 33; ++j) {
    const int from = j * 10 % 33;
    std::copy_n(inputs.K.begin() + from * 8, 8, shuffled.K.begin() + j * 8);
    std::copy_n(inputs.V.begin() + from * 8, 8, shuffled.V.begin() + j * 8);
    std::copy_n(results.dK.values.begin() + from * 8, 8, dK.begin() + j * 8);
  }
  const auto after_shuffle = attention<double>(problem, shuffled);
  CHECK(difference(after_shuffle.O.values, results.O.values) < 1e-13);
  CHECK(difference(after_shuffle.LSE.values, results.LSE.values) < 1e-13);
  CHECK(difference(after_shuffle.dK.values, dK) < 1e-13);

  Inputs equal = inputs;  // all values alike: O is that value, and no score matters
  for (size_t i = 0; i < equal.V.size(); ++i) equal.V[i] = double(i % 8) + 1;
  const auto same = attention<double>(problem, equal);
  for (size_t i = 0; i < same.O.values.size(); ++i) CHECK(std::abs(same.O.values[i] - double(i % 8 + 1)) < 1e-13);
  CHECK(norm(same.dQ.values) < 1e-12);
}

TEST_CASE("dropout leaves the mean as it is, and LSE alone") {
  Problem problem = one_head(12, 16, 4, 0.5, true);
  const Inputs inputs = random_inputs(problem, 13);
  const auto exact = attention<double>(problem, inputs);
  for (const double p : {0.1, 0.9}) {
    CAPTURE(p);
    problem.dropout = p;
    std::vector<double> mean(exact.O.values.size());
    const int draws = 4000;
    for (int k = 0; k < draws; ++k) {
      problem.offset = uint32_t(k);
      const auto dropped = attention<double>(problem, {inputs.Q, inputs.K, inputs.V, {}}, {}, DType::fp64, 1);
      if (k == 0) CHECK(dropped.LSE.values == exact.LSE.values);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += dropped.O.values[i] / draws;
    }
    // One weight's standard deviation is √(p / (1 − p)) of its size, and |O| is about 2 at most.
    CHECK(difference(mean, exact.O.values) < 10 * std::sqrt(p / (1 - p) / draws));
  }
}

TEST_CASE("p = 0 is no dropout whatever the seed, and other seeds and offsets drop other weights") {
  Problem problem = one_head(8, 16, 4, 0.5);
  const Inputs inputs = random_inputs(problem, 14);
  const auto plain = attention<double>(problem, inputs);
  problem.seed = 12345;
  check_same(attention<double>(problem, inputs), plain);
  problem.dropout = 0.5;
  const auto dropped = attention<double>(problem, inputs);
  check_same(attention<double>(problem, inputs), dropped);
  Problem other = problem;
  other.seed = 12346;
  CHECK(difference(attention<double>(other, inputs).O.values, dropped.O.values) > 0.1);
  other = problem;
  other.offset = 1;
  CHECK(difference(attention<double>(other, inputs).dV.values, dropped.dV.values) > 0.1);
}

// ---------------------------------------------------------------------------------------------------------------------
// NaN and ∞

TEST_CASE("a NaN or ∞ at a key reaches the rows that see it and no other") {
  const Problem problem = one_head(70, 70, 4, 0.5, true);  // more than one block of rows
  const Inputs clean = random_inputs(problem, 15);
  const auto expected = attention<double>(problem, clean);
  const int key = 66;
  for (const double bad : {kNaN, kInfinity, -kInfinity}) {
    for (const bool in_V : {true, false}) {
      CAPTURE(bad);
      CAPTURE(in_V);
      Inputs inputs = clean;
      (in_V ? inputs.V : inputs.K)[key * 4 + 1] = bad;
      const auto results = attention<double>(problem, inputs);
      for (int i = 0; i < 70; ++i) {
        CAPTURE(i);
        for (int e = 0; e < 4; ++e) {
          const double O = results.O.values[i * 4 + e];
          const double dQ = results.dQ.values[i * 4 + e];
          if (i < key) {
            CHECK(std::abs(O - expected.O.values[i * 4 + e]) < 1e-14);
            CHECK(std::abs(dQ - expected.dQ.values[i * 4 + e]) < 1e-14);
          } else if (in_V) {
            const bool same = O == expected.O.values[i * 4 + e] || std::abs(O - expected.O.values[i * 4 + e]) < 1e-14;
            if (e != 1) CHECK(same);
            if (e == 1 && std::isnan(bad)) CHECK(std::isnan(O));
            if (e == 1 && std::isinf(bad)) CHECK(O == bad);
            CHECK(std::isnan(dQ));
          } else if (std::isnan(bad)) {
            CHECK(std::isnan(O));
            CHECK(std::isnan(results.LSE.values[i]));
          }
        }
      }
    }
  }
}

TEST_CASE("a NaN in a query or its dO reaches the keys that it sees and no other") {
  const Problem problem = one_head(70, 70, 4, 0.5, true);
  const Inputs clean = random_inputs(problem, 16);
  const auto expected = attention<double>(problem, clean);
  const int query = 20;
  for (const bool in_Q : {true, false}) {
    CAPTURE(in_Q);
    Inputs inputs = clean;
    (in_Q ? inputs.Q : inputs.dO)[query * 4 + 2] = kNaN;
    const auto results = attention<double>(problem, inputs);
    for (int j = 0; j < 70; ++j) {
      CAPTURE(j);
      for (int e = 0; e < 4; ++e) {
        const double dK = results.dK.values[j * 4 + e], dV = results.dV.values[j * 4 + e];
        CHECK(std::isnan(dK) == (j <= query));
        CHECK(std::isnan(dV) == (j <= query && (in_Q || e == 2)));
        if (j > query) CHECK(std::abs(dK - expected.dK.values[j * 4 + e]) < 1e-14);
        if (j > query) CHECK(std::abs(dV - expected.dV.values[j * 4 + e]) < 1e-14);
        CHECK(std::isnan(results.O.values[j * 4 + e]) == (in_Q && j == query));
      }
    }
  }
}

TEST_CASE("a dropped weight leaves its value out, even a NaN") {
  Problem problem = one_head(40, 6, 2, 0.5);
  problem.dropout = 0.5;
  Inputs inputs = random_inputs(problem, 17);
  inputs.V[3 * 2] = kNaN;
  const auto results = attention<double>(problem, inputs);
  const DropoutMask mask(problem);
  for (int i = 0; i < 40; ++i) CHECK(std::isnan(results.O.values[i * 2]) == mask.keeps(0, i, 3));
}

TEST_CASE("infinite scores are as IEEE says") {
  // Row 0 sees one finite score and −∞: the latter has no weight. Row 1 sees +∞: ∞ − ∞.
  const Inputs inputs{.Q = {-1, 1}, .K = {0, kInfinity}, .V = {3, 4}, .dO = {}};
  const auto results = attention<double>(one_head(2, 2, 1), inputs);
  CHECK(results.O.values[0] == 3);
  CHECK(results.LSE.values[0] == 0);
  CHECK(std::isnan(results.O.values[1]));
  CHECK(std::isnan(results.LSE.values[1]));
}

TEST_CASE("a row whose scores are all −∞ is a row that sees no key") {
  const Inputs inputs{.Q = {-1, 1}, .K = {kInfinity, kInfinity}, .V = {3, 4}, .dO = {1, 1}};
  Problem problem = one_head(2, 2, 1);
  problem.causal = true;
  const auto results = attention<double>(problem, inputs);
  CHECK(results.O.values[0] == 0);
  CHECK(results.LSE.values[0] == -kInfinity);
}

// ---------------------------------------------------------------------------------------------------------------------
// Which rows, how many threads, which precision

TEST_CASE("selected rows are the same rows as of everything") {
  for (const double dropout : {0.0, 0.4}) {
    Problem problem = full_problem(dropout);
    problem.Nq = 150;
    problem.Nk = 141;
    const Inputs inputs = random_inputs(problem, 18);
    const auto everything = attention<double>(problem, inputs);
    const Selection selection{
        .everything = false, .query_rows = {0, 1, 9, 77, 149, 150, 640, 1199}, .key_rows = {140, 141, 142, 200, 281}};
    const auto selected = attention<double>(problem, inputs, selection);
    REQUIRE(selected.O.values.size() == 8 * 8);
    REQUIRE(selected.dK.values.size() == 5 * 8);
    const auto rows = [](const std::vector<double>& whole, const std::vector<int64_t>& numbers, int width) {
      std::vector<double> picked;
      for (const int64_t row : numbers) {
        picked.insert(picked.end(), whole.begin() + row * width, whole.begin() + (row + 1) * width);
      }
      return picked;
    };
    CHECK(difference(selected.O.values, rows(everything.O.values, selection.query_rows, 8)) < 1e-14);
    CHECK(difference(selected.LSE.values, rows(everything.LSE.values, selection.query_rows, 1)) < 1e-14);
    CHECK(difference(selected.dQ.values, rows(everything.dQ.values, selection.query_rows, 8)) < 1e-14);
    CHECK(difference(selected.dK.values, rows(everything.dK.values, selection.key_rows, 8)) < 1e-13);
    CHECK(difference(selected.dV.values, rows(everything.dV.values, selection.key_rows, 8)) < 1e-13);
    CHECK(selected.dK.noise_norm > 0);
    CHECK(selected.dK.noise_norm < everything.dK.noise_norm);
  }
}

TEST_CASE("a sample is spread over the tensor and has its ends") {
  Problem problem = one_head(5000, 3000, 64);
  problem.B = 2;
  problem.Hq = 8;
  problem.Hkv = 4;
  const Selection drawn = sample(problem, 100, 2, 1);
  CHECK(!drawn.everything);
  CHECK(drawn.query_rows.size() == 100);
  CHECK(drawn.query_rows.front() == 0);
  CHECK(drawn.query_rows.back() == 2 * 8 * 5000 - 1);
  CHECK(drawn.key_rows.size() == 100);
  CHECK(drawn.key_rows.front() == 0);
  CHECK(drawn.key_rows.back() == 2 * 4 * 3000 - 1);
  std::set<int64_t> heads;
  for (const int64_t row : drawn.key_rows) heads.insert(row / 3000);
  CHECK(heads.size() == 2);
  for (const auto& rows : {drawn.query_rows, drawn.key_rows}) {
    CHECK(std::is_sorted(rows.begin(), rows.end(), std::less_equal<>()));
  }
  CHECK(sample(problem, 100, 2, 1).query_rows == drawn.query_rows);
  CHECK(sample(problem, 100, 2, 2).query_rows != drawn.query_rows);

  const Selection all = sample(one_head(3, 4, 8), 100, 2, 1);
  CHECK(all.query_rows == std::vector<int64_t>{0, 1, 2});
  CHECK(all.key_rows == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(sample(one_head(3, 0, 8), 100, 2, 1).key_rows.empty());
}

TEST_CASE("any number of threads computes the same bits") {
  Problem problem = full_problem(0.1);
  problem.Nq = problem.Nk = 200;
  const Inputs inputs = random_inputs(problem, 19);
  const auto one = attention<double>(problem, inputs, {}, DType::fp64, 1);
  for (const int threads : {2, 3, 16}) check_same(attention<double>(problem, inputs, {}, DType::fp64, threads), one);
  const auto single = attention<float>(problem, inputs, {}, DType::bf16, 1);
  check_same(attention<float>(problem, inputs, {}, DType::bf16, 5), single);
}

TEST_CASE("the precisions agree to their own") {
  Problem problem = full_problem(0.1);
  problem.Nq = problem.Nk = 100;
  const Inputs inputs = random_inputs(problem, 20);
  const auto exact = attention<long double>(problem, inputs);
  const auto error = [&](const auto& results) {  // relative, the worst of the five
    double worst = 0;
    const auto compare = [&](const auto& x, const Output<long double>& reference) {
      long double sum2 = 0, norm2 = 0;
      for (size_t i = 0; i < reference.values.size(); ++i) {
        const long double d = x.values[i] - reference.values[i];
        sum2 += d * d;
        norm2 += reference.values[i] * reference.values[i];
      }
      worst = std::max(worst, double(std::sqrt(sum2 / norm2)));
    };
    compare(results.O, exact.O);
    compare(results.LSE, exact.LSE);
    compare(results.dQ, exact.dQ);
    compare(results.dK, exact.dK);
    compare(results.dV, exact.dV);
    return worst;
  };
  // LSE has rows of −∞ only with Nq > Nk, so all is finite here.
  const double fp64 = error(attention<double>(problem, inputs));
  const double fp32 = error(attention<float>(problem, inputs, {}, DType::fp32));
  const double fp16 = error(attention<float>(problem, inputs, {}, DType::fp16));
  const double bf16 = error(attention<float>(problem, inputs, {}, DType::bf16));
  const double e4m3 = error(attention<float>(problem, inputs, {}, DType::e4m3));
  CHECK(fp64 > 0);
  CHECK(fp64 < 1e-15 * 3);
  CHECK(fp32 > 3e-8);
  CHECK(fp32 < 1e-6);
  CHECK(fp16 > 1e-4);
  CHECK(fp16 < 1e-3);
  CHECK(bf16 > 1e-3);
  CHECK(bf16 < 1e-2);
  CHECK(e4m3 > 1e-2);
  CHECK(e4m3 < 0.3);
}

TEST_CASE("the noise scale is the size of what rounding does") {
  // The float baseline's actual errors against the oracle's noise, in units of 2⁻²⁴: neither far below nor far above.
  Problem problem = one_head(120, 140, 64, 0.125, true);
  const Inputs inputs = random_inputs(problem, 21);
  const auto oracle = attention<double>(problem, inputs);
  const auto single = attention<float>(problem, inputs);
  const auto units = [](const Output<float>& x, const Output<double>& reference) {
    double sum2 = 0;
    for (size_t i = 0; i < x.values.size(); ++i) sum2 += std::pow(x.values[i] - reference.values[i], 2);
    return std::sqrt(sum2) / reference.noise_norm / 0x1p-24;
  };
  for (const double u : {units(single.O, oracle.O), units(single.LSE, oracle.LSE), units(single.dQ, oracle.dQ),
                         units(single.dK, oracle.dK), units(single.dV, oracle.dV)}) {
    CHECK(u > 0.05);
    CHECK(u < 4);
  }
}

TEST_CASE("rounding to the narrow types") {
  CHECK(rounded_to(DType::fp16, 2049) == 2048);  // ties to even
  CHECK(rounded_to(DType::fp16, 2051) == 2052);
  CHECK(rounded_to(DType::fp16, 2049.001) == 2050);
  CHECK(rounded_to(DType::fp16, 65519.99) == 65504);
  CHECK(rounded_to(DType::fp16, 65520) == kInfinity);
  CHECK(rounded_to(DType::fp16, -1e300) == -kInfinity);
  CHECK(rounded_to(DType::fp16, 0x1.8p-25) == 0x1p-24);  // the smallest subnormal
  CHECK(rounded_to(DType::fp16, 0x1p-25) == 0);
  CHECK(std::signbit(rounded_to(DType::fp16, -0x1p-26)));
  CHECK(rounded_to(DType::bf16, 1.00390625) == 1);
  CHECK(rounded_to(DType::bf16, 1.01171875) == 1.015625);
  CHECK(rounded_to(DType::bf16, 133120) == 133120);
  CHECK(rounded_to(DType::bf16, 3.4e38) == kInfinity);
  CHECK(rounded_to(DType::e4m3, 464) == 448);  // saturates
  CHECK(rounded_to(DType::e4m3, -kInfinity) == -448);
  CHECK(rounded_to(DType::e4m3, 17) == 16);
  CHECK(rounded_to(DType::e4m3, 19) == 20);
  CHECK(rounded_to(DType::e4m3, 0x1p-9) == 0x1p-9);
  CHECK(rounded_to(DType::e4m3, 0x1p-10) == 0);
  CHECK(rounded_to(DType::fp64, 0.1) == 0.1);
  CHECK(std::isnan(rounded_to(DType::bf16, kNaN)));
  for (const double x : random_numbers(20000, 22, 1.1e-3)) {
    CHECK(rounded_to(DType::fp32, x) == double(float(x)));
    CHECK(rounded_to(DType::fp32, x * 0x1p-130) == double(float(x * 0x1p-130)));
    CHECK(rounded_to(DType::fp32, x * 0x1p136) == double(float(x * 0x1p136)));
  }
}

TEST_CASE("arrays of a wrong size and rows that are not there are refused") {
  const Problem problem = one_head(3, 3, 4);
  Inputs inputs = random_inputs(problem, 1);
  CHECK_THROWS_AS(attention<double>(problem, inputs, {.everything = false, .query_rows = {3}, .key_rows = {}}), Error);
  CHECK_THROWS_AS(attention<double>(problem, inputs, {.everything = false, .query_rows = {1, 0}, .key_rows = {}}),
                  Error);
  inputs.V.pop_back();
  CHECK_THROWS_AS(attention<double>(problem, inputs), Error);
}

TEST_SUITE_END();

}  // namespace
}  // namespace flash::reference
