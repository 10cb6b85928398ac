// The CPU executor: CUDA's words mean what they should, planted mistakes are found, and counters are exact.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "harness/device.h"
#include "harness/error.h"
#include "simt/executor.h"
#include "simt_kernels/simt_kernels.h"
#include "simt_tools.h"

using flash::Target;
using simt::Kind;
using simt_kernels::Fault;
using simt_kernels::Kernels;
using simt_tools::Array;
using simt_tools::KeepOptions;
using simt_tools::nearest;
using simt_tools::ramp;

namespace {

// The kernels as compiled plain, and as compiled for observation.
using Plain = Kernels<Target::cpu>;
using Observed = Kernels<Target::cpu_observed>;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// Whether two results of float arithmetic agree within a few units of the last place.
bool close(float x, double expected) {
  if (std::isnan(expected)) return std::isnan(x);
  return double(x) == expected || std::abs(x - expected) <= 4e-7 * std::abs(expected);
}

// Numbers of all magnitudes, among them every tie between two neighbours for some exponents.
std::vector<float> awkward_floats() {
  std::vector<float> x = {0.0f,
                          -0.0f,
                          INFINITY,
                          -INFINITY,
                          NAN,
                          65504.0f,
                          65519.99f,
                          65520.0f,
                          -65520.0f,
                          1e30f,
                          0x1p-24f,
                          0x1p-25f,
                          0x1.8p-25f,
                          0x1.8p-24f,
                          0x1p-14f,
                          0x1.ffcp-15f,
                          0x1.ffep-15f,
                          0x1p-26f,
                          std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::denorm_min(),
                          0x1p-133f};
  for (int exponent = -30; exponent <= 17; ++exponent)
    for (int i = 0; i < 64; ++i) x.push_back(std::ldexp(1.0f + float(i) / 64 + (i % 3) * 0x1p-11f, exponent));
  for (uint32_t i = 0; i < 20000; ++i) {  // all over the bit patterns
    const uint32_t bits = i * 0x9E3779B9u;
    float f;
    std::memcpy(&f, &bits, 4);
    x.push_back(f);
  }
  return x;
}

}  // namespace

TEST_SUITE_BEGIN("simt");

// ---- The vocabulary

TEST_CASE_TEMPLATE("integer words", K, Plain, Observed) {
  std::vector<int> in = {0, 1, -1, 2, 17, -17, 0x7fffffff, int(0x80000000), 0x12345678, -1000};
  Array<int> numbers(in), results(in.size() * simt_kernels::kIntegerWords);
  K::integer_words(numbers.get(), results.get(), int(in.size()));
  const std::vector<int> out = results.download();
  for (size_t i = 0; i < in.size(); ++i) {
    CAPTURE(in[i]);
    const uint32_t u = uint32_t(in[i]);
    int ones = 0, first = 0, leading = 32;
    uint32_t reversed = 0;
    for (int bit = 31; bit >= 0; --bit)
      if (u >> bit & 1) ones++, first = bit + 1, leading = std::min(leading, 31 - bit), reversed |= 1u << (31 - bit);
    const int* r = &out[i * simt_kernels::kIntegerWords];
    CHECK(r[0] == ones);
    CHECK(r[1] == first);
    CHECK(r[2] == leading);
    CHECK(uint32_t(r[3]) == uint32_t(uint64_t(u) * 0xdeadbeefull / (1ull << 32)));
    CHECK(r[4] == int(std::floor(double(in[i]) * -123456789.0 / 4294967296.0)));
    CHECK(uint32_t(r[5]) == reversed);
    CHECK(r[6] == std::min(in[i], 17));
    CHECK(r[7] == std::max(in[i], -17));
    CHECK(r[8] == in[i]);
    CHECK(r[9] == in[i]);
  }
}

TEST_CASE_TEMPLATE("float words", K, Plain, Observed) {
  std::vector<float> in;
  for (int i = 1; i <= 100; ++i) in.push_back(float(i) * 0.0625f);
  Array<float> numbers(in), results(in.size() * simt_kernels::kFloatWords);
  K::float_words(numbers.get(), results.get(), int(in.size()));
  const std::vector<float> out = results.download();
  for (size_t i = 0; i < in.size(); ++i) {
    const double x = in[i];
    const double expected[simt_kernels::kFloatWords] = {1 / std::sqrt(x),
                                                        std::exp(x),
                                                        std::log(x),
                                                        std::exp2(x),
                                                        x / 3,
                                                        1 / x,
                                                        x * x + 1,
                                                        std::max(x, 1.5),
                                                        std::min(x, 1.5),
                                                        std::max(x, 1.5),
                                                        std::min(x, 1.5),
                                                        x,
                                                        x,
                                                        x,
                                                        std::sqrt(x),
                                                        std::nearbyint(x),
                                                        std::clamp(x - 1, 0.0, 1.0),
                                                        std::log2(x),
                                                        x * x + 1,
                                                        std::tanh(x)};
    for (int k = 0; k < simt_kernels::kFloatWords; ++k) {
      CAPTURE(x);
      CAPTURE(k);
      CHECK(close(out[i * simt_kernels::kFloatWords + size_t(k)], expected[k]));
    }
  }
}

TEST_CASE_TEMPLATE("vectors and constant memory", K, Plain, Observed) {
  Array<float> in({1, 2, 3, 4}), out(16), constants(4);
  K::vector_words(in.get(), out.get());
  CHECK(out.download() == std::vector<float>{4, 6, 3, 4, 1, 2, 3, 4, 5, 6, -7, -8, 9, 10, 11, 12});
  K::constants(constants.get());
  CHECK(constants.download() == std::vector<float>{2, 6, 15, 28});
}

TEST_CASE_TEMPLATE("rounding to half and bfloat16", K, Plain, Observed) {
  const std::vector<float> in = awkward_floats();
  Array<float> numbers(in), back(in.size());
  Array<uint16_t> bits(in.size());
  const auto check = [&](int precision, int lowest, int highest, uint16_t nan) {
    const std::vector<float> got = back.download();
    const std::vector<uint16_t> pattern = bits.download();
    int wrong = 0;
    for (size_t i = 0; i < in.size(); ++i) {
      const double expected = nearest(in[i], precision, lowest, highest);
      const bool right = std::isnan(expected) ? std::isnan(got[i]) && pattern[i] == nan
                                              : bits_of(got[i]) == bits_of(float(expected));  // signed zeros too
      if (!right && ++wrong < 5) {
        CAPTURE(in[i]);
        CHECK(double(got[i]) == expected);
      }
    }
    CHECK(wrong == 0);
  };
  K::round_to_half(numbers.get(), bits.get(), back.get(), int(in.size()));
  check(11, -14, 15, 0x7fff);
  K::round_to_bfloat16(numbers.get(), bits.get(), back.get(), int(in.size()));
  check(8, -126, 127, 0x7fff);
}

TEST_CASE_TEMPLATE("arithmetic in half and bfloat16", K, Plain, Observed) {
  const float a = 1.0f / 3, b = -7.7f, c = 2.0f / 7, d = 1000.1f;
  Array<float> in({a, b, c, d}), out(22);
  K::half_words(in.get(), out.get());
  const std::vector<float> got = out.download();
  size_t next = 0;
  for (const auto& [precision, lowest, highest] : {std::array{11, -14, 15}, std::array{8, -126, 127}}) {
    const auto round = [&, p = precision, l = lowest, h = highest](double x) { return float(nearest(x, p, l, h)); };
    const double x = round(a), y = round(b), z = round(c), w = round(d);
    for (double expected : {x + z, y + w, x * z, y * w, x - z, y - w, x + y, x * y, x - y})
      CHECK(got[next++] == round(expected));
  }
  CHECK(got[18] == float(nearest(a, 11, -14, 15)));
  CHECK(got[19] == float(nearest(b, 11, -14, 15)));
  CHECK(got[20] == float(nearest(a, 8, -126, 127)));
  CHECK(got[21] == float(nearest(b, 8, -126, 127)));
}

// ---- Grids, blocks, collectives

TEST_CASE_TEMPLATE("indices of grids and blocks", K, Plain, Observed) {
  const uint32_t shapes[][2][3] = {{{5, 1, 1}, {70, 1, 1}},
                                   {{2, 3, 4}, {4, 3, 5}},
                                   {{1, 7, 1}, {1, 1, 64}},
                                   {{1, 1, 3}, {1, 33, 2}},
                                   {{1, 1, 1}, {1024, 1, 1}}};
  for (const auto& [grid, block] : shapes) {
    const uint32_t blocks = grid[0] * grid[1] * grid[2], threads = block[0] * block[1] * block[2];
    Array<uint32_t> out(size_t(blocks) * threads * 6);
    K::indices(out.get(), grid, block);
    const std::vector<uint32_t> got = out.download();
    bool right = true;
    for (uint32_t b = 0; b < blocks; ++b)
      for (uint32_t t = 0; t < threads; ++t) {
        const uint32_t expected[6] = {b % grid[0],  b / grid[0] % grid[1],   b / grid[0] / grid[1],
                                      t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
        right &= std::equal(expected, expected + 6, &got[(size_t(b) * threads + t) * 6]);
      }
    CHECK(right);
  }
}

TEST_CASE_TEMPLATE("shuffles", K, Plain, Observed) {
  for (int threads : {32, 96})
    for (int width : {2, 4, 8, 16, 32}) {
      Array<int> out(size_t(threads) * 4);
      K::shuffles(out.get(), threads, width);
      const std::vector<int> got = out.download();
      for (int t = 0; t < threads; ++t) {
        CAPTURE(t);
        CAPTURE(width);
        const int group = t / width * width, position = t - group, first = 1000 + t;
        CHECK(got[size_t(t) * 4] == 1000 + group + (t * 7 + 3) % width);
        CHECK(got[size_t(t) * 4 + 1] == (position >= 3 ? first - 3 : first));
        CHECK(got[size_t(t) * 4 + 2] == (position + 3 < width ? first + 3 : first));
        const int partner = t % 32 ^ 5;  // a later group's value cannot be read, an earlier one's can
        CHECK(got[size_t(t) * 4 + 3] == (partner / width <= t % 32 / width ? 1000 + t / 32 * 32 + partner : first));
      }
    }
  Array<double> out(32 * 6);
  K::shuffle_types(out.get());
  const std::vector<double> got = out.download();
  for (int t = 0; t < 32; ++t) {
    const double from = 31 - t;
    const double expected[6] = {from / 2, from / 4, 0x1p40 + from, from, 2 * from, from};
    CHECK(std::equal(expected, expected + 6, &got[size_t(t) * 6]));
  }
}

TEST_CASE_TEMPLATE("votes, also in a last warp that is not full", K, Plain, Observed) {
  for (unsigned threads : {32u, 40u, 100u}) {
    Array<unsigned> out(threads * 6);
    K::votes(out.get(), int(threads));
    const std::vector<unsigned> got = out.download();
    for (unsigned t = 0; t < threads; ++t) {
      unsigned ballot = 0;
      for (unsigned i = t / 32 * 32; i < std::min(threads, t / 32 * 32 + 32); ++i)
        ballot |= unsigned(i % 3 == 0) << i % 32;
      const unsigned first_warp = t < 32;
      const unsigned expected[6] = {ballot, first_warp << 1, 2u | !first_warp, (threads + 4) / 5, 2, 2};
      CAPTURE(t);
      for (size_t k = 0; k < 6; ++k) CHECK(got[t * 6 + k] == expected[k]);
    }
  }
}

TEST_CASE_TEMPLATE("collectives of a part of a warp", K, Plain, Observed) {
  Array<int> out(32);
  K::partial_masks(out.get());
  const std::vector<int> got = out.download();
  for (int t = 0; t < 32; ++t) {
    const int source = 31 - t;
    CHECK(got[size_t(t)] == (source < 16 ? (source + 3) % 16 : source ^ 1));
  }
}

TEST_CASE_TEMPLATE("atomics", K, Plain, Observed) {
  const int blocks = 20, threads = blocks * 64;
  Array<int> ints({0, 0, 0, 0, 0, 0, 0, -1});
  Array<float> sum(std::vector<float>{0.0f});
  Array<unsigned long long> big(std::vector<unsigned long long>{0});
  K::atomics(ints.get(), sum.get(), big.get(), blocks);
  const std::vector<int> got = ints.download();
  CHECK(got[0] == threads);
  CHECK(got[1] == threads - 1);
  CHECK(got[2] == -(threads - 1));
  CHECK(got[3] == 42);
  CHECK(got[4] > 0);
  CHECK(got[5] == 1);
  CHECK(got[6] == 0x7fffffff);
  CHECK(got[7] == int(0x80000000));
  CHECK(sum.download()[0] == threads * 0.5f);
  CHECK(big.download()[0] == (1ull << 33) * threads);
}

TEST_CASE_TEMPLATE("shared memory, static and dynamic", K, Plain, Observed) {
  const std::vector<float> in = ramp(200);
  Array<float> a(in), b(in.size());
  K::reverse(a.get(), b.get(), int(in.size()));
  const std::vector<float> out = b.download();
  for (size_t i = 0; i < in.size(); ++i) {
    const size_t from = i / 64 * 64 + 63 - i % 64;
    CHECK(out[i] == (from < in.size() ? in[from] : 0.0f) + (i % 2 ? in[i] : 0.0f));
  }
}

TEST_CASE("unwritten shared memory is NaN in every block") {
  KeepOptions keep;
  simt::options().workers = 1;  // so that each block follows one that has written
  Array<float> out(2 * 10);
  Plain::unwritten_shared(out.get(), 10);
  for (float x : out.download()) CHECK(std::isnan(x));
  CHECK_THROWS_AS(Observed::unwritten_shared(out.get(), 10), flash::KernelFault);
  for (const simt::Finding& finding : simt::findings()) CHECK(finding.kind == Kind::uninitialised);
  CHECK(simt::findings().size() == 2);
}

TEST_CASE_TEMPLATE("the same result in both orders and with any number of workers", K, Plain, Observed) {
  KeepOptions keep;
  const int rows = 37, columns = 100;
  const std::vector<float> in = ramp(rows * columns, 0.1f);
  std::vector<float> first;
  simt::Traffic traffic;
  for (auto order : {simt::Order::forward, simt::Order::backward})
    for (int workers : {1, 2, 4}) {
      simt::options() = {workers, order};
      Array<float> a(in), b(in.size());
      simt::reset_counters();
      K::softmax_rows(a.get(), b.get(), rows, columns);
      const std::vector<float> out = b.download();
      if (first.empty()) first = out, traffic = simt::counters().global;
      CHECK(out == first);
      CHECK(simt::counters().global.read_bytes == traffic.read_bytes);
      CHECK(simt::counters().global.requests == traffic.requests);
      CHECK(simt::counters().global.transactions == traffic.transactions);
    }
  double sum = 0;
  for (int j = 0; j < columns; ++j) sum += first[size_t(j)];
  CHECK(sum == doctest::Approx(1));
}

TEST_CASE_TEMPLATE("grids and blocks that are refused, or nothing", K, Plain, Observed) {
  K::empty({0, 1, 1}, {32, 1, 1}, 0);
  K::empty({1, 0, 1}, {32, 1, 1}, 0);
  K::empty({1, 1, 0}, {32, 1, 1}, 0);
  K::empty({1, 1, 1}, {1024, 1, 1}, 227 << 10);
  CHECK_THROWS_WITH_AS(K::empty({1, 1, 1}, {1025, 1, 1}, 0), doctest::Contains("1025 threads"), flash::LaunchError);
  CHECK_THROWS_AS(K::empty({1, 1, 1}, {32, 33, 1}, 0), flash::LaunchError);
  CHECK_THROWS_AS(K::empty({1, 1, 1}, {0, 1, 1}, 0), flash::LaunchError);
  CHECK_THROWS_AS(K::empty({1, 1, 1}, {1, 1, 65}, 0), flash::LaunchError);
  CHECK_THROWS_WITH_AS(K::empty({1, 65536, 1}, {1, 1, 1}, 0), doctest::Contains("65535"), flash::LaunchError);
  CHECK_THROWS_AS(K::empty({1, 1, 65536}, {1, 1, 1}, 0), flash::LaunchError);
  CHECK_THROWS_WITH_AS(K::empty({1, 1, 1}, {1, 1, 1}, (227 << 10) + 1), doctest::Contains("232449"),
                       flash::LaunchError);
  char out;
  CHECK_THROWS_WITH_AS(K::too_much_static_shared(&out), doctest::Contains("49153 bytes of __shared__ variables"),
                       flash::LaunchError);
}

TEST_CASE("more blocks than the observer has numbers for") {
  const uint32_t many = 600'000;
  Array<float> a(ramp(128)), b(128);
  for (int i = 0; i < 3; ++i) {  // numbers begin anew in between
    Observed::strided_copy(a.get(), b.get(), 1, 1);
    Observed::empty({many, 1, 1}, {1, 1, 1}, 0);
  }
  Observed::strided_copy(a.get(), b.get(), 1, 1);
  CHECK_THROWS_WITH_AS(Observed::empty({1 << 20, 1, 1}, {1, 1, 1}, 0), doctest::Contains("1048575"), flash::Error);
}

// ---- Mistakes

namespace {

struct Planted {
  Fault fault;
  const char* kernel;
  Kind kind;
  const char* who;  // block and thread, in a forward run on one worker
  const char* says;
  bool in_any_build = false;
};

constexpr Planted kPlanted[] = {
    {Fault::early_exit, "early_exit", Kind::early_exit, "block (0,0,0)", "thread (5,0,0) returned", true},
    {Fault::barrier_in_branch, "barrier_in_branch", Kind::divergence, "thread (32,0,0)", "__syncthreads", true},
    {Fault::two_barriers, "two_barriers", Kind::divergence, "thread (1,0,0)", "__syncthreads"},
    {Fault::warp_and_block_barrier, "warp_and_block_barrier", Kind::divergence, "block (0,0,0)", "__syncwarp", true},
    {Fault::different_collectives, "different_collectives", Kind::divergence, "thread (1,0,0)", "a shuffle", true},
    {Fault::not_in_own_mask, "not_in_own_mask", Kind::mask, "thread (16,0,0)", "lane 16", true},
    {Fault::overlapping_masks, "overlapping_masks", Kind::mask, "thread (8,0,0)", "0x000001ff", true},
    {Fault::absent_lane, "absent_lane", Kind::absent_lane, "thread (0,0,0)", "lane 20", true},
    {Fault::beyond_last_lane, "beyond_last_lane", Kind::absent_lane, "thread (32,0,0)", "lane 8", true},
    {Fault::exception, "exception", Kind::exception, "thread (0,0,0)", "not in a kernel", true},
    {Fault::missing_barrier, "missing_barrier", Kind::race, "block (0,0,0) thread (", "'tile'"},
    {Fault::missing_syncwarp, "missing_syncwarp", Kind::race, "block (0,0,0) thread (", "'tile'"},
    {Fault::shuffle_for_barrier, "shuffle_for_barrier", Kind::race, "block (0,0,0) thread (", "'tile'"},
    {Fault::byte_race, "byte_race", Kind::race, "block (0,0,0) thread (33,0,0)", "thread (32,0,0) writes"},
    {Fault::two_readers, "two_readers", Kind::race, "block (0,0,0) thread (62,0,0)", "another thread reads"},
    {Fault::atomic_and_plain, "atomic_and_plain", Kind::race, "thread (1,0,0)", "atomically changes"},
    {Fault::blocks_write_one_word, "blocks_write_one_word", Kind::race, "block (1,0,0) thread (0,0,0)",
     "of block (0,0,0)"},
    {Fault::blocks_read_after_write, "blocks_read_after_write", Kind::race, "block (1,0,0) thread (0,0,0)",
     "thread (1,0,0) of block (0,0,0) reads"},
    {Fault::past_end, "past_end", Kind::out_of_bounds, "thread (0,0,0)", "at byte 1024 of an array of 1024 bytes"},
    {Fault::before_start, "before_start", Kind::out_of_bounds, "thread (0,0,0)", "4 bytes before an array"},
    {Fault::host_pointer, "host_pointer", Kind::out_of_bounds, "thread (0,0,0)", "not of device memory"},
    {Fault::past_dynamic_shared, "past_dynamic_shared", Kind::out_of_bounds, "thread (63,0,0)", "byte 256 of 256"},
    {Fault::row_overflow, "row_overflow", Kind::bad_index, "thread (33,0,0)", "index 33"},
    {Fault::misaligned, "misaligned", Kind::misaligned, "thread (1,0,0)", "16 bytes"},
    {Fault::uninitialised_static, "uninitialised_static", Kind::uninitialised, "thread (7,0,0)", "'x' at byte 28"},
    {Fault::uninitialised_dynamic, "uninitialised_dynamic", Kind::uninitialised, "thread (7,0,0)", "dynamic_shared"},
    {Fault::uninitialised_global, "uninitialised_global", Kind::uninitialised, "thread (0,0,0)",
     "at byte 0 of an array"},
    {Fault::far_past_static_shared, "far_past_static_shared", Kind::out_of_bounds, "thread (0,0,0)",
     "not of device memory"},
};

// Runs a faulty kernel and returns the message.
template <class K>
std::string message_of(const Planted& planted) {
  Array<float> data(ramp(256)), result(64);
  std::vector<float> host(64);
  try {
    K::fault(planted.fault, planted.fault == Fault::host_pointer ? host.data() : data.get(), result.get());
  } catch (const flash::KernelFault& fault) {
    return fault.what();
  }
  return "";
}

template <class K>
void check_planted(const Planted& planted, bool forward) {
  CAPTURE(std::string(planted.kernel));
  const std::string message = message_of<K>(planted);
  INFO(message);
  REQUIRE(!simt::findings().empty());
  for (const simt::Finding& finding : simt::findings()) CHECK(finding.kind == planted.kind);
  CHECK(message.starts_with(std::string(planted.kernel) + (planted.kind == Kind::exception ? ", " : " at ")));
  if (planted.kind != Kind::exception)
    CHECK(message.find("faults.cu:" + std::to_string(K::fault_line())) != std::string::npos);
  CHECK(message.find(planted.says) != std::string::npos);
  if (forward) CHECK(message.find(planted.who) != std::string::npos);
}

}  // namespace

TEST_CASE("mistakes found in observed code") {
  KeepOptions keep;
  simt::options() = {1, simt::Order::forward};
  for (const Planted& planted : kPlanted) check_planted<Observed>(planted, true);
  CHECK(message_of<Observed>({Fault::none, "none", Kind::race, "", ""}) == "");
  CHECK(simt::findings().empty());
}

TEST_CASE("mistakes found in any code") {
  KeepOptions keep;
  simt::options() = {1, simt::Order::forward};
  for (const Planted& planted : kPlanted)
    if (planted.in_any_build) check_planted<Plain>(planted, true);
  CHECK(message_of<Plain>({Fault::none, "none", Kind::race, "", ""}) == "");
}

TEST_CASE("mistakes are found whatever the order of threads") {
  KeepOptions keep;
  simt::options() = {2, simt::Order::backward};
  for (const Planted& planted : kPlanted) {
    CAPTURE(std::string(planted.kernel));
    CHECK(message_of<Observed>(planted) != "");
    for (const simt::Finding& finding : simt::findings()) CHECK(finding.kind == planted.kind);
  }
}

TEST_CASE("an overrun from one kernel's shared variable into another's") {
  int found = 0;
  for (Fault fault : {Fault::past_static_shared_0, Fault::past_static_shared_1, Fault::past_static_shared_2}) {
    const std::string message = message_of<Observed>({fault, "", Kind::out_of_bounds, "", ""});
    found += message.find("outside every variable of this kernel") != std::string::npos;
  }
  CHECK(found >= 1);
}

TEST_CASE("a write past an array shows in its guard zones") {
  Array<float> data(ramp(100));
  CHECK(simt::guards_intact(data.get()));
  Plain::overrun(data.get(), 99);
  CHECK(simt::guards_intact(data.get()));
  for (int index : {-1, 100, 100 + 16000, -16000}) {
    Array<float> other(ramp(100));
    Plain::overrun(other.get(), index);
    CHECK_FALSE(simt::guards_intact(other.get()));
    CHECK_THROWS_AS(Observed::overrun(other.get(), index), flash::KernelFault);
  }
}

TEST_CASE("memory that a plain launch has written is not taken for unwritten") {
  Array<float> data(ramp(256)), result(64);
  Plain::fault(Fault::none, data.get(), result.get());
  Observed::fault(Fault::uninitialised_global, data.get(), result.get());
  simt::write(result.get(), ramp(64).data(), 64 * sizeof(float));
  simt::poison(result.get(), 64 * sizeof(float));
  CHECK_THROWS_AS(Observed::fault(Fault::uninitialised_global, data.get(), result.get()), flash::KernelFault);
}

// ---- Counters

TEST_CASE("bytes and sectors of strided copies") {
  const int blocks = 5;
  for (int stride : {1, 2, 4, 8, 16}) {
    Array<float> in(ramp(size_t(blocks) * 128 * stride)), out(blocks * 128);
    simt::reset_counters();
    Observed::strided_copy(in.get(), out.get(), stride, blocks);
    const simt::Counters& counted = simt::counters();
    const uint64_t warps = blocks * 4;
    CHECK(counted.launches == 1);
    CHECK(counted.global.read_bytes == warps * 128);
    CHECK(counted.global.write_bytes == warps * 128);
    CHECK(counted.global.requests == 2 * warps);
    CHECK(counted.global.transactions == warps * uint64_t(std::min(4 * stride, 32) + 4));
    CHECK(counted.global.ideal_transactions == warps * 8);
    CHECK(counted.shared.requests == 0);
    CHECK(counted.sites.size() == 2);
  }
}

TEST_CASE("bytes and sectors of vectors, halves and broadcasts") {
  Array<float> in(ramp(2 * 512)), out(2 * 512);
  simt::reset_counters();
  Observed::vector_copy(in.get(), out.get(), 2);
  CHECK(simt::counters().global.read_bytes == 4096);
  CHECK(simt::counters().global.requests == 16);
  CHECK(simt::counters().global.transactions == 16 * 16);
  CHECK(simt::counters().global.ideal_transactions == 16 * 16);
  CHECK(out.download()[0] == in.download()[3]);

  Array<uint16_t> halves(std::vector<uint16_t>(32, 0x3c00)), more(32);
  simt::reset_counters();
  Observed::half_copy(halves.get(), more.get());
  CHECK(simt::counters().global.read_bytes == 64);
  CHECK(simt::counters().global.write_bytes == 64);
  CHECK(simt::counters().global.requests == 2);
  CHECK(simt::counters().global.transactions == 4);

  simt::reset_counters();
  Observed::broadcast(in.get(), out.get());
  CHECK(simt::counters().global.read_bytes == 128);
  CHECK(simt::counters().global.transactions == 1 + 4);
  CHECK(simt::counters().global.ideal_transactions == 1 + 4);
}

TEST_CASE("bank conflicts with and without padding") {
  Array<float> in(ramp(1024)), out(1024);
  for (bool padded : {false, true}) {
    simt::reset_counters();
    Observed::transpose(in.get(), out.get(), padded);
    const simt::Traffic& shared = simt::counters().shared;
    CHECK(shared.read_bytes == 4096);
    CHECK(shared.write_bytes == 4096);
    CHECK(shared.requests == 64);
    CHECK(shared.ideal_transactions == 64);
    CHECK(shared.transactions == (padded ? 64u : 32u + 32u * 32u));
    CHECK(out.download()[1] == in.download()[32]);
  }
}

TEST_CASE("collectives are counted, by kernel and in all") {
  Array<int> out(std::vector<int>{0});
  simt::reset_counters();
  Observed::counted_collectives(out.get());
  Observed::counted_collectives(out.get());
  Plain::counted_collectives(out.get());
  const simt::Counters& counted = simt::counters();
  CHECK(counted.launches == 2);
  CHECK(counted.shuffles == 2 * 4);
  CHECK(counted.votes == 2 * 2);
  CHECK(counted.warp_barriers == 2 * 2);
  CHECK(counted.block_barriers == 2 * 3);
  CHECK(counted.barrier_warps == 2 * 3 * 2);
  CHECK(counted.atomics == 2 * 5);
  CHECK(counted.global.write_bytes == 2 * 5 * 4);
  REQUIRE(simt::counters_by_kernel().count("count_me") == 1);
  CHECK(simt::counters_by_kernel().at("count_me").shuffles == 8);
  simt::reset_counters();
  CHECK(simt::counters().launches == 0);
  CHECK(simt::counters_by_kernel().empty());
}

TEST_CASE("traffic by line of source") {
  Array<float> in(ramp(1024)), out(1024);
  simt::reset_counters();
  Observed::transpose(in.get(), out.get(), true);
  Observed::transpose(in.get(), out.get(), false);
  const auto lines = simt::traffic_by_line(simt::counters());
  REQUIRE(lines.size() == 4);  // of the two instances together
  for (const simt::LineTraffic& line : lines) {
    CHECK(line.line.starts_with("traffic.cu:"));
    CHECK(line.traffic.requests == 64);
    CHECK(line.traffic.read_bytes + line.traffic.write_bytes == 8192);
  }
}

// ---- Memory and the device

TEST_CASE("device memory") {
  for (size_t bytes : {0, 1, 1023, 1024, 1025, 100000}) {
    auto* memory = static_cast<unsigned char*>(simt::allocate(bytes));
    CHECK(uintptr_t(memory) % 1024 == 0);
    CHECK(std::all_of(memory, memory + bytes, [](unsigned char c) { return c == 0xff; }));
    CHECK(simt::guards_intact(memory));
    for (ptrdiff_t at :
         {-1l, -ptrdiff_t(simt::kGuardBytes), ptrdiff_t(bytes), ptrdiff_t(bytes + simt::kGuardBytes) - 1}) {
      const unsigned char before = memory[at];
      memory[at] = 0xff;
      CHECK_FALSE(simt::guards_intact(memory));
      memory[at] = before;
      CHECK(simt::guards_intact(memory));
    }
    simt::free(memory);
  }
  Array<float> a(10);
  float x[11] = {};
  CHECK_THROWS(simt::write(a.get(), x, 44));
  CHECK_THROWS(simt::read(x, a.get(), 44));
  CHECK_THROWS(simt::write(x, x, 4));
}

TEST_CASE("device memory takes what it says that it takes") {
  const auto resident = [] {
    std::ifstream file("/proc/self/statm");
    double all = 0, pages = 0;
    file >> all >> pages;
    return pages * double(sysconf(_SC_PAGESIZE));
  };
  constexpr size_t kBytes = 96 << 20;
  const double before = resident();
  void* memory = simt::allocate(kBytes);
  simt::poison(memory, kBytes);
  const double taken = resident() - before, said = simt::memory_of_array(kBytes, false);
  simt::free(memory);
  CHECK(taken > 0.95 * said);
  CHECK(taken < 1.05 * said);
}

TEST_CASE("the CPU as a device") {
  flash::Device& device = flash::cpu_device();
  CHECK(device.kind() == flash::DeviceKind::cpu);
  CHECK(device.name().starts_with("CPU executor ("));
  CHECK(device.free_bytes() > 0);
  CHECK_THROWS_WITH_AS(device.allocate(size_t(1) << 50), doctest::Contains("1125899906842624 bytes"), flash::Error);
  CHECK_THROWS_AS(device.allocate(SIZE_MAX), flash::Error);
  CHECK_THROWS_AS(device.allocate(device.free_bytes() + (64 << 20)), flash::Error);
  // What says whether a byte is written takes a byte, too.
  CHECK_THROWS_WITH_AS(device.allocate(device.free_bytes() / 2 + (64 << 20)), doctest::Contains("twice as many"),
                       flash::Error);
  void* memory = device.allocate(64);
  const float in[16] = {1, 2, 3};
  float out[16];
  device.upload(memory, in, 64);
  device.download(out, memory, 64);
  CHECK(std::equal(in, in + 16, out));
  device.poison(memory, 64);
  device.download(out, memory, 64);
  for (float x : out) CHECK(std::isnan(x));
  CHECK(device.guards_intact(memory));
  device.release(memory);
  Array<float> a(ramp(128)), b(128);
  device.reset_traffic();
  const auto ms = device.times_ms(2, [&](int i) {
    if (i == 0) Observed::strided_copy(a.get(), b.get(), 1, 1);
  });
  REQUIRE(ms.size() == 2);
  CHECK(ms[0] > ms[1]);
  REQUIRE(device.traffic().has_value());
  CHECK(device.traffic()->read_bytes == 512);
  CHECK(device.traffic()->write_bytes == 512);
}

TEST_SUITE_END();
