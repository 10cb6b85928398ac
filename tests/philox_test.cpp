// The dropout mask: the generator's published answers, and what a mask must be like.
#include <doctest/doctest.h>

#include <cmath>

#include "reference_cpu/dropout.h"

namespace flash::reference {
namespace {

using Words = std::array<uint32_t, 4>;

// How many of 16 × 64 × 256 weights the mask keeps.
struct Count {
  double kept = 0, total = 0;
};
Count count_kept(const Problem& problem) {
  const DropoutMask mask(problem);
  Count count;
  for (int head = 0; head < 16; ++head) {
    for (int i = 0; i < 64; ++i) {
      for (int j = 0; j < 256; ++j, ++count.total) count.kept += mask.keeps(head, i, j);
    }
  }
  return count;
}

// The share of weights on which two masks agree.
double agreement(const Problem& a, const Problem& b) {
  const DropoutMask mask_a(a), mask_b(b);
  double same = 0;
  for (int i = 0; i < 128; ++i) {
    for (int j = 0; j < 128; ++j) same += mask_a.keeps(3, i, j) == mask_b.keeps(3, i, j);
  }
  return same / (128 * 128);
}

Problem with_dropout(double p, uint64_t seed = 7, uint32_t offset = 0) {
  Problem problem;
  problem.dropout = p;
  problem.seed = seed;
  problem.offset = offset;
  return problem;
}

TEST_SUITE_BEGIN("philox");

TEST_CASE("Philox4x32-10 gives the answers published with Random123") {
  CHECK(philox4x32_10({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32_10({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("counter, key and word of an element are where the definition says") {
  const Problem problem = with_dropout(0.5, 0x0123456789abcdef, 77);
  const DropoutMask mask(problem);
  for (int j = 0; j < 40; ++j) {
    const Words words = philox4x32_10({uint32_t(j / 4), 5, 11, 77}, {0x89abcdef, 0x01234567});
    CHECK(mask.keeps(11, 5, j) == (words[j % 4] >= 0x80000000));
  }
}

TEST_CASE("the kept share is 1 − p") {
  for (const double p : {0.1, 0.5, 0.9}) {
    CAPTURE(p);
    const Count count = count_kept(with_dropout(p));
    const double sigma = std::sqrt(p * (1 - p) / count.total);
    CHECK(std::abs(count.kept / count.total - (1 - p)) < 4 * sigma);
  }
}

TEST_CASE("p = 0 keeps every weight") {
  const Count count = count_kept(with_dropout(0));
  CHECK(count.kept == count.total);
}

TEST_CASE("another seed, either half of it, or another offset is an unrelated mask") {
  const Problem problem = with_dropout(0.5);
  CHECK(agreement(problem, problem) == 1);
  for (const Problem& other :
       {with_dropout(0.5, 8), with_dropout(0.5, 7 + (uint64_t{1} << 32)), with_dropout(0.5, 7, 1)}) {
    CHECK(std::abs(agreement(problem, other) - 0.5) < 0.02);
  }
}

TEST_CASE("neighbours in each direction are unrelated") {
  const Problem problem = with_dropout(0.5);
  const DropoutMask mask(problem);
  double same_head = 0, same_query = 0, same_key = 0;
  for (int i = 0; i < 128; ++i) {
    for (int j = 0; j < 128; ++j) {
      const bool kept = mask.keeps(2, i, j);
      same_head += kept == mask.keeps(3, i, j);
      same_query += kept == mask.keeps(2, i + 1, j);
      same_key += kept == mask.keeps(2, i, j + 1);
    }
  }
  for (const double same : {same_head, same_query, same_key}) CHECK(std::abs(same / (128 * 128) - 0.5) < 0.02);
}

TEST_SUITE_END();

}  // namespace
}  // namespace flash::reference
