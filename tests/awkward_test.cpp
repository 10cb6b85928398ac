// Cases that broke other attention kernels, as every step must answer them, on the CPU device. tests/README.md says
// which of the known ones is tested where.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <tuple>

#include "cli/verify.h"
#include "harness/inputs.h"
#include "harness/registry.h"
#include "harness/round.h"
#include "harness/runner.h"
#include "reference_cpu/dropout.h"
#include "simt/executor.h"

TEST_SUITE_BEGIN("awkward");

namespace {
using namespace flash;

void every_step(const std::function<void(const RegisteredStep&, Pass, Target)>& act) {
  for (const RegisteredStep& step : all_steps())
    for (const Pass pass : {Pass::forward, Pass::backward})
      if (step.has(pass)) act(step, pass, *target_for(step, DeviceKind::cpu, false));
}

// A problem that the step supports, if it supports the shape at all.
Problem problem(const RegisteredStep& step, int B, int H, int Nq, int Nk, int D, bool causal = false) {
  Problem p;
  p.B = B, p.Hq = p.Hkv = H, p.Nq = Nq, p.Nk = Nk, p.D = D, p.causal = causal;
  p.scale = default_scale(D), p.dtype = step.info().dtypes.front();
  return p;
}

int smallest_head_dim(const RegisteredStep& step) {
  const auto& dims = step.info().head_dims;
  return dims.size() > 8 ? 32 : dims.front();
}

// Runs a pass on inputs of the test's own, rounded to the step's precision; O and LSE for a backward pass from the
// oracle.
HostTensors answer(const RegisteredStep& step, Target target, Pass pass, const Problem& p, HostTensors inputs) {
  for (auto* x : {&inputs.Q, &inputs.K, &inputs.V, &inputs.dO})
    for (double& v : *x) v = rounded_to(p.dtype, v);
  if (pass == Pass::backward && !forward_of(step)) {
    const reference::Oracle oracle(p, {inputs.Q, inputs.K, inputs.V, inputs.dO});
    inputs.O = oracle.O(), inputs.LSE = oracle.LSE();
  }
  return run_step(cpu_device(), target, step, pass, p, inputs).tensors;
}

double tolerance(DType type) {
  return type == DType::fp32 || type == DType::fp64 ? 1e-5 : type == DType::e4m3 ? 0.1 : 0.02;
}

}  // namespace

TEST_CASE("scale 0, or next to it, is the mean of the visible values, scale -1 the softmax of the negated scores") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (pass == Pass::backward) return;
    Problem p = problem(step, 1, 2, 20, 23, smallest_head_dim(step), true);
    INFO(step.id);
    const HostTensors inputs = random_tensors(p, 3);
    for (const double scale : {0.0, 1e-60, -1e-320}) {  // the last two are 0 as floats
      p.scale = scale;
      const HostTensors mean = answer(step, target, pass, p, inputs);
      for (int head = 0; head < 2; head++)
        for (int i : {0, 7, 19}) {
          const int seen = i + 1 + 3;
          double sum = 0;
          for (int j = 0; j < seen; j++) sum += inputs.V[size_t(head * p.Nk + j) * p.D + 5];
          CHECK(mean.O[size_t(head * p.Nq + i) * p.D + 5] == doctest::Approx(sum / seen).epsilon(tolerance(p.dtype)));
          CHECK(mean.LSE[size_t(head * p.Nq + i)] == doctest::Approx(std::log(seen)).epsilon(1e-4));
        }
    }
    p.scale = -1;
    HostTensors negated = inputs;
    for (double& q : negated.Q) q = -q;
    const HostTensors minus = answer(step, target, pass, p, inputs);
    p.scale = 1;
    const HostTensors plus = answer(step, target, pass, p, negated);
    CHECK(minus.O == plus.O);
    CHECK(minus.LSE == plus.LSE);
  });
}

TEST_CASE("large values whose scores fit fp32: one key gives V, whatever it is") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (pass == Pass::backward) return;
    for (const DType dtype : step.info().dtypes) {
      if (dtype == DType::e4m3) continue;
      const double large = dtype == DType::fp16 ? 60000 : 133120;
      for (int D : {64, 128}) {
        Problem p = problem(step, 1, 1, 1, 1, D);
        p.dtype = dtype, p.scale = 1;
        if (why_unsupported(step, p, pass)) continue;
        INFO(step.id << " " << name_of(dtype));
        HostTensors t;
        t.Q.assign(size_t(D), large), t.K = t.V = t.Q;
        const HostTensors made = answer(step, target, pass, p, t);
        CHECK(made.O == std::vector<double>(size_t(D), rounded_to(dtype, large)));
        CHECK(made.LSE[0] == doctest::Approx(large * large * D).epsilon(0.01));
      }
    }
  });
}

TEST_CASE("what lies behind a head's last key, a NaN or an infinity of the next head, stays there") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    for (const double bad : {double(NAN), double(INFINITY)})
      for (const bool causal : {false, true})
        for (const int which : {0, 1, 2, 3}) {
          Problem p = problem(step, 1, 2, 35, 37, smallest_head_dim(step), causal);
          if (why_unsupported(step, p, pass) || (which == 3 && pass == Pass::forward)) continue;
          INFO(step.id << ", " << describe(p) << ", in " << which);
          HostTensors t = random_tensors(p, 4);
          std::vector<double>& x = which == 0 ? t.Q : which == 1 ? t.K : which == 2 ? t.V : t.dO;
          const size_t next_head = x.size() / 2;
          for (size_t i = 0; i < size_t(p.D); i++) x[next_head + i] = bad;
          const HostTensors made = answer(step, target, pass, p, t);
          for (const auto* result : {&made.O, &made.LSE, &made.dQ, &made.dK, &made.dV})
            CHECK(std::all_of(result->begin(), result->begin() + long(result->size() / 2),
                              [](double v) { return std::isfinite(v); }));
        }
  });
}

TEST_CASE("a key whose scores are all -inf has no weight and no gradient, and spoils no other, however few queries") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    // Past the end of a tile the queries are zeros, and 0 · ∞ = NaN. D 128 and long sequences have other tiles.
    for (const auto& [Nq, D, causal] : {std::tuple{1, 0, false},
                                        {5, 0, true},
                                        {35, 0, false},
                                        {130, 0, false},
                                        {130, 128, true},
                                        {521, 128, false}}) {
      Problem p = problem(step, 1, 2, Nq, 37, D ? D : smallest_head_dim(step), causal);
      if (p.dtype == DType::e4m3 || why_unsupported(step, p, pass)) continue;  // e4m3 has no infinity
      INFO(step.id << ", " << describe(p));
      HostTensors t = random_tensors(p, 4);
      const size_t width = size_t(p.D), key = 20, next_head = 37 * width;
      for (size_t i = 0; i < t.Q.size(); i += width) t.Q[i] = 1 + std::fabs(t.Q[i]);
      for (const size_t head : {size_t(0), next_head}) t.K[head + key * width] = -INFINITY;
      const HostTensors made = answer(step, target, pass, p, t);
      for (const auto* result : {&made.O, &made.dK, &made.dV})  // dQ has 0 · ∞ by rights
        CHECK(std::all_of(result->begin(), result->end(), [](double v) { return std::isfinite(v); }));
      CHECK(std::none_of(made.LSE.begin(), made.LSE.end(), [](double v) { return std::isnan(v); }));
      if (pass == Pass::forward) continue;
      for (const auto* result : {&made.dK, &made.dV})
        for (const size_t head : {size_t(0), next_head}) {
          const auto row = result->begin() + long(head + key * width);
          // Not 0 alone: Eigen's vectors of floats have exp(−∞) = 10^−38.
          CHECK(std::all_of(row, row + p.D, [](double v) { return std::fabs(v) < 1e-37; }));
        }
    }
  });
}

TEST_CASE("lengths far below a tile, and head dim 128 with 64 rows") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    for (const auto& [H, N, D] : {std::array{40, 8, 128}, std::array{2, 64, 128}, std::array{3, 1, 64}}) {
      Problem p = problem(step, 1, H, N, N, D, true);
      if (why_unsupported(step, p, pass)) continue;
      INFO(step.id << ", " << describe(p));
      const cli::Outcome outcome = cli::verify(cpu_device(), target, step, pass, cli::Question(p, true));
      CHECK_MESSAGE(outcome.pass, outcome.fault);
    }
  });
}

// The steps of chapter 08 choose their tiles by length, too.
TEST_CASE("several tiles of those for long sequences") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (step.info().min_sm < 90) return;
    for (const int D : {64, 128, 256})
      for (const auto& [Nq, Nk] : {std::array{570, 130}, std::array{200, 2100}})
        for (const bool causal : {false, true}) {
          Problem p = problem(step, 1, 1, Nq, Nk, D, causal);
          if (why_unsupported(step, p, pass)) continue;
          INFO(step.id << ", " << describe(p));
          const cli::Outcome outcome = cli::verify(cpu_device(), target, step, pass, cli::Question(p, true));
          CHECK_MESSAGE(outcome.pass, outcome.fault);
        }
  });
}

TEST_CASE("causal, more queries than keys, inputs times 3, dO = 1: finite gradients, none from rows that see nothing") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (pass == Pass::forward) return;
    for (const int Nq : {40, 300}) {  // of 300 whole tiles see nothing
      Problem p = problem(step, 2, 2, Nq, 17, smallest_head_dim(step), true);
      INFO(step.id << ", " << describe(p));
      HostTensors t = random_tensors(p, 8);
      for (auto* x : {&t.Q, &t.K, &t.V})
        for (double& v : *x) v *= 3;
      t.dO.assign(t.dO.size(), 1.0);
      const HostTensors made = answer(step, target, pass, p, t);
      for (const auto* x : {&made.dQ, &made.dK, &made.dV})
        CHECK(std::all_of(x->begin(), x->end(), [](double v) { return std::isfinite(v); }));
      const size_t D = size_t(p.D);
      for (size_t head = 0; head < 4; head++) {
        const auto head_dQ = made.dQ.begin() + long(head * size_t(Nq) * D);
        CHECK(std::all_of(head_dQ, head_dQ + long(size_t(Nq - 17) * D), [](double v) { return v == 0; }));
      }
      // The first row that sees a key sees one, and so has no gradient but what rounding leaves; dV sums to the rows
      // that see something.
      double sum = 0;
      for (size_t j = 0; j < 17; j++) sum += made.dV[j * D];
      CHECK(sum == doctest::Approx(17).epsilon(tolerance(p.dtype)));
    }
  });
}

TEST_CASE("a head dim that a step does not have is refused by name, with those that it has") {
  every_step([](const RegisteredStep& step, Pass pass, Target) {
    for (int D : {16, 48, 80, 96, 100, 160, 512, 513, 1000}) {
      const auto& dims = step.info().head_dims;
      const auto why = why_unsupported(step, problem(step, 1, 1, 9, 9, D), pass);
      CHECK(why.has_value() == !std::count(dims.begin(), dims.end(), D));
      if (!why) continue;
      CHECK(why->find(step.id) != std::string::npos);
      CHECK(why->find("head dim " + std::to_string(D)) != std::string::npos);
      CHECK(why->find(head_dims_text(step.info())) != std::string::npos);
    }
  });
}

TEST_CASE("dropout in a forward and a backward pass is the same mask: a dropped value has no gradient") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (pass == Pass::forward || !step.info().dropout) return;
    for (const double dropped : {0.1, 0.9}) {
      // One query: dV of a key is its weight, grown, or nothing.
      Problem p = problem(step, 1, 1, 1, 60, smallest_head_dim(step));
      p.dropout = dropped, p.seed = 77;
      HostTensors t = random_tensors(p, 8);
      t.Q.assign(t.Q.size(), 0.0), t.dO.assign(t.dO.size(), 1.0);
      const HostTensors made = answer(step, target, pass, p, t);
      const reference::DropoutMask mask(p);
      INFO(step.id << " p " << dropped);
      for (int j = 0; j < p.Nk; j++) {
        const double expected = mask.keeps(0, 0, j) ? 1.0 / 60 / (1 - dropped) : 0;
        CHECK(made.dV[size_t(j * p.D)] == doctest::Approx(expected).epsilon(tolerance(p.dtype)));
      }
    }
  });
}

TEST_CASE("the CPU device computes the same bits with any number of OS threads, and from run to run") {
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (target == Target::host) return;
    // Four blocks of keys and more: of two, the order of whose sums does not matter, nobody would know which came
    // first.
    Problem p = problem(step, 1, 2, 150, 400, smallest_head_dim(step), true);
    p.deterministic = true;  // else atomics add in the order in which blocks come by
    if (step.info().dropout) p.dropout = 0.1;
    INFO(step.id);
    const HostTensors inputs = random_tensors(p, 5);
    HostTensors first;
    for (const int workers : {1, 2, 3, 7, 1, 7}) {
      simt::options().workers = workers;
      const HostTensors made = answer(step, target, pass, p, inputs);
      if (first.O.empty() && first.dQ.empty()) first = made;
      INFO(workers << " threads");
      CHECK(made.O == first.O);
      CHECK(made.LSE == first.LSE);
      CHECK(made.dQ == first.dQ);
      CHECK(made.dK == first.dK);
      CHECK(made.dV == first.dV);
    }
    simt::options() = simt::Options{};
  });
}

TEST_CASE("on one OS thread the order of blocks is fixed, and so are sums by atomics") {
  simt::options().workers = 1;
  every_step([](const RegisteredStep& step, Pass pass, Target target) {
    if (pass == Pass::forward || target == Target::host) return;
    const Problem p = problem(step, 1, 1, 100, 900, smallest_head_dim(step));  // eight blocks of keys
    INFO(step.id);
    const HostTensors inputs = random_tensors(p, 5);
    CHECK(answer(step, target, pass, p, inputs).dQ == answer(step, target, pass, p, inputs).dQ);
  });
  simt::options() = simt::Options{};
}

TEST_SUITE_END();
