// Hopper's instructions on the CPU executor: results against plain loops, and what is counted.
#include <doctest/doctest.h>

#include <array>
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
using simt_tools::KeepOptions;
using simt_tools::nearest;
using simt_tools::ramp;

namespace {

using Plain = AsyncKernels<Target::cpu>;
using Observed = AsyncKernels<Target::cpu_observed>;

constexpr int kBoxRows = 16;

// Numbers of one of the types of wgmma: their bits, and what they are.
struct Operand {
  std::vector<uint8_t> bytes;
  std::vector<double> values;
};
Operand random_operand(int type, size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Operand operand;
  operand.bytes.resize(count * (type == 2 ? 1 : 2));
  for (size_t i = 0; i < count; ++i) {
    const float x = normal(generator);
    const uint16_t bits = type == 0 ? simt::half_bits(x) : simt::bfloat16_bits(x);
    type == 2 ? operand.bytes[i] = simt::e4m3_bits(x), void() : void(std::memcpy(&operand.bytes[2 * i], &bits, 2));
    operand.values.push_back(type == 0   ? nearest(x, 11, -14, 15)
                             : type == 1 ? nearest(x, 8, -126, 127)
                                         : nearest(x, 4, -6, 8));
  }
  return operand;
}

// The largest difference between d [64][n] and a [64][k] · b [k][n].
double error_of_product(const Operand& a, const Operand& b, const std::vector<float>& d, int m, int n, int k) {
  double worst = 0;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int e = 0; e < k; ++e) sum += a.values[size_t(i * k + e)] * b.values[size_t(e * n + j)];
      const double error = std::abs(sum - d[size_t(i * n + j)]);
      worst = error <= worst ? worst : error;  // keeps a NaN
    }
  return worst;
}

}  // namespace

TEST_SUITE_BEGIN("async");

TEST_CASE_TEMPLATE("boxes by TMA, inside a tensor and over its edges", K, Plain, Observed) {
  for (const auto& [bytes, row_bytes] : {std::pair{false, 128}, {true, 128}, {false, 64}, {true, 64}}) {
    const unsigned element = bytes ? 1 : 2;
    const int swizzled = row_bytes / 16 - 1;  // the bits of a piece's place that are exchanged
    const unsigned size[3] = {144 / element, 21, 3};
    std::vector<uint8_t> in(144 * 21 * 3);
    for (size_t i = 0; i < in.size(); ++i) in[i] = uint8_t(i * 7 + i / 256);
    for (const auto& [x, y, z] : {std::array{0, 0, 0}, std::array{8, 3, 2}, std::array{64, 10, 1},
                                  std::array{-5, -3, 1}, std::array{0, 30, 0}, std::array{0, 0, 3}}) {
      const int at[3] = {x, y, z};
      Array<uint8_t> from(in), to(std::vector<uint8_t>(in.size(), 0xcc)), raw(size_t(kBoxRows * row_bytes));
      simt::reset_counters();
      K::move_box(bytes, row_bytes, from.get(), to.get(), size, at, raw.get());
      const std::vector<uint8_t> tile = raw.download(), out = to.download();
      std::vector<uint8_t> expected(in.size(), 0xcc);
      int wrong = 0;
      uint64_t inside = 0;
      for (int row = 0; row < kBoxRows; ++row)
        for (int byte = 0; byte < row_bytes; ++byte) {
          const int column = x * int(element) + byte, line = y + row;
          const bool there = column >= 0 && column < 144 && line >= 0 && line < 21 && z < 3;
          const size_t place = there ? size_t((z * 21 + line) * 144 + column) : 0;
          const int piece = byte / 16 ^ (row * row_bytes / 128 & swizzled);
          wrong += tile[size_t(row * row_bytes + piece * 16 + byte % 16)] != (there ? in[place] : 0);
          if (there) expected[place] = in[place], ++inside;
        }
      CHECK(wrong == 0);
      CHECK(out == expected);
      if (std::is_same_v<K, Plain>) continue;
      CHECK(simt::counters().bulk_copies == 2);
      CHECK(simt::counters().global.read_bytes == inside);
      CHECK(simt::counters().global.write_bytes == inside + uint64_t(kBoxRows * row_bytes));  // and `raw`
    }
  }
}

TEST_CASE_TEMPLATE("tensor maps that a driver refuses", K, Plain, Observed) {
  Array<uint8_t> x(4096);
  const int at[3] = {0, 0, 0};
  for (const auto& size : {std::array{8u, 4u, 0u}, std::array{0u, 4u, 1u}, std::array{9u, 4u, 1u}}) {
    const unsigned sizes[3] = {size[0], size[1], size[2]};
    CHECK_THROWS_AS(K::move_box(false, 128, x.get(), x.get(), sizes, at, x.get()), flash::KernelFault);
  }
}

TEST_CASE_TEMPLATE("bulk copies and sums", K, Plain, Observed) {
  const std::vector<float> in = ramp(256);
  Array<float> from(in), to(std::vector<float>(512, 0.5f));
  simt::reset_counters();
  K::bulk_runs(from.get(), to.get());
  const std::vector<float> out = to.download();
  bool right = true;
  for (size_t i = 0; i < 256; ++i) right &= out[i] == in[i] && out[256 + i] == 0.5f + 2 * in[i];
  CHECK(right);
  if (std::is_same_v<K, Plain>) return;
  const simt::Counters& counted = simt::counters();
  CHECK(counted.bulk_copies == 4);
  CHECK(counted.global.read_bytes == 1024);
  CHECK(counted.global.write_bytes == 2048);
  CHECK(counted.global.requests == 4);
  CHECK(counted.global.transactions == 32 + 32 + 16 + 16);
}

TEST_CASE_TEMPLATE("a ring of stages between two warps", K, Plain, Observed) {
  for (auto order : {simt::Order::forward, simt::Order::backward}) {
    KeepOptions keep;
    simt::options().order = order;
    const int rows = 11;
    const std::vector<float> in = ramp(rows * 32);
    Array<float> from(in), to(32);
    simt::reset_counters();
    K::ring_sum(from.get(), to.get(), rows);
    const std::vector<float> out = to.download();
    for (size_t lane = 0; lane < 32; ++lane) {
      float sum = 0;
      for (size_t i = 0; i < rows; ++i) sum += in[i * 32 + 31 - lane];
      CHECK(out[lane] == sum);
    }
    if (std::is_same_v<K, Observed>) CHECK(simt::counters().mbarrier_waits == rows * 33);
  }
}

TEST_CASE_TEMPLATE("blocks that wait for earlier blocks", K, Plain, Observed) {
  for (int workers : {1, 2, 4}) {
    KeepOptions keep;
    simt::options().workers = workers;
    const int blocks = 17;
    Array<int> flag(std::vector<int>{0}), list(std::vector<int>(32, 1));
    K::flag_chain(flag.get(), list.get(), blocks);
    uint32_t expected = 1;
    for (uint32_t block = 0; block < blocks; ++block) expected = expected * 3 + block;
    for (int x : list.download()) CHECK(uint32_t(x) == expected);

    Array<int> counter(std::vector<int>{0}), parts(blocks * 32), sum(std::vector<int>{0});
    K::last_block_sum(counter.get(), parts.get(), sum.get(), blocks);
    CHECK(sum.download()[0] == 32 * blocks * (blocks - 1) / 2 + blocks * 32 * 31 / 2);

    Array<int> lock(std::vector<int>{0}), count(std::vector<int>{0});
    K::lock_and_count(lock.get(), count.get(), blocks);
    CHECK(count.download()[0] == blocks * 32 * 3);
  }
}

TEST_CASE_TEMPLATE("products by wgmma of all widths, types and layouts", K, Plain, Observed) {
  for (int type = 0; type < 3; ++type) {
    for (int n : {64, 80, 96, 112, 128, 176, 192, 256})
      for (int layout : type == 2 ? std::vector{0, 1, 6, 7} : std::vector{0, 1, 2, 3, 4, 5, 6, 7}) {
        const int row_bytes = layout < 6 ? 128 : 64, k = row_bytes / (type == 2 ? 1 : 2);
        const Operand a = random_operand(type, size_t(64 * k), 1), b = random_operand(type, size_t(k * n), 2);
        Array<uint8_t> da(a.bytes), db(b.bytes);
        Array<float> d(size_t(64 * n));
        simt::reset_counters();
        K::wgmma_product(type, layout, n, da.get(), db.get(), d.get());
        CAPTURE(type);
        CAPTURE(n);
        CAPTURE(layout);
        CHECK(error_of_product(a, b, d.download(), 64, n, k) < 1e-4);
        if (std::is_same_v<K, Observed>) CHECK(simt::counters().matrix_flops == uint64_t(2 * 64 * n * k));
      }
  }
}

TEST_CASE_TEMPLATE("a pipeline of TMA and wgmma", K, Plain, Observed) {
  for (auto order : {simt::Order::forward, simt::Order::backward}) {
    KeepOptions keep;
    simt::options().order = order;
    const int m = 256, k = 320;
    const Operand a = random_operand(0, m * k, 1), b = random_operand(0, 64 * k, 2);
    Operand transposed;
    for (size_t e = 0; e < k; ++e)
      for (size_t j = 0; j < 64; ++j) transposed.values.push_back(b.values[j * k + e]);
    Array<uint8_t> da(a.bytes), db(b.bytes);
    Array<float> c(m * 64);
    simt::reset_counters();
    K::wgmma_pipeline(reinterpret_cast<uint16_t*>(da.get()), reinterpret_cast<uint16_t*>(db.get()), c.get(), m, k);
    CHECK(error_of_product(a, transposed, c.download(), m, 64, k) < 1e-4);
    if (std::is_same_v<K, Plain>) continue;
    const simt::Counters& counted = simt::counters();
    CHECK(counted.matrix_flops == 2ull * m * 64 * k);
    CHECK(counted.global.read_bytes == (m + 64 * m / 128) * k * 2);
    CHECK(counted.global.requests == 2 * k / 64 * m / 128 + 32 * 8 * m / 128);  // boxes, and warps that store
    CHECK(counted.shared.read_bytes >= m / 64 * k / 16 * (128 + 128) * 16);     // operands
  }
}

TEST_CASE_TEMPLATE("numbers in e4m3", K, Plain, Observed) {
  std::vector<float> in = {0.0f,   -0.0f, INFINITY, -INFINITY, NAN,      448.0f,
                           464.0f, 1e9f,  -500.0f,  0x1p-9f,   0x1p-10f, 0x1.8p-10f};
  for (int exponent = -12; exponent <= 9; ++exponent)
    for (int i = 0; i < 64; ++i) in.push_back(std::ldexp(1.0f + float(i) / 64, exponent) * (i % 2 ? -1.0f : 1.0f));
  while (in.size() % 4) in.push_back(1.0f);
  Array<float> x(in), back(in.size());
  Array<uint32_t> packed(in.size() / 4);
  K::e4m3_numbers(x.get(), packed.get(), back.get(), int(in.size()));
  const std::vector<float> got = back.download();
  const std::vector<uint32_t> bits = packed.download();
  int wrong = 0;
  for (size_t i = 0; i < in.size(); ++i) {
    const double rounded = nearest(in[i], 4, -6, 8);
    const double expected = std::abs(rounded) > 448 ? std::copysign(448.0, rounded) : rounded;
    const uint8_t byte = uint8_t(bits[i / 4] >> i % 4 * 8);
    wrong += std::isnan(expected) ? !std::isnan(got[i]) || (byte & 0x7f) != 0x7f
                                  : got[i] != expected || std::signbit(got[i]) != std::signbit(expected);
    if (!std::isnan(expected)) {  // from the bits, by definition
      const int exponent = byte >> 3 & 15, fraction = byte & 7;
      const double value = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
      wrong += (byte & 0x80 ? -value : value) != expected;
    }
  }
  CHECK(wrong == 0);
}

TEST_SUITE_END();
