// The harness: problems and their validation, numbers and their formats, the registry, guarded buffers, and the
// precautions with which a step is run.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "cli/verify.h"
#include "command.h"
#include "harness/device.h"
#include "harness/inputs.h"
#include "harness/problem.h"
#include "harness/registry.h"
#include "harness/round.h"
#include "harness/runner.h"
#include "message_of.h"

TEST_SUITE_BEGIN("harness");

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

// Bits → value by the definition of the formats, written without the harness.
double float_of_bits(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = int(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double sign = bits >> (exponent_bits + mantissa_bits) ? -1 : 1;
  const double fraction = mantissa / std::pow(2.0, mantissa_bits);
  return exponent == 0 ? sign * std::pow(2.0, 1 - bias) * fraction
                       : sign * std::pow(2.0, exponent - bias) * (1 + fraction);
}

// ---- Wrong steps, to see that the precautions catch them

void copy_q_to_o(const Problem& p, const Tensors& t) {
  std::memcpy(t.O, t.Q, p.q_elements() * 4);
  std::memset(t.LSE, 0, p.query_rows() * 4);
}
Step host_step(RunPass forward) {
  return {.idea = "a test's",
          .dtypes = {DType::fp32},
          .head_dims = head_dims_up_to(256),
          .dropout = true,
          .kv_heads = true,
          .forward = forward};
}

// The right answer, from the definition in double; then `spoil` has its way with O and LSE.
void right_answer(const Problem& p, const Tensors& t, void (*spoil)(const Problem&, float*, float*)) {
  const auto *Q = static_cast<const float*>(t.Q), *K = static_cast<const float*>(t.K);
  const auto* V = static_cast<const float*>(t.V);
  auto *O = static_cast<float*>(t.O), *LSE = static_cast<float*>(t.LSE);
  for (size_t row = 0; row < p.query_rows(); row++) {
    const size_t head = row / size_t(p.Nq);
    std::vector<double> sum(size_t(p.D), 0.0);
    double l = 0;
    for (int j = 0; j < p.Nk; j++) {
      const size_t key = (head * size_t(p.Nk) + size_t(j)) * size_t(p.D);
      double s = 0;
      for (int d = 0; d < p.D; d++) s += double(Q[row * size_t(p.D) + size_t(d)]) * K[key + size_t(d)];
      const double weight = std::exp(p.scale * s);
      l += weight;
      for (int d = 0; d < p.D; d++) sum[size_t(d)] += weight * V[key + size_t(d)];
    }
    for (int d = 0; d < p.D; d++) O[row * size_t(p.D) + size_t(d)] = float(sum[size_t(d)] / l);
    LSE[row] = float(std::log(l));
  }
  spoil(p, O, LSE);
}

cli::Outcome verify_host_step(RunPass forward) {
  const RegisteredStep step{"99_test/step", {{Target::host, host_step(forward)}}};
  return cli::verify(cpu_device(), Target::host, step, Pass::forward, cli::Question(small(), false));
}

}  // namespace

TEST_CASE("every size and option out of range is refused in a line that names the option") {
  const auto refusal = [](auto change) {
    Problem p = small();
    change(p);
    return message_of([&] { validate(p); });
  };
  CHECK(refusal([](Problem&) {}) == "");
  CHECK(contains(refusal([](Problem& p) { p.B = -1; }), "--batch"));
  CHECK(contains(refusal([](Problem& p) { p.Hq = -1; }), "--heads"));
  CHECK(contains(refusal([](Problem& p) { p.Nq = -5; }), "--seq"));
  CHECK(contains(refusal([](Problem& p) { p.Nk = -5; }), "--seq-k"));
  CHECK(contains(refusal([](Problem& p) { p.D = 0; }), "--head-dim"));
  CHECK(contains(refusal([](Problem& p) { p.Hq = 3; }), "--kv-heads: 2 does not divide the 3 query heads"));
  CHECK(contains(refusal([](Problem& p) { p.Hkv = 0; }), "--kv-heads"));
  CHECK(contains(refusal([](Problem& p) { p.scale = NAN; }), "--scale"));
  CHECK(contains(refusal([](Problem& p) { p.scale = INFINITY; }), "--scale"));
  CHECK(contains(refusal([](Problem& p) { p.dropout = 1.0; }), "--dropout"));
  CHECK(contains(refusal([](Problem& p) { p.dropout = -0.1; }), "--dropout"));
  CHECK(contains(refusal([](Problem& p) { p.dropout = NAN; }), "--dropout"));
  CHECK(contains(refusal([](Problem& p) { p.B = 2000000000; }), "batch times heads"));
  CHECK(contains(refusal([](Problem& p) {
                   p.B = 1000000;
                   p.Nq = 2000000000;
                 }),
                 "2^50"));
  CHECK(refusal([](Problem& p) { p.B = p.Nq = p.Nk = 0; }) == "");
  CHECK(refusal([](Problem& p) { p.Hq = p.Hkv = 0; }) == "");
  CHECK(refusal([](Problem& p) { p.scale = -3; }) == "");
}

TEST_CASE("FLOPs are four for each visible pair and element, and 2.5 times that backward") {
  for (int Nq : {1, 3, 8, 13})
    for (int Nk : {0, 1, 5, 8, 20}) {
      Problem p = small();
      p.Nq = Nq, p.Nk = Nk, p.causal = true;
      double pairs = 0;
      for (int i = 0; i < Nq; i++)
        for (int j = 0; j < Nk; j++) pairs += j <= i + Nk - Nq;
      CHECK(flops(p, Pass::forward) == doctest::Approx(4.0 * 2 * 8 * pairs));
      p.causal = false;
      CHECK(flops(p, Pass::backward) == doctest::Approx(10.0 * 2 * 8 * Nq * Nk));
    }
}

TEST_CASE("16- and 8-bit values: every bit pattern decodes by the format's definition and encodes back") {
  const struct {
    DType type;
    int exponent_bits, mantissa_bits;
    uint32_t patterns;
  } formats[] = {{DType::fp16, 5, 10, 65536}, {DType::bf16, 8, 7, 65536}, {DType::e4m3, 4, 3, 256}};
  for (const auto& f : formats) {
    int wrong = 0;
    for (uint32_t bits = 0; bits < f.patterns; bits++) {
      std::vector<std::byte> bytes(bytes_of(f.type));
      std::memcpy(bytes.data(), &bits, bytes.size());
      const double value = decode(f.type, bytes)[0];
      const uint32_t exponent = bits >> f.mantissa_bits & ((1u << f.exponent_bits) - 1);
      const bool top = exponent + 1 == 1u << f.exponent_bits;
      const uint32_t mantissa = bits & ((1u << f.mantissa_bits) - 1);
      const bool special = f.type == DType::e4m3 ? top && mantissa == 7 : top;
      if (special) {
        const bool infinite = f.type != DType::e4m3 && mantissa == 0;
        wrong += infinite ? !std::isinf(value) : !std::isnan(value);
        if (!infinite) continue;
      } else {
        wrong += value != float_of_bits(bits, f.exponent_bits, f.mantissa_bits);
        wrong += rounded_to(f.type, value) != value;
      }
      wrong += encode(f.type, std::vector{value}) != bytes;
    }
    CHECK_MESSAGE(wrong == 0, name_of(f.type));
  }
}

TEST_CASE("rounding takes the nearest neighbour, the even one of two, and overflows as the format says") {
  for (DType type : {DType::fp16, DType::bf16, DType::e4m3}) {
    const std::vector<double> some = normal_numbers(2000, 7, 1, DType::fp64);
    std::vector<double> grid;  // the non-negative values of the type, ascending
    const uint32_t infinity = type == DType::fp16 ? 0x7c00u : type == DType::bf16 ? 0x7f80u : 0x7fu;
    for (uint32_t bits = 0; bits < infinity; bits++) {
      std::vector<std::byte> bytes(bytes_of(type));
      std::memcpy(bytes.data(), &bits, bytes.size());
      grid.push_back(decode(type, bytes)[0]);
    }
    for (double x : some) {
      const double a = std::fabs(x) * (type == DType::e4m3 ? 20 : 1);
      const auto above = std::upper_bound(grid.begin(), grid.end(), a);
      REQUIRE(above != grid.end());
      const double low = above[-1], high = *above;
      const bool up = a - low > high - a || (a - low == high - a && (above - grid.begin()) % 2 == 0);
      CHECK(rounded_to(type, std::copysign(a, x)) == std::copysign(up ? high : low, x));
    }
    const double tie = (grid[100] + grid[101]) / 2;  // a tie goes to the even pattern
    CHECK(rounded_to(type, tie) == grid[100]);
    CHECK(rounded_to(type, (grid[101] + grid[102]) / 2) == grid[102]);
    CHECK(std::isnan(rounded_to(type, NAN)));
  }
  CHECK(rounded_to(DType::fp16, 65519.0) == 65504.0);
  CHECK(std::isinf(rounded_to(DType::fp16, 65520.0)));
  CHECK(rounded_to(DType::e4m3, 1e9) == 448.0);
  CHECK(rounded_to(DType::e4m3, -INFINITY) == -448.0);
}

TEST_CASE("inputs: mean 0, variance 1, the same on every machine, and other for another seed or tensor") {
  const size_t count = 200000;
  const auto x = normal_numbers(count, 42, 1, DType::fp64);
  double sum = 0, squares = 0, beyond_two = 0;
  for (double v : x) sum += v, squares += v * v, beyond_two += std::fabs(v) > 2;
  CHECK(std::fabs(sum / count) < 4 / std::sqrt(double(count)));
  CHECK(squares / count == doctest::Approx(1.0).epsilon(0.02));
  CHECK(beyond_two / count == doctest::Approx(0.0455).epsilon(0.1));
  CHECK(normal_numbers(count, 42, 1, DType::fp64) == x);
  const auto correlation = [&](const std::vector<double>& y) {
    double dot = 0;
    for (size_t i = 0; i < count; i++) dot += x[i] * y[i];
    return std::fabs(dot / count);
  };
  CHECK(correlation(normal_numbers(count, 43, 1, DType::fp64)) < 0.01);
  CHECK(correlation(normal_numbers(count, 42, 2, DType::fp64)) < 0.01);
  // Sums of integers only: these values may never change, or recorded results could not be repeated.
  CHECK(normal_numbers(3, 0, 1, DType::fp64) ==
        std::vector<double>{0.291567325592041, 0.7082386016845703, 0.9415111541748047});
}

TEST_CASE("a buffer begins as NaN, and a write past either end of it is found") {
  Device& device = cpu_device();
  for (long offset : {-1l, -4000l, 0l, 1999l, 2000l, 2001l, 60000l}) {
    const Buffer buffer(device, "x", 2000);
    device.poison(buffer.data(), buffer.bytes());
    std::vector<float> values(500);
    device.download(values.data(), buffer.data(), 2000);
    CHECK(std::isnan(values[0]));
    CHECK(std::isnan(values[499]));
    CHECK_NOTHROW(buffer.check_guards());
    static_cast<char*>(buffer.data())[offset] = 1;
    const bool inside = offset >= 0 && offset < 2000;
    CHECK(contains(message_of([&] { buffer.check_guards(); }), "wrote outside the 2000 bytes of x") == !inside);
  }
}

TEST_CASE("asking for more memory than there is names both figures") {
  const std::string refusal = message_of([] { Buffer(cpu_device(), "workspace S", size_t(1) << 45); });
  CHECK(contains(refusal, "workspace S: "));
  CHECK(contains(refusal, "free"));
}

TEST_CASE("a right step passes; one wrong element, one unwritten, a wrong LSE, an overrun fail") {
  CHECK(verify_host_step([](const Problem& p, const Tensors& t, Stream) {
          right_answer(p, t, [](const Problem&, float*, float*) {});
        }).pass);
  const auto wrong = verify_host_step([](const Problem& p, const Tensors& t, Stream) {
    right_answer(p, t, [](const Problem&, float* O, float*) { O[33] += 1e-4f; });
  });
  CHECK(!wrong.pass);
  CHECK(!wrong.outputs.at("O").pass);
  CHECK(wrong.outputs.at("LSE").pass);
  const auto unwritten = verify_host_step([](const Problem& p, const Tensors& t, Stream) {
    std::vector<float> O(p.q_elements());
    Tensors other = t;
    other.O = O.data();
    right_answer(p, other, [](const Problem&, float*, float*) {});
    std::memcpy(t.O, O.data(), (p.q_elements() - 1) * 4);  // the last one stays as it was
  });
  CHECK(!unwritten.outputs.at("O").pass);
  const auto lse = verify_host_step([](const Problem& p, const Tensors& t, Stream) {
    right_answer(p, t, [](const Problem&, float*, float* LSE) { LSE[9] *= 1.0001f; });
  });
  CHECK(lse.outputs.at("O").pass);
  CHECK(!lse.outputs.at("LSE").pass);
  CHECK(!verify_host_step([](const Problem& p, const Tensors& t, Stream) { copy_q_to_o(p, t); }).pass);
  const auto overrun = verify_host_step([](const Problem& p, const Tensors& t, Stream) {
    right_answer(p, t, [](const Problem& q, float* O, float*) { O[q.q_elements()] = 0; });
  });
  CHECK(!overrun.pass);
  CHECK(contains(overrun.fault, "of O"));
}

TEST_CASE("a long tensor arrives whole and comes back whole") {
  const RegisteredStep step{
      "99_test/step",
      {{Target::host, host_step([](const Problem& p, const Tensors& t, Stream) { copy_q_to_o(p, t); })}}};
  Problem p = small();
  p.Nq = 300'001, p.Hkv = 1, p.Nk = 0;
  const HostTensors tensors = random_tensors(p, 1);
  CHECK(run_step(cpu_device(), Target::host, step, Pass::forward, p, tensors).tensors.O == tensors.Q);
}

TEST_CASE("a workspace that was not asked for cannot be used, and a tensor of the wrong size is refused") {
  const RegisteredStep step{
      "99_test/step",
      {{Target::host, host_step([](const Problem&, const Tensors& t, Stream) { t.scratch<float>("S"); })}}};
  HostTensors tensors = random_tensors(small(), 1);
  CHECK(contains(message_of([&] { run_step(cpu_device(), Target::host, step, Pass::forward, small(), tensors); }),
                 "99_test/step: there is no workspace 'S'; "));
  tensors.K.pop_back();
  CHECK(contains(message_of([&] { run_step(cpu_device(), Target::host, step, Pass::forward, small(), tensors); }),
                 "K: has 111 elements, the problem needs 112"));
}

TEST_SUITE_END();
