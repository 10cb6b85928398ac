// Tensor cores, asynchronous copies and Hopper's barriers on the CPU executor: results against plain loops.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "harness/error.h"
#include "simt/cuda_fp8.h"
#include "simt/executor.h"
#include "simt_kernels/async_kernels.h"
#include "simt_tools.h"

using flash::Target;
using simt_kernels::AsyncKernels;
using simt_tools::Array;
using simt_tools::nearest;
using simt_tools::ramp;

namespace {

using Plain = AsyncKernels<Target::cpu>;
using Observed = AsyncKernels<Target::cpu_observed>;

// Numbers of a 16-bit type: their bits, and what they are.
struct Numbers {
  std::vector<uint16_t> bits;
  std::vector<double> values;
};
Numbers random_numbers(bool bfloat16, size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Numbers numbers;
  for (size_t i = 0; i < count; ++i) {
    const float x = normal(generator);
    numbers.bits.push_back(bfloat16 ? simt::bfloat16_bits(x) : simt::half_bits(x));
    numbers.values.push_back(bfloat16 ? nearest(x, 8, -126, 127) : nearest(x, 11, -14, 15));
  }
  return numbers;
}

// The largest difference between d and a · b.
double error_of_product(const std::vector<double>& a, const std::vector<double>& b, const std::vector<float>& d, int m,
                        int n, int k) {
  double worst = 0;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int e = 0; e < k; ++e) sum += a[size_t(i * k + e)] * b[size_t(e * n + j)];
      const double error = std::abs(sum - d[size_t(i * n + j)]);
      worst = error <= worst ? worst : error;  // keeps a NaN
    }
  return worst;
}

}  // namespace

TEST_SUITE_BEGIN("async");

// ---- Ampere

TEST_CASE_TEMPLATE("products by mma, ldmatrix and cp.async", K, Plain, Observed) {
  const int m = 48, n = 32, k = 80;
  for (bool bfloat16 : {false, true}) {
    const Numbers a = random_numbers(bfloat16, m * k, 1), b = random_numbers(bfloat16, k * n, 2);
    Array<uint16_t> da(a.bits), db(b.bits);
    Array<float> d(m * n);
    simt::reset_counters();
    K::mma_product(bfloat16, da.get(), db.get(), d.get(), m, n, k);
    CHECK(error_of_product(a.values, b.values, d.download(), m, n, k) < 1e-4);
    if (std::is_same_v<K, Plain>) continue;
    const simt::Counters& counted = simt::counters();
    const uint64_t warps = m / 16 * n / 16, steps = k / 16;
    CHECK(counted.matrix_flops == 2ull * m * n * k);
    CHECK(counted.async_copies == warps * (steps + 1) * 64);
    CHECK(counted.global.read_bytes == warps * steps * 1024);
    CHECK(counted.global.write_bytes == m * n * 4);
    CHECK(counted.shared.write_bytes == warps * (steps + 1) * 1024);
    CHECK(counted.shared.read_bytes == warps * steps * 1024);
    // Rows of 48 bytes: none of ldmatrix's eight rows collide, but two of the eight pieces of four rows do.
    CHECK(counted.shared.transactions == counted.shared.ideal_transactions + warps * (steps + 1) * 8);
  }
}

TEST_CASE_TEMPLATE("ldmatrix and stmatrix transpose matrices", K, Plain, Observed) {
  std::vector<uint16_t> in(256);
  for (size_t i = 0; i < 256; ++i) in[i] = uint16_t(i * 257);
  Array<uint16_t> from(in), to(256);
  K::matrix_rows(from.get(), to.get());
  const std::vector<uint16_t> out = to.download();
  bool right = true;
  for (size_t r = 0; r < 16; ++r)
    for (size_t c = 0; c < 16; ++c) {
      const size_t row = r / 8 * 8 + c % 8, column = c / 8 * 8 + r % 8;
      right &= out[r * 16 + c] == in[row * 16 + column];
    }
  CHECK(right);
}

TEST_CASE_TEMPLATE("exp2_fast and pack", K, Plain, Observed) {
  std::vector<float> in = {-INFINITY, -127.0f, -126.5f, -126.0f, -0.0f, 0.0f, 1.0f, 127.9f, 128.0f, 65520.0f, -1e-8f};
  for (int i = -1000; i < 1000; ++i) in.push_back(float(i) * 0.0371f);
  const size_t count = in.size();
  Array<float> x(in), exp2(count);
  Array<uint32_t> bf16(count), half(count);
  K::conversions(x.get(), exp2.get(), bf16.get(), half.get(), int(count));
  const std::vector<float> powers = exp2.download();
  const std::vector<uint32_t> bf16s = bf16.download(), halves = half.download();
  int wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    const double power = std::exp2(double(in[i])), expected = power < 0x1p-126 ? 0.0 : float(power);
    wrong += !(powers[i] == expected || std::abs(powers[i] - expected) <= expected * 0x1p-22);
    const float next = in[i + 1 < count ? i + 1 : 0];
    wrong += bf16s[i] != (simt::bfloat16_bits(in[i]) | uint32_t(simt::bfloat16_bits(next)) << 16);
    wrong += halves[i] != (simt::half_bits(in[i]) | uint32_t(simt::half_bits(next)) << 16);
  }
  CHECK(wrong == 0);
}

TEST_CASE_TEMPLATE("named barriers", K, Plain, Observed) {
  for (auto order : {simt::Order::forward, simt::Order::backward}) {
    simt_tools::KeepOptions keep;
    simt::options().order = order;
    Array<float> out(32);
    simt::reset_counters();
    K::hand_over(out.get(), 5);
    const std::vector<float> got = out.download();
    for (int lane = 0; lane < 32; ++lane) CHECK(got[size_t(lane)] == 5 * (31 - lane) + 32 * 10);
    if (std::is_same_v<K, Observed>) CHECK(simt::counters().named_barriers == 9);
    if (std::is_same_v<K, Observed>) CHECK(simt::counters().barrier_warps == 9 * 2);
  }
}

TEST_SUITE_END();
